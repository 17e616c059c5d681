"""`hc.host(coalesce=)`: calls of several threads, programs, devices and rows as one."""

from __future__ import annotations

import asyncio
import re
import threading
import time

import clocks
import jax
import jax.numpy as jnp
import numpy as np
import policies
import pytest
from limits import HANG_SECONDS, holds_in_time

import hostcall as hc

F32 = jax.ShapeDtypeStruct((), jnp.float32)


class Sizes:
    """Doubles; notes how many calls each call was made for."""

    def __init__(self):
        self.sizes = []

    def __call__(self, x):
        self.sizes.append(len(x))
        return 2 * x


def on_threads(calls):
    """Runs functions on threads, at the same time; what they returned or raised."""
    gate, outcomes = threading.Barrier(len(calls)), [None] * len(calls)

    def run(number):
        gate.wait(HANG_SECONDS)
        try:
            outcomes[number] = calls[number]()
        except Exception as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    return outcomes


def compiled(fn, **options):
    """A program that has run once, without a call. JAX runs the first call of a program
    alone: other threads wait until it has ended.
    """

    def f(x, ready):
        return policies.call(fn, F32, x, where=ready, **options)

    program = jax.jit(f)
    program(0.0, False).block_until_ready()
    return lambda x: program(x, True).block_until_ready()


def test_a_call_that_comes_alone():
    sizes = Sizes()
    assert jax.jit(lambda x: hc.call(hc.host(sizes, coalesce=8), F32, x))(3.0) == 6
    assert hc.call(hc.host(sizes, coalesce=8, wait=0), F32, 4.0) == 8
    assert sizes.sizes == [1, 1]


def test_calls_of_threads_and_programs_are_one_call():
    sizes = Sizes()
    # The wait only ends early because all four come.
    how = {"coalesce": 4, "wait": HANG_SECONDS}
    two = compiled(sizes, **how), compiled(sizes, **how)
    outs = on_threads([lambda n=n: float(two[n % 2](float(n))) for n in range(4)])
    assert outs == [0, 2, 4, 6]
    assert sizes.sizes == [4]


def test_rows_of_a_batch_are_calls():
    sizes = Sizes()
    f = jax.vmap(lambda x: hc.call(hc.host(sizes, coalesce=8, wait=0.0), F32, x))
    np.testing.assert_array_equal(jax.jit(f)(jnp.arange(20.0)), 2 * np.arange(20.0))
    assert sizes.sizes == [8, 8, 4]


def test_rows_that_where_leaves_out_and_shared_arguments():
    def add(x, y):
        assert x.shape == (2,)
        assert y.shape == (2, 3)
        return {"sum": x[:, None] + y}

    spec = {"sum": jax.ShapeDtypeStruct((3,), jnp.float32)}
    y = jnp.arange(3.0)
    f = jax.vmap(
        lambda x: hc.call(hc.host(add, coalesce=2), spec, x, y, where=x > 1, fill=-1.0)[
            "sum"
        ]
    )
    want = np.where(np.arange(4.0)[:, None] > 1, np.arange(4.0)[:, None] + y, -1)
    np.testing.assert_array_equal(jax.jit(f)(jnp.arange(4.0)), want)


def test_devices_of_a_shard_map_meet():
    sizes = Sizes()
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("d",))
    spec = jax.sharding.PartitionSpec("d")

    def each(x):
        out = jax.ShapeDtypeStruct((1,), jnp.float32)
        return hc.call(hc.host(sizes, coalesce=4, wait=HANG_SECONDS), out, x)

    f = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=spec, out_specs=spec))
    np.testing.assert_array_equal(f(jnp.arange(4.0)), 2 * np.arange(4.0))
    assert sizes.sizes == [4]


def test_shapes_that_differ_do_not_meet():
    sizes = Sizes()

    def f(x):
        spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return hc.call(hc.host(sizes, coalesce=2, wait=0.05), spec, x)

    small, large = jnp.ones(2), jnp.ones(3)
    program = jax.jit(f)
    outs = on_threads([lambda x=x: np.asarray(program(x)) for x in (small, large)])
    assert [len(out) for out in outs] == [2, 3]
    assert sizes.sizes == [1, 1]


