"""Waits that are left out, failures in loops, and little memory, with kernels around.

`driver.fakeIgnore` makes hostcall's engine a broken one: it seems to forget its waits. A test
that passes then would show that the others look at nothing.
"""

from __future__ import annotations

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graphs import RECORDED, copied
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from platforms import forget_failed_effects

import hostcall as hc

X = np.arange(8, dtype=np.float32)
SPEC = jax.ShapeDtypeStruct(X.shape, X.dtype)
NUMBER = jax.ShapeDtypeStruct((), np.int32)
SLOW = 2000  # microseconds for each piece of work: hosts are faster
RUNS = 10


# --- Waits that are left out -------------------------------------------------------


def called(gpus):
    """Whether calls between kernels had the values of their own run."""
    f = jax.jit(lambda x: hc.call(lambda v: v + 1, SPEC, x * 2) * 3)
    run = lambda k: f(jax.device_put(X + np.float32(k), gpus[0]))
    jax.block_until_ready(run(0))
    yield
    results = [run(k) for k in range(RUNS)]
    wanted = [((X + k) * 2 + 1) * 3 for k in range(RUNS)]
    yield all(map(np.array_equal, results, wanted))


def tapped(gpus):
    """Whether taps behind kernels saw the values of their own run."""
    seen = []
    f = jax.jit(lambda x: (hc.tap(lambda v: seen.append(v.tolist()), x * 2), x)[1])
    run = lambda k: f(jax.device_put(X + np.float32(k), gpus[0]))
    jax.block_until_ready(run(0))
    hc.barrier()
    seen.clear()
    yield
    for k in range(RUNS):
        run(k)
    hc.barrier()
    yield seen == [((X + k) * 2).tolist() for k in range(RUNS)]


def called_on_two(gpus):
    """Whether calls of two GPUs, which share a pool, kept their results apart.

    The results of one lie where the operands of the other do. No other test has blocks of
    this size, so there is one at first.
    """
    size = 300_001
    row = jax.ShapeDtypeStruct((size,), np.float32)
    number = jax.ShapeDtypeStruct((), np.float32)
    wide = jax.jit(lambda x: hc.call(lambda v: np.full(size, v), row, x))
    narrow = jax.jit(lambda x: hc.call(lambda v: v.sum(), number, x))
    on_first = jax.device_put(np.float32(5), gpus[0])
    on_second = jax.device_put(np.ones(size, np.float32), gpus[1])
    jax.block_until_ready(wide(on_first))
    jax.block_until_ready(narrow(on_second))
    yield
    results = [(wide(on_first), narrow(on_second)) for _ in range(RUNS)]
    yield all((np.asarray(a) == 5).all() and float(b) == size for a, b in results)


WAITS = [
    (called, b"cuStreamSynchronize"),
    (tapped, b"cuStreamWaitEvent"),
    (called_on_two, b"cuEventQuery"),
]


@pytest.mark.parametrize("is_forgotten", [False, True])
@pytest.mark.parametrize(
    ("program", "wait"), WAITS, ids=[wait.decode() for _, wait in WAITS]
)
def test_a_wait_that_is_forgotten_is_found(driver, program, wait, is_forgotten):
    """By values, or by a rule."""
    steps = program(jax.devices("gpu"))
    next(steps)
    driver.fakeSetDelayMicroseconds(SLOW)
    if is_forgotten:
        driver.fakeIgnore(wait)
    are_right = next(steps)
    driver.fakeReset()
    faults = driver.fakeTakeFaults().decode()
    assert (are_right and not faults) != is_forgotten, faults


# --- Failures in loops -------------------------------------------------------------


def in_scan(step, count):
    steps = np.arange(count)
    return lambda x: jax.lax.scan(lambda c, _: (step(c), None), x, steps)[0]


def in_while(step, count):
    return lambda x: jax.lax.while_loop(lambda c: c < count, step, x)


@pytest.mark.parametrize("loop", [in_scan, in_while])
@pytest.mark.parametrize(
    "function", ["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuStreamSynchronize"]
)
def test_a_driver_that_fails_in_a_step(driver, loop, function):
    """The steps before it were made once, none after it, and the next run is right."""
    called = []
    fails_at = [3]

    def host(i):
        called.append(int(i))
        if len(called) == fails_at[0]:
            driver.fakeFailNext(function.encode(), 2)
        return i

    step = lambda c: hc.call(host, NUMBER, c + 1, order="ordered")
    f = jax.jit(loop(step, 6))
    for _ in range(2):
        called.clear()
        with pytest.raises(jax.errors.JaxRuntimeError, match="CUDA_ERROR_OUT_OF_MEM"):
            f(np.int32(0)).block_until_ready()
        assert called == [1, 2, 3]
    fails_at[0] = -1
    assert int(f(np.int32(0))) == 6
    assert hc.monitor.pinned_memory()["calls"].in_use == 0


