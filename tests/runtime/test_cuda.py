"""The CUDA engine as far as it can be shown without a GPU.

Each program runs on XLA's CPU runtime, with the CUDA handlers below it and a driver that
uses host memory as a device's (tests/staged.py). The driver itself checks that CUDA's
rules are kept: pinned memory only, no call from a host function, nothing overwritten early.
"""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import policies
import pytest
import staged

import hostcall as hc

HEAD = """
import ctypes, os, sys, threading, time
sys.path.insert(0, os.environ["TESTS"])
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from pathlib import Path
import staged
fake = staged.use(*map(Path, os.environ["STAGED"].split(os.pathsep)))
import hostcall as hc
count = lambda name: fake.fakeCount(name.encode())
spec = lambda *shape, dtype="float32": jax.ShapeDtypeStruct(shape, dtype)
"""
TAIL = """
broken = fake.fakeTakeFaults().decode()
assert not broken, broken
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return staged.built(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def run(run_python, driver):
    tests = str(Path(__file__).parents[1])
    env = {"STAGED": os.pathsep.join(map(str, driver)), "TESTS": tests}
    return lambda program: run_python(HEAD + program + TAIL, env=env).stdout


# --- Calls ---------------------------------------------------------------------------


def test_a_call_waits_once_and_uses_pinned_memory(run):
    run("""
f = jax.jit(lambda x, y: hc.call(lambda x, y: (x + y, x - y), (spec(1000),) * 2, x, y))
x, y = jnp.arange(1000.0), jnp.ones(1000)
f(x, y)
before = {n: count(n) for n in ("cuStreamSynchronize", "cuMemcpyDtoHAsync_v2",
                                "cuMemcpyHtoDAsync_v2", "cuMemHostAlloc")}
for _ in range(10):
    a, b = f(x, y)
    np.testing.assert_array_equal(a, np.arange(1000.0) + 1)
    np.testing.assert_array_equal(b, np.arange(1000.0) - 1)
after = {n: count(n) - before[n] for n in before}
# A wait of each call, and one of the handler for tests.
assert after == {"cuStreamSynchronize": 20, "cuMemcpyDtoHAsync_v2": 20,
                 "cuMemcpyHtoDAsync_v2": 20, "cuMemHostAlloc": 0}, after
(name, calls), = hc.monitor.pinned_memory().items()
assert name == "calls" and calls.in_use == 0 and calls.reuses >= 10
""")


def test_a_driver_that_fails_is_an_error_of_the_program(run):
    run("""
f = jax.jit(lambda x: hc.call(lambda x: x * 2, spec(64), x))
x = jnp.ones(64)
functions = {"cuMemHostAlloc": 1,  # once: afterwards the pool has a block
             "cuMemcpyDtoHAsync_v2": 3, "cuStreamSynchronize": 3,
             "cuMemcpyHtoDAsync_v2": 3, "cuStreamGetCtx": 3}
for function, times in functions.items():
    for _ in range(times):
        fake.fakeFailNext(function.encode(), 2)
        try:
            jax.block_until_ready(f(x))
        except jax.errors.JaxRuntimeError as error:
            assert "CUDA_ERROR_OUT_OF_MEMORY" in str(error), (function, error)
            assert "hostcall: hostcall" not in str(error), (function, error)
        else:
            raise AssertionError(f"no error of {function}")
        np.testing.assert_array_equal(f(x), x * 2)
assert hc.monitor.pinned_memory()["calls"].in_use == 0
""")


def test_a_driver_that_can_not_record_events_is_waited_for(run):
    run("""
f = jax.jit(lambda x: hc.call(lambda x: x * 2, spec(64), x))
for _ in range(3):
    fake.fakeFailNext(b"cuEventRecord", 2)
    np.testing.assert_array_equal(f(jnp.ones(64)), 2)
calls = hc.monitor.pinned_memory()["calls"]
assert calls.in_use == calls.pending == 0
""")


def test_a_callback_that_fails_gives_its_block_back(run):
    run("""
def host(x):
    if x[0] < 0: raise ValueError("negative")
    return x
