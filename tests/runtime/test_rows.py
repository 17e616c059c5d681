"""Parallel rows: chunks, shared arguments, and workers that die."""

import collections
import dataclasses
import functools
import os
import pickle
import signal
import threading
from concurrent import futures
from multiprocessing.pool import ThreadPool

import forked
import jax
import numpy as np
import pytest
from limits import holds_in_time
from policies import adds_and_writes, lacks, parallel
from test_executors import dask_client, loky_pool, ray_pool

import hostcall as hc

X = np.arange(40, dtype=np.float32)


# --- Functions of this module, for other processes -----------------------------------


def fails_from(x, first):
    if x >= first:
        raise LookupError(f"no {x:.0f}")
    return x


def dies_at(x, row, how):
    if x == row:
        os.kill(os.getpid(), signal.SIGKILL) if how else os._exit(0)
    return x


def counts(x, folder):
    with open(os.path.join(folder, f"{x:.0f}"), "a") as file:
        file.write("x")
    if x == 3 and os.path.getsize(os.path.join(folder, "3")) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


@pytest.fixture(scope="module")
def processes():
    with futures.ProcessPoolExecutor(2, mp_context=forked.CONTEXT) as pool:
        yield pool


@pytest.fixture(scope="module")
def pool():
    with forked.CONTEXT.Pool(2) as pool:
        yield pool


# --- Chunks ----------------------------------------------------------------------------


class Counted(futures.ThreadPoolExecutor):
    """Counts the tasks that it receives."""

    tasks = 0

    def submit(self, *args, **kwargs):
        self.tasks += 1
        return super().submit(*args, **kwargs)


@pytest.mark.parametrize(
    ("rows", "workers", "tasks"),
    [(1, 2, 1), (8, 2, 8), (9, 2, 5), (400, 2, 8), (40, 40, 40)],
)
def test_rows_go_in_four_chunks_for_each_worker(rows, workers, tasks):
    x = np.arange(rows, dtype=np.float32)
    with Counted(workers) as executor:
        result = jax.jit(jax.vmap(parallel(lambda x: x * 2, executor)))(x)
        np.testing.assert_array_equal(result, x * 2)
        assert executor.tasks == tasks


def test_rows_of_an_executor_that_does_not_say_how_many_it_runs():
    """Each row is a task of its own, since rows may wait for each other."""

    class Unbounded(futures.Executor):
        def submit(self, fn, /, *args, **kwargs):
            task = futures.Future()

            def run():
                try:
                    task.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    task.set_exception(error)

            threading.Thread(target=run).start()
            return task

    meeting = threading.Barrier(len(X), timeout=60)

    def meets(x):
        meeting.wait()
        return x

    np.testing.assert_array_equal(jax.vmap(parallel(meets, Unbounded()))(X), X)


class Pickles(futures.ThreadPoolExecutor):
    """Runs its tasks in this process, but pickles them first, as Dask may."""

    def submit(self, *task):
        return super().submit(run_pickled, pickle.dumps(task))


def run_pickled(task):
    fn, *args = pickle.loads(task)
    return fn(*args)


def knows(x):
    return x * 100 + hc.current().row[0]


def test_a_row_that_was_pickled_but_runs_here_knows_which_it_is():
    with Pickles(3) as executor:
        f = jax.jit(jax.vmap(parallel(knows, executor)))
        np.testing.assert_array_equal(f(X), X * 100 + np.arange(40))


@pytest.mark.parametrize("order", ["pure", "unordered"])
@pytest.mark.parametrize("threads", [1, 3, 16])
def test_each_row_of_a_chunk_knows_which_it_is(threads, order):
    def host(x):
        assert hc.current().order == order
        return x * 100 + hc.current().row[0]

    with futures.ThreadPoolExecutor(threads) as executor:
        f = jax.jit(jax.vmap(parallel(host, executor, order=order)))
        np.testing.assert_array_equal(f(X), X * 100 + np.arange(40))


def test_the_first_row_that_fails_is_raised_and_none_is_begun_after_it():
    """The first in row order, even if a later row fails first."""
    seen = collections.Counter()
    later = threading.Event()

    def host(x):
        seen[int(x)] += 1
        if x == 9:
            later.set()
            raise LookupError("nine")
        if x == 3:
            assert later.wait(60)
            raise LookupError("three")
        return x

    with futures.ThreadPoolExecutor(2) as executor:  # chunks of 5 rows
        f = jax.jit(jax.vmap(parallel(host, executor)))
        with pytest.raises(LookupError, match="three"), hc.reraise():
            jax.block_until_ready(f(X))
    assert max(seen.values()) == 1
    assert not set(seen) & set(range(20, 40))


def test_the_number_of_a_row_that_fails_in_another_process(processes):
    f = jax.jit(jax.vmap(parallel(returns_a_lock, processes)))
    with pytest.raises(TypeError, match="cannot pickle") as caught, hc.reraise():
        jax.block_until_ready(f(X[:4]))
    assert "row 2 of 4" in caught.value.__notes__[-1]
    with pytest.raises(LookupError, match="no 7"), hc.reraise():
        jax.block_until_ready(
            jax.jit(jax.vmap(parallel(fails_from, processes), (0, None)))(X, 7)
        )


