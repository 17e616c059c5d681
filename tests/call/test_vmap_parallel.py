"""Rows on executors, and rows that fail."""

import collections
import os
import re
import threading
from concurrent import futures

import forked
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc

METHODS = ["sequential", "parallel", None]
EAGER_AND_JIT = pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit], ids=["eager", "jit"]
)
X = np.arange(12, dtype=np.float32).reshape(4, 3)
Y = np.arange(3, dtype=np.float32) * 10


def like(shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def square_in_process(x, *, offset):
    return x * x + offset, np.int64(os.getpid()).astype(np.int32)


@pytest.mark.parametrize("kind", ["default", "threads", "processes"])
def test_parallel_rows_on_an_executor(kind):
    pool = {
        "default": lambda: None,
        "threads": lambda: futures.ThreadPoolExecutor(3, thread_name_prefix="mine"),
        "processes": lambda: futures.ProcessPoolExecutor(2, mp_context=forked.CONTEXT),
    }[kind]()
    result = (like((3,)), like((), np.int32))
    f = jax.vmap(
        lambda x, offset: hc.call(
            hc.host(square_in_process, executor=pool),
            result,
            x,
            offset=offset,
            vmap_method="parallel",
        ),
        in_axes=(0, None),
    )
    try:
        values, processes = jax.jit(f)(X, Y)
    finally:
        if pool is not None:
            pool.shutdown()
    np.testing.assert_array_equal(values, X * X + Y)
    elsewhere = {int(p) for p in processes} - {os.getpid()}
    assert bool(elsewhere) == (kind == "processes")
    assert kind != "processes" or os.getpid() not in processes


def test_each_row_on_a_thread_owns_what_all_rows_share():
    def host(x, shared):
        assert (shared == 1).all()
        shared += x  # its own array: the other rows see nothing of it
        return shared.sum()

    shared = np.ones(100_000, np.float32)
    f = lambda x: hc.call(host, like(()), x, shared, vmap_method="parallel")
    got = jax.jit(jax.vmap(f))(np.arange(4, dtype=np.float32))
    np.testing.assert_array_equal(got, [1e5, 2e5, 3e5, 4e5])


@pytest.mark.parametrize("pooled", [False, True], ids=["default pool", "own pool"])
def test_parallel_rows_run_at_the_same_time_and_know_their_row(pooled):
    meeting = threading.Barrier(4, timeout=60)

    def host(x):
        meeting.wait()  # passes only once all four rows have come
        current = hc.current()
        assert current.order == "unordered"
        return x * 10 + current.row[0]

    with futures.ThreadPoolExecutor(4) as pool:
        f = jax.vmap(
            lambda x: hc.call(
                hc.host(host, executor=pool if pooled else None), x, x, vmap_method="parallel", order="unordered",
            )
        )  # fmt: skip
        xs = np.arange(4, dtype=np.int32)
        np.testing.assert_array_equal(jax.jit(f)(xs), xs * 10 + xs)


# --- Failing rows --------------------------------------------------------------------------


@EAGER_AND_JIT
@pytest.mark.parametrize("method", METHODS)
def test_exception_of_a_row(method, wrap):
    seen = collections.Counter()

    def host(x):
        seen[int(x)] += 1
        if x == 2:
            raise KeyError("row of two")
        return x

    f = wrap(jax.vmap(lambda x: hc.call(host, x, x, vmap_method=method)))
    with pytest.raises(KeyError, match="row of two") as caught, hc.reraise():
        jax.block_until_ready(f(np.arange(4, dtype=np.int32)))
    assert caught.value is hc.errors.last_error()
    assert max(seen.values()) == 1
    assert method == "parallel" or seen.total() == 3  # no row after the failing one
    good = np.arange(4, dtype=np.int32) + 3
    np.testing.assert_array_equal(f(good), good)


def test_a_failing_row_is_named():
    def host(x, y):
        return {}[int(x)] if (x, y) == (1, 2) else x

    f = jax.vmap(jax.vmap(lambda x, y: hc.call(host, x, x, y), (None, 0)), (0, None))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=re.escape("row (1, 2), called at")
    ):
        jax.block_until_ready(jax.jit(f)(jnp.arange(3), jnp.arange(4)))