f = jax.jit(lambda x: hc.call(host, spec(4096), x))
for _ in range(50):
    try:
        with hc.reraise(): jax.block_until_ready(f(-jnp.ones(4096)))
    except ValueError: pass
    np.testing.assert_array_equal(f(jnp.ones(4096)), 1)
calls = hc.monitor.pinned_memory()["calls"]
assert calls.in_use == 0 and calls.allocations <= 4, calls
""")


def test_the_pools_limit_holds_with_many_calls_in_flight(run):
    run("""
hc.configure(pinned_bytes=1 << 20)
def host(x):
    time.sleep(1e-3)  # so that calls overlap
    return x + 1
f = jax.jit(lambda x: hc.call(host, spec(1 << 16), x))          # 512 KiB each
wrong = []
def work(k):
    x = jax.device_put(jnp.full(1 << 16, float(k)), jax.devices()[k % 4])
    for _ in range(10):
        x = f(x)
    if not (np.asarray(x) == k + 10).all(): wrong.append(k)
threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert wrong == []
calls = hc.monitor.pinned_memory()["calls"]
assert calls.limit == 1 << 20
assert calls.peak <= 1 << 20 and calls.waits > 0 and calls.overruns == 0, calls
assert fake.fakePinnedBytes() <= 1 << 20
""")


def test_one_device_that_can_not_get_its_operands(run):
    """The other devices wait for it at the call, and learn of the failure."""
    run("""
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
call = lambda x: hc.call(lambda v: v + 1, spec(4), x)
x = jax.device_put(jnp.arange(4.0), jax.NamedSharding(mesh, P("x")))
shards = jax.jit(jax.shard_map(lambda x: hc.call(lambda v: v + 1, spec(1), x),
                               mesh=mesh, in_specs=P("x"), out_specs=P("x")))
for f in (jax.jit(lambda x: call(x) * 1), shards):
    np.testing.assert_array_equal(f(x), np.arange(4.0) + 1)
    for _ in range(4):
        fake.fakeFailNext(b"cuMemcpyDtoHAsync_v2", 2)
        try: jax.block_until_ready(f(x))
        except jax.errors.JaxRuntimeError as error:
            assert "CUDA_ERROR_OUT_OF_MEMORY" in str(error), error
        else: raise AssertionError
    np.testing.assert_array_equal(f(x), np.arange(4.0) + 1)
""")


# --- Taps ----------------------------------------------------------------------------


def test_taps_come_in_order_and_whole(run):
    run("""
fake.fakeSetDelayMicroseconds(20)
seen = []
def host(i, x):
    assert (x == i).all()
    seen.append(int(i))
@jax.jit
def f(x):
    def body(i, x):
        hc.tap(host, i, x + i)
        return x
    return lax.fori_loop(0, 200, body, x)
f(jnp.zeros(300)).block_until_ready()
hc.barrier()
assert seen == list(range(200)), seen
taps = hc.monitor.pinned_memory()["taps"]
assert taps.in_use == 0 and count("cuLaunchHostFunc") == 200
""")


def test_a_full_queue(run):
    run("""
hc.configure(tap_queue_bytes=20_000)
for when_full in ("block", "drop_newest", "drop_oldest"):
    seen = []
    def host(i, x):
        time.sleep(1e-3)  # the program is faster, so that the queue fills
        seen.append(int(i))
    options = {"when_full": when_full, "tag": when_full}
    f = jax.jit(lambda x: lax.fori_loop(
        0, 100, lambda i, x: (hc.tap(host, i, x, **options), x)[1], x))
    f(jnp.zeros(1000)).block_until_ready()
    hc.barrier()
    assert seen == sorted(seen)
    dropped = hc.monitor.stats()[when_full].dropped
    assert len(seen) + dropped == 100
    assert (when_full == "block") == (len(seen) == 100), (when_full, len(seen))
""")


def test_taps_masked_and_passed_through(run):
    run("""
seen = []
f = jax.jit(lambda x: hc.tap_through(lambda v: seen.append(float(v)), x, where=x > 1) + 1)
assert [float(f(float(i))) for i in range(4)] == [1, 2, 3, 4]
hc.barrier()
assert seen == [2, 3]
""")


def test_taps_with_a_flag(run):
    run("""