def returns_a_lock(x):
    return threading.Lock() if x == 2 else x


def test_rows_that_are_late_are_not_begun():
    begun = []
    hold = threading.Event()

    def host(x):
        begun.append(x)
        hold.wait(60)
        return x

    with futures.ThreadPoolExecutor(2) as executor:
        f = jax.jit(jax.vmap(parallel(host, executor, timeout=2.0)))
        with (
            pytest.raises(hc.errors.CallTimeoutError, match="one of rows 0 to 4 of 40"),
            hc.reraise(),
        ):
            jax.block_until_ready(f(X))
        hold.set()
    assert len(begun) == 2


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    row: int


def raises_frozen(x):
    raise Frozen(int(x))


def test_an_exception_that_takes_no_attributes():
    f = jax.jit(jax.vmap(parallel(raises_frozen, None)))
    with pytest.raises(Frozen) as caught, hc.reraise():
        jax.block_until_ready(f(X))
    assert caught.value.row == 0


class Counter:
    count = 0

    def __call__(self):
        self.count += 1
        return np.float32(self.count)


def counts_up(x, counter):
    return counter()


@pytest.mark.parametrize("kind", ["threads", "processes", "pool", "coroutines"])
def test_an_exception_of_a_row_in_an_eager_vmap_is_as_it_was_raised(kind, request):
    """It gets no attributes that the function did not give it."""

    async def awaits(x, first):
        return fails_from(x, first)

    sent = kind in ("processes", "pool")
    executor = request.getfixturevalue(kind) if sent else None
    fn = awaits if kind == "coroutines" else fails_from
    with pytest.raises(LookupError, match="no 3") as caught:
        jax.vmap(parallel(fn, executor), in_axes=(0, None))(X[:8], np.float32(3))
    assert vars(caught.value).keys() <= {"__notes__"}


def test_rows_of_two_calls_that_raise_one_exception():
    """As a library that keeps its errors does: each call says which of its rows failed,
    though the others' has said so before.
    """
    bad = LookupError("no")

    def host(x, first):
        if x >= first:
            raise bad
        return x

    f = jax.jit(jax.vmap(parallel(host, None), in_axes=(0, None)))
    for first in (1, 0, 2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"row {first}, called"):
            jax.block_until_ready(f(X[:4], np.float32(first)))
    with pytest.raises(LookupError):
        jax.vmap(parallel(host, None), in_axes=(0, None))(X[:4], np.float32(3))
    with pytest.raises(jax.errors.JaxRuntimeError, match="`.*host`, called"):
        jax.block_until_ready(jax.jit(parallel(host, None))(X[0], np.float32(0)))
    bad.with_traceback(None)  # the function holds it, and its frames the programs


def test_rows_of_a_chunk_share_nothing(processes):
    """Each row behaves as a task of its own."""

    def call(x):
        return hc.call(
            hc.host(counts_up, executor=processes),
            x,
            x,
            counter=Counter(),
            vmap_method="parallel",
        )

    assert set(jax.jit(jax.vmap(call))(X).tolist()) == {1}


def test_pools_inside_rows_inside_rows():
    """Nested deeper than the default pool has threads."""

    def nested(depth):
        def host(x):
            if depth == 0:
                return x
            return np.asarray(
                jax.vmap(parallel(nested(depth - 1), None))(np.full(3, x))
            )[0]

        return host

    f = jax.jit(jax.vmap(parallel(nested(3), None, order="unordered")))
    np.testing.assert_array_equal(f(X), X)


@pytest.mark.parametrize("kept", [2, 1024])
def test_rows_whose_residuals_are_there_beside_rows_whose_are_not(processes, kept):
    f = hc.host(
        np.sin, result=hc.results.like(0), vmap_method="parallel", executor=processes
    )
    f.defvjp(sine_and_slope, times)
    hc.configure(residuals=kept)
    try:
        slopes = jax.jit(jax.vmap(jax.grad(f)))(X)
    finally:
        hc.configure(residuals=1024)
    np.testing.assert_allclose(slopes, np.cos(X), rtol=1e-5)


def sine_and_slope(x):
    return np.sin(x), np.cos(x)


def times(slope, cotangent):
    return (slope * cotangent,)


# --- What all rows share ---------------------------------------------------------------


@pytest.fixture(
    scope="module", params=["processes", "pool", "loky", "dask", "ray", "threads"]
)
def anywhere(request):
    made = {
        "processes": lambda: futures.ProcessPoolExecutor(2, mp_context=forked.CONTEXT),
        "pool": functools.partial(forked.CONTEXT.Pool, 2),
        "loky": loky_pool,
        "dask": dask_client,
        "ray": ray_pool,
        "threads": functools.partial(ThreadPool, 2),
    }[request.param]
    with made() as executor:
        yield executor


