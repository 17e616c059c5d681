"""Parallel rows, timeouts and masks in combination."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import threading
import weakref
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import forked
import jax
import jax.numpy as jnp
import numpy as np
import policies
import pytest
from limits import HANG_SECONDS

import hostcall as hc

SCALAR = jax.ShapeDtypeStruct((), np.float32)
MODES = pytest.mark.parametrize("mode", [jax.jit, lambda f: f], ids=["jit", "eager"])


@MODES
def test_rows_that_make_parallel_calls_of_their_own(mode):
    """More rows than the pool has threads, each of which waits for rows of its own."""

    def outer(v):
        inner = jax.vmap(
            lambda u: hc.call(lambda u: u + 1, u, u, vmap_method="parallel")
        )
        return np.asarray(inner(jnp.full(3, v))).sum()

    f = mode(jax.vmap(lambda v: hc.call(outer, SCALAR, v, vmap_method="parallel")))
    xs = np.arange(40, dtype=np.float32)
    np.testing.assert_array_equal(f(jnp.asarray(xs)), 3 * (xs + 1))


def test_arrays_that_come_from_another_process():
    """Their dtypes equal NumPy's own, but are other objects."""
    spec = jax.ShapeDtypeStruct((3,), np.float32)
    with ProcessPoolExecutor(1, mp_context=forked.CONTEXT) as pool:
        f = jax.jit(
            jax.vmap(
                lambda v: hc.call(
                    hc.host(np.sort, executor=pool), spec, v, vmap_method="parallel"
                )
            )
        )
        xs = np.array([[3, 1, 2], [9, 8, 7]], np.float32)
        np.testing.assert_array_equal(f(xs), np.sort(xs))


@MODES
def test_current_of_a_call_inside_a_parallel_row(mode):
    names = []

    def inner(v):
        names.append(hc.current().name.split(".")[-1])
        return v

    def outer(v):
        hc.call(inner, SCALAR, v)
        names.append(hc.current().name.split(".")[-1])
        return v

    f = mode(jax.vmap(lambda v: hc.call(outer, v, v, vmap_method="parallel")))
    jax.block_until_ready(f(jnp.zeros(1)))
    assert names == ["inner", "outer"]


@MODES
def test_a_timeout_holds_for_a_masked_batch(mode):
    leave = threading.Event()

    def slow(v):
        leave.wait(HANG_SECONDS)
        return v

    f = mode(
        jax.vmap(
            lambda v: hc.call(
                hc.host(slow, timeout=0.1), v, v, where=v > 0, vmap_method="expand_dims"
            )
        )
    )
    with pytest.raises(hc.errors.CallTimeoutError, match=r"timeout=0\.1"), hc.reraise():
        jax.block_until_ready(f(jnp.arange(3.0)))
    leave.set()


@MODES
def test_dlpack_in_a_masked_batch(mode):
    kinds = []

    def host(v):
        kinds.append(type(v).__name__)
        return np.from_dlpack(v) * 2

    f = mode(
        jax.vmap(
            lambda v: hc.call(
                host, v, v, where=v > 0, arrays="dlpack", vmap_method="expand_dims"
            )
        )
    )
    np.testing.assert_array_equal(f(jnp.arange(3.0)), [0, 2, 4])
    assert kinds == ["DLPackArray"]


def test_lent_results_of_a_masked_batch_are_refused():
    def host(v, out):
        out[...] = v

    f = jax.vmap(
        lambda v: hc.call(
            host, v, v, where=v > 0, lend="out", vmap_method="expand_dims"
        )
    )
    with pytest.raises(
        hc.errors.BatchingError, match=r"lend='out'.*not contiguous in memory"
    ):
        f(jnp.arange(3.0))


@MODES
def test_results_that_are_each_others_lent_memory(mode):
    spec = (jax.ShapeDtypeStruct((3,), np.float32),) * 2

    def swapped(x, out):
        out[0][...] = 1
        out[1][...] = 2
        return out[1], out[0]

    first, second = mode(lambda x: hc.call(swapped, spec, x, lend="out"))(jnp.zeros(3))
    assert first.tolist() == [2, 2, 2]
    assert second.tolist() == [1, 1, 1]