seen = []
def body(i, x):
    hc.tap(lambda i: seen.append(int(i)), i, every=3600.0, always=i == 8, where=i != 3)
    hc.tap(lambda i: seen.append(100 + int(i)), i, every=4, always=i == 5)
    return x
jax.jit(lambda x: lax.fori_loop(0, 9, body, x))(jnp.zeros(3)).block_until_ready()
hc.barrier()
assert sorted(seen) == [0, 8, 100, 104, 105, 108], seen
""")


# --- Buffers -------------------------------------------------------------------------


def test_buffers_are_the_devices_memory(run):
    run("""
def at(interface):
    address, read_only = interface["data"]
    n = int(np.prod(interface["shape"]))
    return np.ctypeslib.as_array((ctypes.c_float * n).from_address(address))
def host(ctx, out, x):
    assert ctx.stream in staged.STREAMS
    assert ctx.__cuda_stream__() == (0, ctx.stream)
    for buffer, writeable in ((x, False), (out, True)):
        interface = buffer.__cuda_array_interface__
        assert interface["shape"] == (8,) and interface["typestr"] == "<f4"
        assert interface["version"] == 3 and interface["strides"] is None
        assert interface["stream"] == ctx.stream
        fake.fakeSetCapturing(ctypes.c_void_p(ctx.stream), 1)
        assert buffer.__cuda_array_interface__["stream"] is None
        fake.fakeSetCapturing(ctypes.c_void_p(ctx.stream), 0)
        assert interface["data"] == (buffer.ptr, not writeable)
        assert buffer.__dlpack_device__() == (2, ctx.device.id)
        for refused in (np.asarray, memoryview, lambda b: b.__array__()):
            try: refused(buffer)
            except (TypeError, BufferError) as error:
                assert "GPU" in str(error), error
            else: raise AssertionError(refused)
        try: np.from_dlpack(buffer)
        except (BufferError, RuntimeError): pass
        for stream in (ctx.stream, -1):
            buffer.__dlpack__(stream=stream)
        waits = count("cuStreamSynchronize")
        buffer.__dlpack__(stream=1); buffer.__dlpack__()
        assert count("cuStreamSynchronize") == waits + 2
    at(out.__cuda_array_interface__)[:] = at(x.__cuda_array_interface__) * 2
copies = lambda: sum(count(f"cuMemcpy{k}Async_v2") for k in ("DtoH", "HtoD", "DtoD"))
f = jax.jit(hc.buffers.buffer_callback(host, spec(8)))
for device in jax.devices():
    x = jax.device_put(jnp.arange(8.0), device)
    before = copies()
    with hc.reraise(): np.testing.assert_array_equal(f(x), np.arange(8.0) * 2)
    assert copies() == before
""")


def test_what_is_kept_of_a_gpus_buffer_is_an_error(run):
    run("""
kept = []
class Tensor:  # holds the Buffer, as those made from the interface do
    def __init__(self, buffer): self.of, self.at = buffer, buffer.__cuda_array_interface__
for keep in (Tensor, lambda b: b.__dlpack__(), lambda b: b.__dlpack__(max_version=(1, 0))):
    f = jax.jit(hc.buffers.buffer_callback(lambda ctx, out, x: kept.append(keep(x)), spec()))
    try:
        with hc.reraise(): jax.block_until_ready(f(jnp.ones(4)))
    except hc.errors.EscapeError as error:
        assert "args[0]" in str(error)
    else: raise AssertionError("kept")
    kept.clear()
f = jax.jit(hc.buffers.buffer_callback(lambda ctx, out, x: kept.append(x), spec()))
jax.block_until_ready(f(jnp.ones(4)))     # the Buffer alone
""")


def test_small_elements_on_the_device(run):
    run("""
sizes = []
f = lambda n, **more: jax.jit(hc.buffers.buffer_callback(
    lambda ctx, out, x: sizes.append((out.nbytes, x.nbytes)), spec(n, dtype=jnp.int4), **more))
