"""hc.retrying: rows whose worker has died run again, on a new pool."""

from __future__ import annotations

import functools
import os
import signal
from concurrent import futures

import forked
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc

X = jnp.arange(12.0)
LIKE = jax.ShapeDtypeStruct((), np.float32)

POOLS = {
    "futures": lambda: futures.ProcessPoolExecutor(2, mp_context=forked.CONTEXT),
    "multiprocessing": lambda: forked.CONTEXT.Pool(2),
}


def dies_at(folder, x, number, times):
    """x + 1; the worker dies at one row, the first so many times."""
    with open(folder / f"row {float(x):g}", "a") as file:
        file.write("x")
    if x == number:
        deaths = (folder / f"row {float(x):g}").stat().st_size
        if deaths <= times:
            os.kill(os.getpid(), signal.SIGKILL)
    return x + np.float32(1)


def runs_of(x, folder):
    return (folder / f"row {float(x):g}").stat().st_size


def mapped(pool, folder, times, **options):
    def row(x):
        how = {"vmap_method": "parallel", "executor": pool, **options}
        return hc.call(functools.partial(dies_at, folder), LIKE, x, 5.0, times, **how)

    return jax.jit(jax.vmap(row))


@pytest.mark.parametrize("kind", POOLS)
def test_rows_of_a_dead_worker_run_again(kind, caplog, tmp_path):
    with hc.retrying(POOLS[kind], retries=2) as pool:
        got = mapped(pool, tmp_path, times=2)(X)
        np.testing.assert_array_equal(got, X + 1)
        assert runs_of(5, tmp_path) == 3
        first = pool.pool()
        np.testing.assert_array_equal(mapped(pool, tmp_path, times=0)(X + 20), X + 21)
        assert pool.pool() is first  # without a death the pool stays
    told = [r.message for r in caplog.records if "goes on with a new pool" in r.message]
    assert len(told) == 2
    assert "(hc.retrying, 0 more times)" in told[1]


def test_results_that_are_there_are_kept(tmp_path):
    """One worker: the rows before the deadly one have ended."""

    def one():
        return futures.ProcessPoolExecutor(1, mp_context=forked.CONTEXT)

    with hc.retrying(one) as pool:
        np.testing.assert_array_equal(mapped(pool, tmp_path, times=1)(X), X + 1)
    assert [runs_of(x, tmp_path) for x in range(3)] == [1, 1, 1]
    assert runs_of(5, tmp_path) == 2


def test_the_last_failure_is_raised(tmp_path):
    with hc.retrying(POOLS["futures"], retries=1) as pool:
        with pytest.raises(futures.BrokenExecutor), hc.reraise():
            jax.block_until_ready(mapped(pool, tmp_path, times=9)(X))
        assert runs_of(5, tmp_path) == 2
        # The broken pool has gone, so the next call works.
        np.testing.assert_array_equal(mapped(pool, tmp_path, times=0)(X + 20), X + 21)


def test_calls_with_effects_are_not_repeated(tmp_path):
    with hc.retrying(POOLS["futures"], retries=5) as pool:
        f = mapped(pool, tmp_path, times=1, order="unordered")
        with pytest.raises(futures.BrokenExecutor), hc.reraise():
            jax.block_until_ready(f(X))
        assert runs_of(5, tmp_path) == 1
        np.testing.assert_array_equal(f(X + 20), X + 21)


def fails(folder, x):
    if x == 7:
        raise ValueError("seven")
    return dies_at(folder, x, 5.0, 1)


def test_a_row_that_fails_is_numbered_in_the_call(tmp_path):
    with hc.retrying(POOLS["futures"]) as pool:
        how = {"vmap_method": "parallel", "executor": pool}
        fn = functools.partial(fails, tmp_path)
        f = jax.jit(jax.vmap(lambda x: hc.call(fn, LIKE, x, **how)))
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"row 7,"):
            jax.block_until_ready(f(X))


def test_threads_never_die():
    pool = hc.retrying(lambda: futures.ThreadPoolExecutor(2))
    f = jax.vmap(
        lambda x: hc.call(np.sin, LIKE, x, vmap_method="parallel", executor=pool)
    )
    np.testing.assert_allclose(f(X), np.sin(X), rtol=1e-6)
    pool.close()
    np.testing.assert_allclose(f(X), np.sin(X), rtol=1e-6)  # makes a new one
    pool.close()


@pytest.mark.parametrize("make", [3, None, "pool"])
def test_no_function(make):
    with pytest.raises(hc.errors.SpecError, match="takes a function that makes a pool"):
        hc.retrying(make)


def test_a_pool_in_place_of_a_function():
    wanted = pytest.raises(hc.errors.SpecError, match="takes a function that makes a")
    with futures.ThreadPoolExecutor(1) as pool, wanted:
        hc.retrying(pool)


@pytest.mark.parametrize("retries", [0, -1, True, 1.0])
def test_no_number(retries):
    with pytest.raises(hc.errors.SpecError, match="retries= of hc.retrying should be"):
        hc.retrying(POOLS["futures"], retries=retries)