@pytest.mark.filterwarnings("default")  # of other libraries, at their end
@pytest.mark.parametrize("dtype", [np.float32, jax.numpy.bfloat16])
def test_each_row_has_the_shared_argument_for_itself(anywhere, dtype):
    table = np.arange(50_000) % 128
    table = table.astype(dtype)
    f = jax.vmap(parallel(adds_and_writes, anywhere), (0, None))
    wanted = X + np.float32(table[7] + table[-1])
    for wrap in (jax.jit, lambda f: f):
        np.testing.assert_array_equal(wrap(f)(X, table), wanted)


def test_an_argument_that_cannot_be_sent_beside_a_shared_one(processes):
    def call(x, table):
        return hc.call(
            hc.host(lacks, executor=processes),
            x,
            x,
            table,
            lock=threading.Lock(),
            vmap_method="parallel",
        )

    for size in (4, 20_000):
        with pytest.raises(hc.errors.SpecError, match="can't be sent"), hc.reraise():
            jax.block_until_ready(jax.jit(jax.vmap(call, (0, None)))(X, np.ones(size)))


# --- Workers that die -------------------------------------------------------------------


@pytest.mark.parametrize("how", ["killed", ""], ids=["killed", "exits with 0"])
@pytest.mark.parametrize("row", [0, 39])
def test_a_worker_of_a_pool_that_dies(pool, row, how):
    f = jax.jit(jax.vmap(parallel(dies_at, pool), (0, None, None)))
    with pytest.raises(futures.BrokenExecutor) as caught, hc.reraise():
        jax.block_until_ready(f(X, row, bool(how)))
    assert "a worker of executor= has died (process " in str(caught.value)
    assert ("signal 9" if how else "exit code 0") in str(caught.value)
    assert "rows of `dies_at`" in str(caught.value)
    np.testing.assert_array_equal(f(X, -1, False), X)  # the pool goes on


@pytest.mark.parametrize("how", [True, False], ids=["killed", "exits with 0"])
def test_a_worker_that_dies_among_those_that_end_by_themselves(how):
    with forked.CONTEXT.Pool(2, maxtasksperchild=1) as pool:
        f = jax.jit(jax.vmap(parallel(dies_at, pool), (0, None, None)))
        with pytest.raises(futures.BrokenExecutor), hc.reraise():
            jax.block_until_ready(f(X[:6], 3, how))


@pytest.mark.filterwarnings("default")  # Dask's
@pytest.mark.parametrize("order", ["pure", "unordered"])
def test_dask_runs_rows_with_effects_once(order, tmp_path):
    """Dask sends the rows of a dead worker to another one."""
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        host = functools.partial(counts, folder=str(tmp_path))
        f = jax.jit(jax.vmap(parallel(host, client, order=order)))
        if order == "pure":
            np.testing.assert_array_equal(f(X[:8]), X[:8])
            assert (tmp_path / "3").read_text() == "xx"
        else:
            with (
                pytest.raises(hc.errors.HostcallError, match="must run only once"),
                hc.reraise(),
            ):
                jax.block_until_ready(f(X[:8]))
            assert all(file.read_text() == "x" for file in tmp_path.iterdir())
            assert (tmp_path / "3").read_text() == "x"


# --- Ctrl-C -----------------------------------------------------------------------------

INTERRUPTED = """
import multiprocessing, os, signal, sys, time
from concurrent import futures
from pathlib import Path
import numpy as np

folder = Path(sys.argv[2])

def host(x):
    (folder / f"{x:.0f}").touch()
    while not (folder / "interrupted").exists():
        time.sleep(0.01)
    return x

def main():
    import jax, hostcall as hc
    kind, order = sys.argv[1].split()
    spawn = multiprocessing.get_context("spawn")
    pool = {
        "threads": lambda: futures.ThreadPoolExecutor(2),
        "processes": lambda: futures.ProcessPoolExecutor(2, mp_context=spawn),
        "pool": lambda: spawn.Pool(2),
    }[kind]()
    f = jax.jit(jax.vmap(lambda x: hc.call(
        hc.host(host, executor=pool), x, x, vmap_method="parallel", order=order)))
    print("ready", flush=True)
    try:
        f(np.arange(40, dtype=np.float32)).block_until_ready()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    (folder / "interrupted").touch()
    getattr(pool, "shutdown", getattr(pool, "close", None))()
    if kind == "pool":
        pool.join()
    begun = [path for path in folder.iterdir() if path.name.isdigit()]
    print(len(begun))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        *(("threads", "pure"), ("threads", "unordered")),
        *(("processes", "pure"), ("pool", "unordered")),
    ],
)
def test_ctrl_c_drops_rows_that_have_not_begun(kind, order, tmp_path, start_python):
    folder = tmp_path / "rows"
    folder.mkdir()
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    process = start_python(
        "import sys; sys.path.insert(0, sys.argv[3]); import script; script.main()",
        f"{kind} {order}",
        str(folder),
        str(tmp_path),
    )
    assert holds_in_time(lambda: len(list(folder.iterdir())) == 2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == "interrupted\n2\n", out + err