jax.block_until_ready(f(7)(jnp.zeros(8, jnp.int2)))
assert sizes == [(4, 2)], sizes
g = hc.buffers.buffer_callback(lambda *_: None, spec(3, dtype=jnp.int4), vmap_method="sequential")
try:
    jax.block_until_ready(jax.jit(jax.vmap(g))(jnp.zeros((4, 3), jnp.int32)))
except jax.errors.JaxRuntimeError as error:
    assert "do not begin at a byte" in str(error)
else: raise AssertionError
""")


def test_native_code_gets_the_stream(run):
    run("""
seen = []
kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
code = kind(lambda outs, ins, stream: seen.append(stream))
f = jax.jit(hc.buffers.buffer_callback(hc.buffers.native(code), spec()))
jax.block_until_ready(f(jnp.ones(4)))
assert seen and seen[0] in staged.STREAMS
""")


X = np.float32(1)
PROGRAMS = {
    "hostcall_call": lambda x: hc.call(np.sin, x, x),
    "hostcall_tap": lambda x: (hc.tap(print, x), x)[1],
    "hostcall_buffer": hc.buffers.buffer_callback(print, X),
    "hostcall_buffer_graph": hc.buffers.buffer_callback(
        print, X, command_buffer_compatible=True
    ),
}
DROP_INS = {
    "pure_callback": lambda x: hc.pure_callback(np.sin, x, x),
    "io_callback": lambda x: hc.io_callback(np.sin, x, x, ordered=True),
    "debug.callback": lambda x: (hc.debug.callback(print, x), x)[1],
    "debug.print": lambda x: (hc.debug.print("{}", x), x)[1],
}


@pytest.mark.parametrize("target", PROGRAMS)
@pytest.mark.parametrize("lowered_for", [("cuda",), ("cpu", "cuda")])
def test_lowered_for_cuda(target, lowered_for):
    traced = jax.jit(PROGRAMS[target]).trace(jnp.asarray(X))
    text = traced.lower(lowering_platforms=lowered_for).as_text()
    assert f"@{target}(" in text
    assert "python" not in text  # JAX's own callbacks


@pytest.mark.parametrize("name", DROP_INS)
def test_drop_ins_lowered_for_cuda(name):
    traced = jax.jit(DROP_INS[name]).trace(jnp.asarray(X))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "@hostcall_call(" in text
    assert "python" not in text


def test_jaxs_own_callbacks_lowered_for_cuda():
    f = jax.jit(lambda x: jax.pure_callback(np.sin, x, x))  # bound before the patch
    with hc.patch_jax():
        text = f.trace(X).lower(lowering_platforms=("cuda",)).as_text()
    assert "@hostcall_call(" in text


# --- Arrays on the device in a call --------------------------------------------------

ON_DEVICE = """
class Array:  # an array on the device, as CuPy's
    def __init__(self, values, strides=None, **stream):
        self.values = np.ascontiguousarray(values)
        self.__cuda_array_interface__ = {
            "shape": self.values.shape, "typestr": self.values.dtype.str, "version": 3,
            "data": (self.values.ctypes.data, False), "strides": strides, **stream}
def read(buffer):
    i = buffer.__cuda_array_interface__
    n = int(np.prod(i["shape"]))
    flat = np.ctypeslib.as_array((ctypes.c_float * n).from_address(i["data"][0]))
    return flat.reshape(i["shape"]).copy()
kept = []                                  # an allocator would free behind the stream
def made(*args, **stream):
    kept.append(Array(*args, **stream))
    return kept[-1]
copies = lambda: {k: count(f"cuMemcpy{k}Async_v2") for k in ("DtoH", "HtoD", "DtoD")}
"""


def test_a_call_on_the_devices_arrays(run):
    run(
        ON_DEVICE
        + """
def host(x, name, *, y):
    assert name == "a" and isinstance(x, hc.buffers.Buffer) and not x.writeable
    assert hc.current().stream in staged.STREAMS
    return {"s": made(read(x) + read(y)), "x": x}