@pytest.mark.parametrize("arrays", ["jax", "dlpack"])
def test_kinds_of_arrays(arrays):
    def twice(x):
        return 2 * (x if arrays == "jax" else np.from_dlpack(x))

    f = jax.vmap(lambda x: hc.call(hc.host(twice, coalesce=4), F32, x, arrays=arrays))
    np.testing.assert_array_equal(jax.jit(f)(jnp.arange(4.0)), 2 * np.arange(4.0))


def test_coroutine_functions():
    async def twice(x):
        await asyncio.sleep(0)
        assert hc.current() is not None
        return 2 * x

    f = jax.vmap(
        lambda x: hc.call(hc.host(twice, coalesce=3, timeout=HANG_SECONDS), F32, x)
    )
    np.testing.assert_array_equal(jax.jit(f)(jnp.arange(5.0)), 2 * np.arange(5.0))


def test_a_function_that_returns_its_own_buffer():
    buffer = np.zeros(2, np.float32)

    def same(x):
        buffer[: len(x)] = x
        return buffer[: len(x)]

    f = jax.vmap(lambda x: hc.call(hc.host(same, coalesce=2, wait=0.0), F32, x))
    np.testing.assert_array_equal(jax.jit(f)(jnp.arange(8.0)), np.arange(8.0))


def test_a_function_with_its_own_buffer_called_by_several_threads():
    """The results of one merged call are copied before the function runs again, also
    for calls of other shapes, which do not meet.
    """
    buffer, inside = np.zeros(64, np.float32), []

    def same(x):
        inside.append(1)
        assert len(inside) == 1
        out = buffer[: x.size].reshape(x.shape)
        out[:] = x
        time.sleep(0)  # lets another thread run
        inside.pop()
        return out

    def program(shape):
        spec = jax.ShapeDtypeStruct(shape, jnp.float32)
        f = jax.jit(lambda x: hc.call(hc.host(same, coalesce=2, wait=0.0), spec, x))
        f(np.zeros(shape, np.float32)).block_until_ready()
        return f

    programs = program(()), program((3,)), program((4, 4))

    def calls(thread):
        f, shape = programs[thread % 3], [(), (3,), (4, 4)][thread % 3]
        for i in range(150):
            x = np.full(shape, 1000 * thread + i, np.float32)
            np.testing.assert_array_equal(f(x), x)
        return True

    assert on_threads([lambda n=n: calls(n) for n in range(6)]) == [True] * 6


def test_a_wait_for_a_turn_is_named_in_the_log(monkeypatch, caplog):
    clocks.log_waits_at_once(monkeypatch)
    entered, end = threading.Event(), threading.Event()

    def slow(x):
        entered.set()
        assert end.wait(HANG_SECONDS)
        return x

    f = compiled(slow, coalesce=1)

    def second():
        assert entered.wait(HANG_SECONDS)
        watch = threading.Thread(target=watches)
        watch.start()
        out = float(f(2.0))
        watch.join(HANG_SECONDS)
        return out

    def watches():
        assert holds_in_time(lambda: "for another one to end" in caplog.text)
        end.set()

    assert on_threads([lambda: float(f(1.0)), second]) == [1, 2]


def test_a_merged_function_that_runs_a_program_with_itself():
    def call(x):
        return hc.call(hc.host(less, coalesce=4, wait=0.002), F32, x)

    def less(xs):
        return np.array([inner(x - 100) if x >= 100 else x for x in xs], np.float32)

    inner = jax.jit(call)
    inner(0.0)
    out = jax.jit(jax.vmap(call))(jnp.arange(5.0) + 100)
    np.testing.assert_array_equal(out, np.arange(5.0))


# --- Errors --------------------------------------------------------------------------