@MODES
def test_an_exception_that_carries_a_lent_slice(mode):
    """Its arrays become copies, since XLA reuses the memory that they pointed to."""

    def fail(x):
        error = ValueError(x[:4])
        error.__cause__ = LookupError("a ring")
        error.__cause__.__cause__ = error
        raise error

    with pytest.raises(ValueError) as caught, hc.reraise():
        jax.block_until_ready(
            mode(lambda x: hc.call(fail, x, x, lend=True))(jnp.arange(1000.0))
        )
    assert caught.value.args[0].tolist() == [0, 1, 2, 3]
    assert caught.value.args[0].base is None


def test_reraise_leaves_handled_eager_errors_alone():
    def fail(x):
        raise ValueError("handled")

    with hc.reraise(), contextlib.suppress(ValueError):
        hc.call(fail, SCALAR, np.float32(0))


# --- Context variables ----------------------------------------------------------------

RUN = contextvars.ContextVar("run", default="none")


def seen_by(seen, awaits=False):
    def host(x):
        seen.append((RUN.get(), np.geterr()["divide"]))
        RUN.set("the function's own")
        return x

    async def coroutine(x):
        await asyncio.sleep(0)
        return host(x)

    return coroutine if awaits else host


def one(host, x, **how):
    return policies.call(host, x, x, order="ordered", **how)


def rows(host, x, **how):
    def row(x):
        return policies.call(
            host, x, x, vmap_method="parallel", order="unordered", **how
        )

    return jax.vmap(row)(jnp.stack([x] * 5))


OTHER_THREADS = {
    "none": (one, {}, False),
    "timeout": (one, {"timeout": 60}, False),
    "coroutine": (one, {}, True),
    "coroutine, timeout": (one, {"timeout": 60}, True),
    "parallel": (rows, {}, False),
    "parallel, timeout": (rows, {"timeout": 60}, False),
    "parallel, executor": (rows, {"executor": None}, False),
    "parallel, coroutine": (rows, {}, True),
}


@MODES
@pytest.mark.parametrize("name", OTHER_THREADS)
def test_host_code_sees_the_callers_context(name, mode):
    """On another thread, what it sets is its own."""
    call, how, awaits = OTHER_THREADS[name]
    seen = []
    host = seen_by(seen, awaits)
    with ThreadPoolExecutor(2) as pool:
        how = how | {key: pool for key in how if key == "executor"}
        step = mode(lambda x: call(host, x, **how))
        for run in ("first", "second"):
            RUN.set(run)
            with np.errstate(divide="raise"):
                jax.block_until_ready(step(jnp.float32(1)))
            hc.barrier()
            assert name == "none" or RUN.get() == run
            assert seen == [(run, "raise")] * len(seen), name
            assert len(seen) == (5 if call is rows else 1)
            seen.clear()


class Problems(ValueError):
    """Counts what is wrong: of no problem, its truth is False."""

    def __len__(self):
        return 0


@pytest.mark.parametrize("kind", [Problems, StopIteration])
@pytest.mark.parametrize("mode", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_any_exception_within_a_limit_is_raised_itself(mode, kind):
    def fails(*args):
        raise kind("mine")

    f = mode(hc.host(fails, result=SCALAR, timeout=HANG_SECONDS))
    with pytest.raises(kind, match="mine"), hc.reraise():
        f(1.0)

    def source():
        yield np.float32(1)
        raise Problems

    feed = hc.feed(source)
    feed()
    with pytest.raises(Problems), hc.reraise():
        mode(feed)()


def test_a_failure_within_a_limit_is_in_no_cycle():
    seen = []

    class Value:
        pass

    def fails(x):
        value = Value()
        seen.append(weakref.ref(value))
        raise LookupError("late")

    def call():
        with contextlib.suppress(LookupError):
            hc.call(hc.host(fails, timeout=HANG_SECONDS), SCALAR, 1.0)

    gc.collect()
    gc.disable()
    try:
        call()
        call()  # the newest error is kept, with its frames
        assert seen[0]() is None
    finally:
        gc.enable()