f = jax.jit(lambda x, y: hc.call(host, {"s": x, "x": x}, x, "a", y=y, arrays="cuda"))
x, y = jnp.arange(6.0).reshape(2, 3), jnp.ones((2, 3))
with hc.reraise(): out = f(x, y)
np.testing.assert_array_equal(out["s"], x + y)
np.testing.assert_array_equal(out["x"], x)
assert copies() == {"DtoH": 0, "HtoD": 0, "DtoD": 2}
g = jax.jit(jax.vmap(lambda x: hc.call(
    lambda v: made(read(v) * 2), spec(3), x, arrays="cuda", order="unordered")))
with hc.reraise(): np.testing.assert_array_equal(g(x), x * 2)
"""
    )


def test_what_was_made_on_another_stream_is_waited_for(run):
    run(
        ON_DEVICE
        + """
other, TRUE, ABSENT = staged.STREAMS[-1], "its own", "no such key"
def late(stream):                          # a value that comes later, on that stream
    named = {} if told is ABSENT else {"stream": stream if told is TRUE else told}
    source, value = np.full(4, 7, np.float32), made(np.zeros(4, np.float32), **named)
    kept.append(source)
    assert fake.cuMemcpyDtoDAsync_v2(
        ctypes.c_uint64(value.values.ctypes.data), ctypes.c_uint64(source.ctypes.data),
        ctypes.c_size_t(16), ctypes.c_void_p(stream)) == 0
    return value
def host(x):
    assert hc.current().stream != other
    before.append([count(name) for name in ("cuStreamSynchronize", "cuCtxSynchronize")])
    return late(stream or hc.current().stream)
fake.fakeSetDelayMicroseconds(20_000)
# Nobody is told, or 0, which names none: all that the device does is waited for. 1 and 2
# are its default streams.
for told, stream, of_streams, of_all in (
    (TRUE, None, 0, 0), (TRUE, other, 2, 0), (TRUE, 1, 2, 0), (TRUE, 2, 2, 0),
    (ABSENT, other, 1, 1), (None, other, 1, 1), (0, other, 1, 1)):
    before = []
    f = jax.jit(lambda x: hc.call(host, spec(4), x, arrays="cuda"))
    with hc.reraise(): np.testing.assert_array_equal(f(jnp.ones(4)), 7)
    # One more is the wait of the handler for tests.
    after = count("cuStreamSynchronize") - 1, count("cuCtxSynchronize")
    assert (after[0] - before[0][0], after[1] - before[0][1]) == (of_streams, of_all), told
"""
    )


def test_results_that_are_not_on_the_device(run):
    run(
        ON_DEVICE
        + """
x = jnp.ones((2, 3))
for host, text in (
    (lambda x: np.ones((2, 3), np.float32), "should be an array on the GPU"),
    (lambda x: made(np.ones((3, 2), np.float32)), "float32[2, 3], got float32[3, 2]"),
    (lambda x: made(np.ones((2, 3))), "got float64[2, 3]"),
    (lambda x: made(np.ones((2, 3), np.float32), (4, 8)), "should be row-major"),
):
    try:
        with hc.reraise():
            jax.block_until_ready(
                jax.jit(lambda x: hc.call(host, spec(2, 3), x, arrays="cuda"))(x))
    except hc.errors.ResultError as error:
        assert text in str(error) and "result of `<lambda>`" in str(error), error
    else:
        raise AssertionError(text)
"""
    )


@pytest.mark.parametrize(
    "options",
    [
        {"where": True},
        {"timeout": 1},
        {"lend": True},
        {"vmap_method": "parallel"},
        {"on": jax.devices()[0]},
    ],
)
def test_options_for_arrays_on_the_host(options):
    (option,) = options
    with pytest.raises(hc.errors.SpecError, match=f"has arrays='cuda' and {option}="):
        policies.call(np.sin, X, X, arrays="cuda", **options)


def test_arrays_of_a_gpu_on_the_cpu():
    f = jax.jit(lambda x: hc.call(lambda x: x, X, x, arrays="cuda"))
    with (
        pytest.raises(hc.errors.SpecError, match="its program runs on the CPU"),
        hc.reraise(),
    ):
        jax.block_until_ready(f(X))
