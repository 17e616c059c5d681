"""hostcall's CUDA handlers in XLA's CUDA runtime, on a driver that is made hostile."""

from __future__ import annotations

import ctypes
import threading

import jax
import numpy as np
import pytest
from graphs import RECORDED, copied
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import hostcall as hc

X = np.arange(8, dtype=np.float32)
SPEC = jax.ShapeDtypeStruct(X.shape, X.dtype)


def shard_map(f):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    return jax.jit(split), jax.device_put(X, NamedSharding(mesh, P("x")))


# --- Calls -------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["pure", "unordered", "ordered"])
def test_a_chain_of_calls(mode, order):
    def f(x):
        for _ in range(5):
            x = hc.call(lambda v: v * 2, SPEC, x, order=order)
        return x

    f = jax.jit(f)
    for _ in range(5):
        np.testing.assert_array_equal(f(X), X * 32)


def test_a_call_waits_once_and_copies_pinned_memory(driver):
    f = jax.jit(lambda x, y: hc.call(lambda x, y: (x + y, x - y), (SPEC,) * 2, x, y))
    f(X, X)
    counted = (
        b"cuStreamSynchronize",
        b"cuMemcpyDtoHAsync_v2",
        b"cuMemcpyHtoDAsync_v2",
        b"cuMemHostAlloc",
    )
    before = [driver.fakeCount(name) for name in counted]
    for _ in range(10):
        a, b = f(X, X)
        np.testing.assert_array_equal(a, X + X)
        np.testing.assert_array_equal(b, X - X)
    after = [driver.fakeCount(name) for name in counted]
    assert [a - b for a, b in zip(after, before, strict=True)] == [10, 20, 20, 0]


def test_threads_share_a_small_pool(mode):
    hc.configure(pinned_bytes=1 << 18)
    big = jax.ShapeDtypeStruct((1 << 14,), np.float32)  # 128 KiB for both ways
    f = jax.jit(lambda x: hc.call(lambda v: v + 1, big, x))
    wrong = []

    def work(k):
        x = jax.device_put(np.full(1 << 14, k, np.float32), jax.devices()[k % 4])
        for _ in range(5):
            x = f(x)
        if not (np.asarray(x) == k + 5).all():
            wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls = hc.monitor.pinned_memory()["calls"]
    hc.configure(pinned_bytes=1_000_000_000)
    assert wrong == []
    assert calls.in_use == 0