def test_a_follower_on_the_thread_of_the_loop():
    """It would block the loop that the leader's call needs."""

    async def same(x):
        return x

    async def outer(x):
        return merged(x)

    merged = compiled(same, coalesce=2, wait=1.0)
    program = jax.jit(lambda x: hc.call(outer, F32, x))
    leader = threading.Thread(target=lambda: merged(1.0))
    leader.start()
    assert holds_in_time(hc.monitor.status)
    with pytest.raises(jax.errors.JaxRuntimeError, match="await asyncio.to_thread"):
        program(2.0).block_until_ready()
    leader.join(HANG_SECONDS)
    assert not leader.is_alive()


def test_an_error_goes_to_all():
    def fail(x):
        raise ValueError(f"for {len(x)}")

    how = {"coalesce": 3, "wait": HANG_SECONDS}
    f = compiled(fail, **how)
    outs = on_threads([lambda: f(1.0)] * 3)
    assert all("ValueError: for 3" in str(out) for out in outs)


def test_a_timeout_goes_to_all():
    release = threading.Event()

    def slow(x):
        release.wait(HANG_SECONDS)
        return x

    how = {"coalesce": 2, "wait": HANG_SECONDS, "timeout": 0.2}
    f = compiled(slow, **how)
    outs = on_threads([lambda: f(1.0)] * 2)
    release.set()
    assert all("took longer than timeout=0.2 s" in str(out) for out in outs)


@pytest.mark.parametrize("wrong", [lambda x: x[0], lambda x: np.zeros(5, np.float32)])
def test_results_without_the_axis(wrong):
    f = jax.jit(jax.vmap(lambda x: hc.call(hc.host(wrong, coalesce=2), F32, x)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="called for 2 with coalesce="):
        f(jnp.arange(2.0)).block_until_ready()


WRONG = {
    "an int of 1 or more, got 0": {"coalesce": 0},
    "an int of 1 or more, got 2.5": {"coalesce": 2.5},
    "has wait= and no coalesce=": {"wait": 0.1},
    "a number of 0 or more, got -1": {"coalesce": 2, "wait": -1},
    "has coalesce= and order='ordered'": {"coalesce": 2, "order": "ordered"},
    "has coalesce= and vmap_method=": {"coalesce": 2, "vmap_method": "expand_dims"},
    "has coalesce= and lend=": {"coalesce": 2, "lend": True},
    "has coalesce= and arrays='cuda'": {"coalesce": 2, "arrays": "cuda"},
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_options(text):
    with pytest.raises(hc.errors.SpecError, match=re.escape(text)):
        policies.call(np.sin, F32, 1.0, **WRONG[text])


def test_a_call_without_arrays():
    with pytest.raises(hc.errors.SpecError, match="no array among its arguments"):
        hc.call(hc.host(lambda: 1.0, coalesce=2), F32)


def test_ctrl_c_ends_the_wait_for_others(run_python):
    done = run_python(
        """
        import os, signal, threading, time
        import jax, jax.numpy as jnp
        import hostcall as hc
        F32 = jax.ShapeDtypeStruct((), jnp.float32)
        merged = hc.host(lambda x: x, coalesce=2, wait=1000.0)
        f = jax.jit(lambda x: hc.call(merged, F32, x))
        f = f.lower(0.0).compile()
        def interrupt():
            while not hc.monitor.status():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt).start()
        try:
            f(2.0).block_until_ready()
        except (Exception, KeyboardInterrupt) as error:
            print("KeyboardInterrupt" in repr(error) + str(error))
        """
    )
    assert done.stdout.split() == ["True"]


def test_a_call_that_names_its_device_meets_others():
    sizes = Sizes()
    how = {"coalesce": 2, "wait": HANG_SECONDS}
    plain = compiled(sizes, **how)
    host = hc.host(sizes, **how)
    here = jax.jit(lambda x: hc.call(host, F32, x, on=jax.devices("cpu")[0]))
    here.lower(0.0).compile()
    outs = on_threads([lambda: float(plain(1.0)), lambda: float(here(2.0))])
    assert (outs, sizes.sizes) == ([2, 4], [2])