@pytest.mark.parametrize("loop", [in_scan, in_while])
@pytest.mark.parametrize(
    "function", ["cuMemcpyDtoHAsync_v2", "cuStreamWaitEvent", "cuLaunchHostFunc"]
)
def test_a_driver_that_fails_at_a_tap_of_a_step(driver, loop, function):
    """After its operands have come, the call before the tap needs none of the three."""
    seen = []
    fails_at = [3]

    def host(i):
        if int(i) == fails_at[0]:
            driver.fakeFailNext(function.encode(), 2)
        return i + np.int32(1)

    def step(c):
        c = hc.call(host, NUMBER, c, order="ordered")
        hc.tap(lambda v: seen.append(int(v)), c)
        return c

    f = jax.jit(loop(step, 6))
    for _ in range(2):
        seen.clear()
        with pytest.raises(jax.errors.JaxRuntimeError, match="CUDA_ERROR_OUT_OF_MEM"):
            f(np.int32(0)).block_until_ready()
        forget_failed_effects()  # with jaxlib before 0.12
        hc.barrier()
        assert seen == [1, 2, 3]
    seen.clear()
    fails_at[0] = -1
    assert int(f(np.int32(0))) == 6
    hc.barrier()
    assert seen == [1, 2, 3, 4, 5, 6]
    pinned = hc.monitor.pinned_memory()
    assert (pinned["calls"].in_use, pinned["taps"].in_use) == (0, 0)


# --- Graphs, devices and memory ----------------------------------------------------


def test_kernels_and_callbacks_in_one_graph(mode, driver):
    """Replays take the values of their own run through all of them."""
    recorded = []

    def host(ctx, out, x):
        recorded.append(1)
        copied(ctx, out, x)

    g = hc.buffers.buffer_callback(host, SPEC, command_buffer_compatible=True)
    program = lambda x: jnp.flip(g(jnp.cumsum(g(x * 2))) + 1)
    f = jax.jit(program, compiler_options=RECORDED)
    wanted = [(np.cumsum((X + k) * 2) + 1)[::-1] for k in range(8)]
    run = lambda k: f(jax.device_put(X + np.float32(k)))
    before = driver.fakeGraphLaunches()
    # Each array is elsewhere, for which the graph is recorded again.
    results = [run(k) for k in range(8)]
    for result, want in zip(results, wanted, strict=True):
        np.testing.assert_array_equal(result, want)
    assert driver.fakeGraphLaunches() > before
    del results, result
    recorded.clear()
    for k, want in enumerate(wanted):
        np.testing.assert_array_equal(run(k), want)
    assert len(recorded) < 2 * len(wanted)  # replays do not call it


def test_calls_and_collectives_in_a_loop_of_four_gpus(mode):
    """Each GPU's calls are in order, and each step has the sum of this step's."""
    called = {}

    def host(i, v):
        called.setdefault(hc.current().device.id, []).append(int(i))
        return v + i

    block = jax.ShapeDtypeStruct((2,), np.int32)

    def body(x):
        def step(i, x):
            y = hc.call(host, block, i, x, order="ordered")
            return (x + jax.lax.psum(y, "x")) % 97

        return jax.lax.fori_loop(0, 4, step, x)

    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    want = np.arange(8).reshape(4, 2)
    x = jax.device_put(np.arange(8, dtype=np.int32), NamedSharding(mesh, P("x")))
    for i in range(4):
        want = (want + (want + i).sum(0)) % 97
    np.testing.assert_array_equal(f(x), want.ravel())
    assert called == {device.id: [0, 1, 2, 3] for device in jax.devices("gpu")}


def test_a_program_that_does_not_fit_makes_no_call(driver):
    called = []

    def program(x):
        return hc.call(lambda v: called.append(1) or v + 1, x, x * 2, order="ordered")

    f = jax.jit(program)
    gpu = jax.devices("gpu")[0]
    size = 1 << 21  # more than XLA has unused anywhere
    x = jax.device_put(np.zeros(size, np.float32), gpu)
    driver.fakeSetMemoryLimit(ctypes.c_size_t(driver.fakeDeviceBytes(gpu.id) + size))
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            f(x).block_until_ready()
    assert called == []
    driver.fakeSetMemoryLimit(ctypes.c_size_t(0))
    forget_failed_effects()  # with jaxlib before 0.12
    assert float(f(x)[0]) == 1
    assert hc.monitor.pinned_memory()["calls"].in_use == 0


def test_pinned_memory_runs_out_in_a_step(driver):
    """Blocks that nobody uses are given back then, and the step goes on."""
    called = []
    unused = jax.ShapeDtypeStruct((300,), np.float32)
    jax.jit(lambda: hc.call(lambda: np.zeros(300, np.float32), unused))()

    def host(v):
        called.append(v.size)
        if len(called) == 3:
            driver.fakeFailNext(b"cuMemHostAlloc", 2)
        return v + 1

    big = jax.ShapeDtypeStruct((70_001,), np.float32)

    def step(i, x):
        x = hc.call(host, SPEC, x, order="ordered")
        return jax.lax.cond(
            i == 2,
            lambda x: hc.call(host, big, jnp.zeros(70_001), order="ordered")[:8] + x,
            lambda x: x,
            x,
        )

    f = jax.jit(lambda x: jax.lax.fori_loop(0, 4, step, x))
    freed = driver.fakeCount(b"cuMemFreeHost")
    np.testing.assert_array_equal(f(X), X + 5)
    assert called == [8, 8, 8, 70_001, 8]
    assert driver.fakeCount(b"cuMemFreeHost") > freed
    assert hc.monitor.pinned_memory()["calls"].in_use == 0
