"""Rows on executors: moments that a test must hold open, and what is sent."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
from concurrent import futures
from multiprocessing.pool import ThreadPool

import forked
import jax
import numpy as np
import pytest
from policies import adds_and_writes, lacks, parallel

import hostcall as hc
from hostcall._policies import chunks, executors, files, layer, on_executor
from hostcall._runtime import workers

X = np.arange(40, dtype=np.float32)


def fails(x):
    if x > 1:
        raise LookupError(f"no {x:.1f} here")
    return x


def appears(path):
    while not os.path.exists(path):
        time.sleep(0.01)


def test_what_a_run_is_where_it_is_sent(monkeypatch):
    """Itself in its own process, and None in another, even one of the same id."""
    rows = [((0.5,), {}), ((0.2,), {})]
    of = on_executor.OnExecutor(
        layer.TimedFunction(fails, workers.ThreadSettings.here())
    )
    with ThreadPool(1) as pool:
        run = on_executor.RunningRows(of, pool, rows, layer.RowContext())
    sent = pickle.dumps((run, 0, None, None, fails, rows))
    assert pickle.loads(sent)[0] is run
    monkeypatch.setattr(chunks, "runs", chunks.PickledRuns())
    assert pickle.loads(sent)[0] is None
    assert chunks.run_chunk(*pickle.loads(sent)) == [0.5, 0.2]
    monkeypatch.undo()
    del run
    with pytest.raises(futures.CancelledError, match="did not begin"):
        pickle.loads(sent)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_an_executor_that_will_fork_is_told_of(method, caplog):
    """Nothing is forked here: a program of the tests has started JAX's threads."""
    context = multiprocessing.get_context(method)
    with futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        workers = executors.Workers(pool)
        workers.open()
        workers.drop()
    told = "may hang. Make the executor with mp_context=multiprocessing.get_context("
    assert (told in caplog.text) == (method == "fork")


def test_a_row_that_fails_when_its_call_is_over(monkeypatch):
    """No other row begins then, whatever the thread of that row had read before."""
    begun, over, failing = [], threading.Event(), []

    def slow_min(*values, **key):
        least = min(*values, **key)
        if threading.get_ident() in failing:
            assert over.wait(60)
        return least

    def host(x):
        begun.append(int(x))
        if x == 2:
            failing.append(threading.get_ident())
            raise LookupError("two")
        assert over.wait(60)
        time.sleep(0.1)  # the other thread goes on meanwhile
        return x

    monkeypatch.setattr(on_executor, "min", slow_min, raising=False)
    with ThreadPool(2) as pool:  # chunks of 2 rows, which it can't take back
        f = jax.jit(jax.vmap(parallel(host, pool, timeout=0.5)))
        with pytest.raises(hc.errors.CallTimeoutError), hc.reraise():
            jax.block_until_ready(f(X[:16]))
        over.set()
        pool.close()
        pool.join()
    assert sorted(begun) == [0, 2]


def test_rows_that_are_late_are_not_kept():
    """They are in no cycle: the executor ends its tasks when the call is over."""

    def runs():
        return sum(type(x) is on_executor.RunningRows for x in gc.get_objects())

    end = threading.Event()

    def host(x):
        assert end.wait(60)
        return x

    gc.collect()
    before = runs()
    gc.disable()
    try:
        with ThreadPool(2) as pool:
            f = jax.jit(jax.vmap(parallel(host, pool, timeout=0.1)))
            for _ in range(3):
                with pytest.raises(jax.errors.JaxRuntimeError):
                    jax.block_until_ready(f(X))
            end.set()
            pool.close()
            pool.join()
        assert runs() - before <= 1  # the newest exception keeps its frames
    finally:
        gc.enable()


def test_a_worker_that_dies_after_a_row_has_failed(tmp_path, monkeypatch):
    """The caller then does not wait for ever."""
    drop = executors.MultiprocessingPool.drop

    def told(self):
        drop(self)
        (tmp_path / "dropped").touch()

    monkeypatch.setattr(executors.MultiprocessingPool, "drop", told)
    host = functools.partial(fails_and_dies, folder=str(tmp_path))
    with forked.CONTEXT.Pool(2) as pool:
        f = jax.jit(jax.vmap(parallel(host, pool)))
        with pytest.raises(LookupError, match="no 0"), hc.reraise():
            jax.block_until_ready(f(X[:2]))


def fails_and_dies(x, folder):
    other = os.path.join(folder, "other")
    if x == 0:
        appears(other)
        raise LookupError("no 0")
    open(other, "w").close()
    appears(os.path.join(folder, "dropped"))  # the caller knows of row 0
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_of_a_pool_that_end_when_they_have_done_enough(tmp_path, monkeypatch):
    """Workers that ended by design don't count as dead, even if looked at meanwhile."""
    dead = executors.MultiprocessingPool.dead

    def asked(self, unfinished):
        (tmp_path / "asked").touch()
        return dead(self, unfinished)

    monkeypatch.setattr(executors.MultiprocessingPool, "dead", asked)
    waits = functools.partial(waits_for, path=str(tmp_path / "asked"))
    with forked.CONTEXT.Pool(2, maxtasksperchild=1) as pool:
        x = X[:6]
        np.testing.assert_array_equal(jax.vmap(parallel(waits, pool))(x), x)


def waits_for(x, path):
    appears(path)
    return x


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder for arrays that rows share."""
    monkeypatch.setattr(files, "_memory_for", lambda size: str(tmp_path))
    return tmp_path


class Weighed(futures.ProcessPoolExecutor):
    """Records the bytes that it receives, and the files in a folder at that time."""

    def submit(self, fn, /, *args, **kwargs):
        self.bytes += len(pickle.dumps(args))
        self.files = [file.stat().st_size for file in self.folder.iterdir()]
        return super().submit(fn, *args, **kwargs)


def test_a_shared_argument_goes_once_and_is_gone_afterwards(folder):
    table = np.ones(1_000_000, np.float32)
    with Weighed(2, mp_context=forked.CONTEXT) as executor:
        executor.bytes, executor.folder = 0, folder
        f = jax.jit(jax.vmap(parallel(adds_and_writes, executor), (0, None)))
        np.testing.assert_array_equal(f(X, table), X + 2)
        assert executor.bytes < 40_000
        assert sorted(executor.files) == [0, 4_000_000]
        with pytest.raises(AttributeError), hc.reraise():
            jax.block_until_ready(
                jax.jit(jax.vmap(parallel(lacks, executor), (0, None)))(X, table)
            )
    assert not list(folder.iterdir())