FUNCTIONS = [
    "cuMemcpyDtoHAsync_v2",
    "cuStreamSynchronize",
    "cuMemcpyHtoDAsync_v2",
    "cuStreamGetCtx",
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_driver_that_fails_is_an_error_of_the_program(driver, function):
    f = jax.jit(lambda x: hc.call(lambda x: x * 2, SPEC, x))
    f(X).block_until_ready()
    for _ in range(3):
        driver.fakeFailNext(function.encode(), 2)
        with pytest.raises(jax.errors.JaxRuntimeError, match="CUDA_ERROR_OUT_OF_MEM"):
            f(X).block_until_ready()
        np.testing.assert_array_equal(f(X), X * 2)
    assert hc.monitor.pinned_memory()["calls"].in_use == 0


def test_a_failing_function_gives_its_block_back(mode):
    def host(v):
        if v[0] < 0:
            raise ValueError("negative")
        return v

    f = jax.jit(lambda x: hc.call(host, SPEC, x))
    for _ in range(10):
        with pytest.raises(ValueError, match="negative"), hc.reraise():
            f(-X - 1).block_until_ready()
        np.testing.assert_array_equal(f(X), X)
    assert hc.monitor.pinned_memory()["calls"].in_use == 0


def test_rows_and_masks(mode):
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    row = jax.ShapeDtypeStruct((3,), np.float32)
    f = jax.jit(jax.vmap(lambda r: hc.call(lambda v: v + v.max(), row, r)))
    np.testing.assert_array_equal(f(rows), rows + rows.max(1, keepdims=True))
    called = []
    g = jax.jit(
        jax.vmap(
            lambda r, m: hc.call(lambda v: called.append(1) or v + 1, row, r, where=m)
        )
    )
    mask = np.array([True, False, False, True])
    np.testing.assert_array_equal(g(rows, mask), np.where(mask[:, None], rows + 1, 0))
    assert len(called) == 2


# --- Taps --------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["unordered", "ordered"])
def test_taps_come_whole_and_in_order(mode, order):
    seen = []
    spec = jax.ShapeDtypeStruct((), np.int32)

    def f(i):
        for _ in range(20):
            hc.tap(lambda v: seen.append(int(v)), i, order=order)
            i = hc.call(lambda v: v + np.int32(1), spec, i)
        return i

    jax.jit(f)(np.int32(0)).block_until_ready()
    hc.barrier()
    assert seen == list(range(20))
    assert hc.monitor.pinned_memory()["taps"].in_use == 0


def test_a_tap_that_is_passed_through(mode):
    seen = []
    f = jax.jit(lambda x: hc.tap_through(lambda v: seen.append(v.copy()), x))
    np.testing.assert_array_equal(f(X), X)
    hc.barrier()
    np.testing.assert_array_equal(seen, [X])


def test_a_tap_that_fails_raises_at_the_barrier(mode):
    def host(v):
        raise LookupError("no such row")

    jax.jit(lambda x: (hc.tap(host, x), x)[1])(X).block_until_ready()
    with pytest.raises(LookupError, match="no such row"):
        hc.barrier()


def test_slow_taps_and_calls_on_full_pools(pinned_waiting):
    """Allocating waits for streams, whose host functions give the blocks back."""
    seen = []
    f = jax.jit(lambda x: (hc.tap(lambda v: seen.append(v.size), x), x)[1])
    calls = [jax.ShapeDtypeStruct((1 << k,), np.float32) for k in (4, 8, 12, 14, 16)]
    g = [jax.jit(lambda x, s=s: hc.call(lambda v: v, s, x)) for s in calls]

    def work():
        for i in range(20):
            x = np.ones(calls[i % 5].shape, np.float32)
            f(x)
            g[i % 5](x)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hc.barrier()
    assert len(seen) == 60


@pytest.fixture
def pinned_waiting(driver):
    driver.fakeSetPinnedWaits(1)
    hc.configure(pinned_bytes=1 << 20, tap_queue_bytes=1 << 20)
    yield
    hc.configure(pinned_bytes=1_000_000_000, tap_queue_bytes=256_000_000)


# --- Feeds -------------------------------------------------------------------------


def test_a_feed_in_its_order(mode):
    with hc.feed([np.full(4, i, np.float32) for i in range(5)]) as feed:
        f = jax.jit(lambda: feed()[0])
        assert [float(np.asarray(f())[0]) for _ in range(5)] == [0, 1, 2, 3, 4]


# --- Buffers and graphs ------------------------------------------------------------


def test_buffers_are_the_devices_memory(mode):
    at = []

    def host(ctx, out, x):
        at.append((ctx.stream, x.__dlpack_device__(), x.__cuda_array_interface__))
        assert x.__cuda_array_interface__["stream"] == ctx.stream
        copied(ctx, out, x)

    f = jax.jit(hc.buffers.buffer_callback(host, SPEC))
    np.testing.assert_array_equal(f(X), X)
    ((stream, device, interface),) = at
    assert stream
    assert device == (2, 0)
    assert interface["shape"] == (8,)
    assert interface["data"][1] is True


def test_a_callback_that_is_recorded_into_a_graph(mode, driver):
    called = []

    def host(ctx, out, x):
        called.append(1)
        copied(ctx, out, x)

    g = hc.buffers.buffer_callback(host, SPEC, command_buffer_compatible=True)
    f = jax.jit(lambda x: g(g(g(x))), compiler_options=RECORDED)
    before = driver.fakeGraphLaunches()
    for k in range(6):
        np.testing.assert_array_equal(f(X + np.float32(k)), X + k)
    assert driver.fakeGraphLaunches() > before
    assert len(called) < 18  # a replay does not call it


# --- Several GPUs ------------------------------------------------------------------


@pytest.mark.parametrize("order", ["unordered", "ordered"])
def test_each_gpu_calls_with_its_block(mode, order):
    devices = []

    def host(v):
        devices.append(hc.current().device.id)
        return v * 2

    block = jax.ShapeDtypeStruct((2,), np.float32)
    f, x = shard_map(lambda x: hc.call(host, block, x, order=order))
    np.testing.assert_array_equal(f(x), X * 2)
    assert sorted(devices) == [0, 1, 2, 3]


@pytest.mark.parametrize("sum_of", ["blocks", "calls"])
def test_a_gpus_array_is_given_to_all_and_gathered(mode, sum_of):
    """XLA copies its blocks from one GPU to the others. If that failed on one, the others'
    collectives would wait for it for ever.
    """
    block = jax.ShapeDtypeStruct((2,), np.float32)
    twice = lambda x: hc.call(lambda v: v * 2, block, x)

    def body(x):
        return jax.lax.psum(twice(x) if sum_of == "calls" else 2 * x, "x")

    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P()))
    on_one = jax.device_put(X, jax.devices()[0])
    x = jax.device_put(on_one, NamedSharding(mesh, P("x")))
    np.testing.assert_array_equal(f(x), 2 * X.reshape(4, 2).sum(0))
    whole = jax.jit(lambda x: hc.call(lambda v: v[::-1].copy(), SPEC, x))
    np.testing.assert_array_equal(whole(x), X[::-1])


def test_each_gpu_taps_its_block(mode):
    seen = []
    f, x = shard_map(lambda x: (hc.tap(lambda v: seen.append(v.tolist()), x), x)[1])
    f(x).block_until_ready()
    hc.barrier()
    assert sorted(seen) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_equal_values_are_called_and_tapped_once(mode):
    called, tapped = [], []
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(X, NamedSharding(mesh, P()))

    def f(x):
        hc.tap(lambda v: tapped.append(1), x)
        return hc.call(lambda v: called.append(1) or v + 1, SPEC, x)

    np.testing.assert_array_equal(jax.jit(f)(x), X + 1)
    hc.barrier()
    assert (len(called), len(tapped)) == (1, 1)


def test_one_gpu_that_can_not_get_its_operand(driver):
    """The others wait for it at the call, and learn of the failure."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(X, NamedSharding(mesh, P()))
    f = jax.jit(lambda x: hc.call(lambda v: v + 1, SPEC, x))
    np.testing.assert_array_equal(f(x), X + 1)
    for _ in range(4):
        driver.fakeFailNext(b"cuMemcpyDtoHAsync_v2", 2)
        with pytest.raises(jax.errors.JaxRuntimeError, match="CUDA_ERROR_OUT_OF_MEM"):
            f(x).block_until_ready()
        np.testing.assert_array_equal(f(x), X + 1)


# --- Loops, whose conditions and steps are kernels ---------------------------------


@pytest.mark.parametrize("order", ["pure", "unordered", "ordered"])
def test_a_call_in_each_step_of_a_scan(mode, order):
    called = []

    def host(v):
        called.append(float(v))
        return v * np.float32(10)

    scalar = jax.ShapeDtypeStruct((), np.float32)

    @jax.jit
    def f(x):
        step = lambda c, a: (c + hc.call(host, scalar, a + 1, order=order), c)
        return jax.lax.scan(step, np.float32(0), x)

    total, before = f(X[:4])
    assert float(total) == 100
    np.testing.assert_array_equal(before, [0, 10, 30, 60])
    assert sorted(called) == [1, 2, 3, 4]
    if order == "ordered":
        assert called == [1, 2, 3, 4]


def test_taps_in_a_while_loop_come_in_order(mode):
    seen = []

    def step(i):
        hc.tap(lambda v: seen.append(int(v)), i, order="ordered")
        return i + 1

    f = jax.jit(lambda n: jax.lax.while_loop(lambda i: i < n, step, np.int32(0)))
    assert int(f(np.int32(30))) == 30
    hc.barrier()
    assert seen == list(range(30))


def test_a_branch_that_calls(mode):
    f = jax.jit(
        lambda p, x: jax.lax.cond(
            p, lambda x: hc.call(lambda v: v + 1, SPEC, x) * 2, lambda x: x * 3, x
        )
    )
    np.testing.assert_array_equal(f(np.bool_(True), X), (X + 1) * 2)
    np.testing.assert_array_equal(f(np.bool_(False), X), X * 3)


def test_the_gradient_of_a_host_function_in_a_scan(mode):
    cube = hc.host(lambda v: v**3, result=hc.results.like(0))
    cube.defvjp(lambda v: (v**3, v), lambda v, c: (3 * v**2 * c,))

    def total(w, x):
        return jax.lax.scan(lambda c, a: (c + cube(w * a), None), np.float32(0), x)[0]

    got = jax.jit(jax.grad(total))(np.float32(2), X[:4])
    np.testing.assert_allclose(got, 3 * 2**2 * (X[:4] ** 3).sum(), rtol=1e-6)


def test_a_driver_that_fails_in_the_middle_of_a_loop(driver):
    """The program fails, in the step that it failed in, and the next run is right."""
    fails_at = [3]
    called = []

    def host(i):
        called.append(int(i))
        if int(i) == fails_at[0]:
            driver.fakeFailNext(b"cuMemcpyHtoDAsync_v2", 2)
        return i + 1

    scalar = jax.ShapeDtypeStruct((), np.int32)
    step = lambda i, c: hc.call(host, scalar, c, order="ordered")
    f = jax.jit(lambda x: jax.lax.fori_loop(0, 6, step, x))
    for _ in range(3):
        called.clear()
        with pytest.raises(jax.errors.JaxRuntimeError, match="CUDA_ERROR_OUT_OF_MEM"):
            f(np.int32(0)).block_until_ready()
        assert called == [0, 1, 2, 3]
    fails_at[0] = -1
    assert int(f(np.int32(0))) == 6
    assert hc.monitor.pinned_memory()["calls"].in_use == 0


def test_random_numbers_around_a_call_are_the_cpus(mode):
    def f(data):
        key = jax.random.wrap_key_data(data)
        x = jax.random.normal(key, (8,))
        y = hc.call(lambda v: v[::-1].copy(), SPEC, x)
        return jax.numpy.sort(y + jax.random.uniform(key, (8,)))

    data = np.array([1, 2], np.uint32)
    with jax.default_device(jax.devices("cpu")[0]):
        want = jax.jit(f)(data)
    np.testing.assert_allclose(jax.jit(f)(data), want, rtol=1e-5, atol=1e-6)


def test_a_buffer_callback_that_does_not_wait_is_found(driver):
    """Its copy is on a stream of its own; the kernel after it reads what it writes."""
    own = ctypes.c_void_p(driver.fakeStreamCreateOn(0))

    def host(ctx, out, x):
        class OtherStream:
            stream = own.value

        copied(OtherStream, out, x)

    f = jax.jit(lambda x: hc.buffers.buffer_callback(host, SPEC)(x * 2) + 1)
    f(X).block_until_ready()
    assert driver.cuStreamSynchronize(own) == 0
    driver.fakeStreamDestroy(own)
    assert "without waiting for it" in driver.fakeTakeFaults().decode()


# --- The end -----------------------------------------------------------------------

PROGRAM = """
import os, sys
sys.path.insert(0, os.environ["TESTS"])
import fakegpus
driver = fakegpus.start()
import jax, numpy as np
import hostcall as hc
x = np.arange(4, dtype=np.float32)
f = jax.jit(lambda x: (hc.tap(lambda v: None, x), x)[1])
g = jax.jit(lambda x: hc.call(lambda v: v * 2, x, x))
f(x), g(x).block_until_ready()
hc.barrier()
assert driver.fakeTakeFaults() == b""
"""


@pytest.mark.parametrize("after", [1, 3, 6, 10])
def test_a_context_that_is_lost_in_the_middle(run_python, tests, after):
    """Errors come, from calls and taps and the barrier; nothing hangs, not the exit."""
    out = run_python(
        PROGRAM
        + f"""
driver.fakeSetDelayMicroseconds(2000)
driver.fakeLoseAfter({after})
failed = []
for h in (f, g, f, g, f, g):
    try:
        h(x).block_until_ready()
    except jax.errors.JaxRuntimeError as error:  # later ones can't get memory
        assert "ILLEGAL_ADDRESS" in str(error) or "RESOURCE_EXHAUSTED" in str(error)
        failed.append(h)
assert g in failed
try:
    hc.barrier(60)
except Exception as error:
    assert isinstance(error, jax.errors.JaxRuntimeError), error
print("over")
""",
        env=tests,
    ).stdout
    assert out.endswith("over\n")


def test_an_exit_while_taps_are_on_their_way(run_python, tests):
    out = run_python(
        PROGRAM
        + """
driver.fakeSetDelayMicroseconds(3000)
h = jax.jit(lambda x: (hc.tap(lambda v: print("tapped", flush=True), x), x)[1])
for _ in range(5): h(x)
""",
        env=tests,
    ).stdout
    assert out == "tapped\n" * 5


@pytest.fixture
def tests(pytestconfig):
    return {"TESTS": str(pytestconfig.rootpath / "tests")}
