"""Buffers: views of XLA's memory, writing through them, and views that are kept."""

import ctypes
import hashlib
import io
import sys
import threading
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dtypes import DTYPES, SMALL, same, values
from jax import lax
from limits import resident_kib
from specs import spec

import hostcall as hc

pytestmark = pytest.mark.usefixtures("wide")

MODES = {"eager": lambda f: f, "jit": jax.jit}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def run(mode, host, result, *args, **options):
    with hc.reraise():
        out = mode(hc.buffers.buffer_callback(host, result, **options))(*args)
        return jax.block_until_ready(out)


# --- Elements ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@modes
def test_every_dtype_in_and_out(mode, dtype):
    shapes = [(), (7,), (3, 5), (2, 0, 3)]
    data = [values(dtype, shape) for shape in shapes]

    def host(ctx, outs, *args):
        for out, x, wanted in zip(outs, args, data, strict=True):
            sort = (wanted.shape, wanted.dtype)
            assert (x.shape, x.dtype) == (out.shape, out.dtype) == sort
            read, write = np.asarray(x), np.asarray(out)
            assert read.dtype == write.dtype == wanted.dtype
            assert (read.flags.writeable, write.flags.writeable) == (False, True)
            same(read, wanted)
            write[...] = read

    outs = run(mode, host, [like(x) for x in data], *data)
    for out, wanted in zip(outs, data, strict=True):
        same(out, wanted)


@pytest.mark.parametrize("dtype", SMALL)
@modes
def test_small_elements_of_an_alias(mode, dtype):
    data = values(dtype, (5, 3))

    def host(ctx, out, x):
        same(np.asarray(out), data)
        np.asarray(out)[1] = np.asarray(x)[0]

    wanted = data.copy()
    wanted[1] = wanted[0]
    out = run(mode, host, like(data), data, input_output_aliases={0: 0})
    same(out, wanted)


@pytest.mark.parametrize("dtype", [*SMALL, "bfloat16", "bool"])
def test_rows_of_every_width(dtype):
    data = values(dtype, (4, 7))

    def host(ctx, out, x):
        np.asarray(out)[...] = np.asarray(x)[::-1]

    f = hc.buffers.buffer_callback(
        host, jax.ShapeDtypeStruct((7,), data.dtype), vmap_method="sequential"
    )
    same(jax.jit(jax.vmap(f))(data), data[:, ::-1])


# --- Protocols -----------------------------------------------------------------------

READERS = {
    "asarray": np.asarray,
    "array": np.array,
    "__array__": lambda x: x.__array__(),
    "memoryview": lambda x: np.asarray(memoryview(x)),
    "frombuffer": lambda x: np.frombuffer(x, np.float32).reshape(x.shape),
    "dlpack 1": lambda x: np.from_dlpack(x),
    "dlpack 0": lambda x: np.from_dlpack(Unversioned(x)),
    "jax": lambda x: np.asarray(jnp.from_dlpack(x)),
}


class Unversioned:
    """A producer from before DLPack 1.0, as a consumer sees it."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **_):
        return self.x.__dlpack__()

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


@pytest.mark.parametrize("reader", READERS)
@modes
def test_readers(mode, reader):
    def host(ctx, out, x):
        np.testing.assert_array_equal(READERS[reader](x), x0)
        np.testing.assert_array_equal(READERS[reader](out), np.zeros(()))

    x0 = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert run(mode, host, spec(), x0) == 0


def fill(out, x):
    out[...] = x


def fill_dlpack(out, x):
    np.from_dlpack(out)[...] = np.asarray(x)


WRITERS = {
    "asarray": lambda out, x: fill(np.asarray(out), np.asarray(x)),
    "out=": lambda out, x: np.add(x, 0, out=np.asarray(out)),
    "memoryview": lambda out, x: (
        memoryview(out).cast("B").__setitem__(slice(None), memoryview(x).cast("B"))
    ),
    "frombuffer": lambda out, x: fill(
        np.frombuffer(out, np.float32), np.asarray(x).ravel()
    ),
    "dlpack 1": fill_dlpack,
}


@pytest.mark.parametrize("writer", WRITERS)
@modes
def test_writers(mode, writer):
    x0 = np.arange(6, dtype=np.float32).reshape(2, 3)

    def host(ctx, out, x):
        WRITERS[writer](out, x)

    np.testing.assert_array_equal(run(mode, host, like(x0), x0), x0)


@modes
def test_inputs_can_not_be_written(mode):
    def host(ctx, out, x):
        attempts = (
            lambda: np.asarray(x).__setitem__(0, 9),
            lambda: np.asarray(x).setflags(write=True),
            lambda: x.__array__().setflags(write=True),
            lambda: memoryview(x).__setitem__(0, 9),
            lambda: np.frombuffer(x, np.float32).__setitem__(0, 9),
            lambda: np.from_dlpack(x).__setitem__(0, 9),
            lambda: np.add(x, 1, out=np.asarray(x)),
        )
        for attempt in attempts:
            with pytest.raises((ValueError, TypeError, BufferError)):
                attempt()

    run(mode, host, spec(), jnp.ones(3))


@modes
def test_array_takes_dtype_and_copy(mode):
    def host(ctx, out, x):
        assert np.asarray(x, np.int64).dtype == np.int64
        assert np.asarray(x, np.float32).ctypes.data == x.ptr
        assert np.array(x).ctypes.data != x.ptr
        assert x.__array__(copy=True).flags.writeable
        assert np.array(x, copy=False).ctypes.data == x.ptr
        with pytest.raises(ValueError, match="copy"):
            np.array(x, np.float64, copy=False)
        with pytest.raises(ValueError, match="Unable to avoid copy"):
            x.__array__(np.float64, copy=False)

    run(mode, host, spec(), jnp.ones(3))


def test_dlpack_in_detail():
    def host(ctx, out, x, narrow):
        for options in ({}, {"max_version": (1, 1)}, {"stream": None}, {"stream": -1}):
            assert "dltensor" in repr(x.__dlpack__(**options))
        assert x.__dlpack__(dl_device=(1, 0), max_version=(1, 0)) is not None
        copied = np.from_dlpack(x, copy=True)
        copied[...] = 7  # the copy may be written to
        for options, text in (
            ({"stream": 3}, "no streams"),
            ({"dl_device": (2, 0)}, r"can't be moved to \(2, 0\)"),
        ):
            with pytest.raises(BufferError, match=text):
                x.__dlpack__(**options)
        with pytest.raises(BufferError, match="DLPack has no type for int4"):
            narrow.__dlpack__()
        with pytest.raises(TypeError, match="incompatible function arguments"):
            x.__dlpack__(1)
        with pytest.raises(TypeError, match="incompatible function arguments"):
            x.__dlpack__(other=1)
        kept.append(copied)

    kept = []
    run(jax.jit, host, spec(), jnp.arange(3.0), jnp.zeros(3, jnp.int4))
    np.testing.assert_array_equal(kept[0], [7, 7, 7])


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in SMALL])
def test_dlpacks_name_for_every_dtype(dtype):
    """JAX reads Buffers of every dtype that it can read from its own producer."""
    data = values(dtype, (5,))
    try:
        jnp.from_dlpack(jnp.asarray(data))
    except (RuntimeError, ValueError, TypeError, BufferError, KeyError):
        pytest.skip("JAX has no DLPack of these")

    def host(ctx, out, x):
        same(np.asarray(jnp.from_dlpack(x)), data)

    run(jax.jit, host, spec(), data)


@modes
def test_small_inputs_that_go_out_by_dlpack_are_watched(mode):
    """PyTorch's tensors can be written to, whatever the protocol says."""
    x = jnp.arange(4.0)
    float4 = ctypes.c_float * 4

    def host(ctx, out, x):
        float4.from_address(np.from_dlpack(x).ctypes.data)[1] = 9

    text = r"`.*host` wrote to args\[0\], which is an input \(its values have been restored"
    with pytest.raises(hc.errors.ResultError, match=text):
        run(mode, host, spec(), x)
    np.testing.assert_array_equal(x, np.arange(4.0))

    def failing(ctx, out, x):
        host(ctx, out, x)
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        run(mode, failing, spec(), x)
    np.testing.assert_array_equal(x, np.arange(4.0))

    def through_an_alias(ctx, out, x):
        np.from_dlpack(x), np.from_dlpack(out)
        np.asarray(out)[...] += 1

    out = run(mode, through_an_alias, like(x), x, input_output_aliases={0: 0})
    np.testing.assert_array_equal(out, x + 1)


@pytest.mark.filterwarnings("ignore:Setting the shape:DeprecationWarning")
@modes
def test_each_reader_has_a_shape_of_its_own(mode):
    def host(ctx, out, x):
        first = np.asarray(x)  # bfloat16 goes through __array__
        first.shape = (2, 2)
        assert np.asarray(x).shape == x.shape == (4,)
        with pytest.raises(ValueError, match="WRITEABLE"):
            first.setflags(write=True)

    run(mode, host, spec(), jnp.zeros(4, jnp.bfloat16))


class PyBuffer(ctypes.Structure):
    """CPython's Py_buffer."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def answer(exporter, flags):
    """What an object answers to a request of the buffer protocol."""
    view = PyBuffer()
    get = ctypes.pythonapi.PyObject_GetBuffer
    get.argtypes = [ctypes.py_object, ctypes.POINTER(PyBuffer), ctypes.c_int]
    try:
        get(exporter, view, flags)
    except (BufferError, ValueError):
        return "refused"
    release = ctypes.pythonapi.PyBuffer_Release
    release.argtypes = [ctypes.POINTER(PyBuffer)]
    rows = [p[: view.ndim] if p else None for p in (view.shape, view.strides)]
    data = ctypes.string_at(view.buf, view.len)
    seen = (view.len, view.itemsize, view.readonly, view.ndim, view.format)
    release(view)
    return *seen, *rows, view.suboffsets, data


SHAPES = [(), (3,), (2, 3), (1, 3), (3, 1), (2, 0, 3), (1, 2, 1, 3)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_request_is_answered_as_numpy_answers_it(dtype):
    """PyBUF_WRITABLE is 1, _FORMAT 4, _ND 8; the others are five bits above _ND."""
    data = [values(dtype, shape) for shape in SHAPES]

    def host(ctx, outs, *args):
        for out, x in zip(outs, args, strict=True):
            np.asarray(out)[...] = np.asarray(x)
            # Copies: XLA may keep other unused bits of small integers than NumPy does.
            read, written = np.array(x), np.array(out)
            read.flags.writeable = False
            for flags in range(512):
                assert answer(x, flags) == answer(read, flags), (x, flags)
                assert answer(out, flags) == answer(written, flags), (out, flags)

    run(jax.jit, host, [like(x) for x in data], *data)


def test_consumers_that_ask_for_bytes_only():
    data = [values(d, (2, 3)) for d in ("float32", "bfloat16", "complex64", "uint4")]

    def host(ctx, out, *args):
        for x, wanted in zip(args, data, strict=True):
            digest = hashlib.sha256(wanted).digest()
            assert hashlib.sha256(x).digest() == digest
            assert zlib.crc32(x) == zlib.crc32(wanted)
            assert io.BytesIO(x).getvalue() == wanted.tobytes()
            if sys.version_info >= (3, 12):
                assert x.__buffer__(0).tobytes() == wanted.tobytes()
                with pytest.raises(BufferError, match="an input, which can't be"):
                    x.__buffer__(1)

    run(jax.jit, host, spec(), *data)


def test_what_the_buffer_protocol_refuses_says_why():
    def host(ctx, out, x, brain):
        with pytest.raises(BufferError, match="row-major"):
            ctypes.pythonapi.PyObject_GetBuffer(
                ctypes.py_object(x), ctypes.byref(PyBuffer()), 0x58
            )
        with pytest.raises(BufferError, match="no letter"):
            memoryview(brain)

    run(jax.jit, host, spec(), jnp.zeros((3, 2)), jnp.zeros(3, jnp.bfloat16))


# --- Kept ----------------------------------------------------------------------------

ESCAPES = {
    "array": np.asarray,
    "part": lambda x: np.asarray(x)[1:],
    "view of a view": lambda x: np.asarray(x).reshape(2, 2).T[::-1],
    "__array__": lambda x: x.__array__(),
    "part of __array__": lambda x: x.__array__()[2:],
    "memoryview": memoryview,
    "frombuffer": lambda x: np.frombuffer(x, np.uint8),
    "dlpack": np.from_dlpack,
    "capsule": lambda x: x.__dlpack__(),
    "versioned capsule": lambda x: x.__dlpack__(max_version=(1, 0)),
    "in a closure": lambda x: (lambda a: lambda: a)(np.asarray(x)),
    "in a cycle": lambda x: cycle(np.asarray(x)),
}


def cycle(x):
    box = [x]
    box.append(box)
    return box


@pytest.mark.parametrize("which", ["args[0]['a']", "out[1]"])
@pytest.mark.parametrize("escape", ESCAPES)
@modes
def test_what_is_kept_is_an_error(mode, escape, which):
    def host(ctx, out, tree):
        x = tree["a"] if which.startswith("args") else out[1]
        kept.append(ESCAPES[escape](x))

    kept = []
    text = f"`.*host` kept a view of {which} after it returned".replace("[", r"\[")
    with pytest.raises(hc.errors.EscapeError, match=text):
        run(mode, host, (spec(), spec(4)), {"a": jnp.arange(4.0)})
    kept.clear()


@modes
def test_a_cycle_that_nobody_keeps_is_no_error(mode):
    def host(ctx, out, x):
        cycle(np.asarray(x))

    run(mode, host, spec(), jnp.arange(4.0))


@modes
def test_a_failing_callback_keeps_nothing(mode):
    """The frames of the traceback hold the arrays, so they are cleared."""

    def host(ctx, out, x):
        view = np.asarray(x)
        raise ValueError("after", view.sum())

    with pytest.raises(ValueError, match="after"):
        run(mode, host, spec(), jnp.arange(4.0))


NAMES = (
    "shape", "dtype", "ndim", "size", "nbytes", "ptr", "writeable", "device",
    "__cuda_array_interface__",
)  # fmt: skip


@modes
def test_a_closed_buffer_refuses_everything(mode):
    kept = []

    def host(ctx, out, x):
        kept.extend((x, out, ctx))

    run(mode, host, spec(), jnp.arange(4.0))  # keeping the Buffer itself is allowed
    x, out, ctx = kept
    uses = [
        np.asarray,
        np.from_dlpack,
        lambda b: b.__array__(),
        lambda b: b.__dlpack__(),
        lambda b: b.__dlpack_device__(),
        *(lambda b, name=name: getattr(b, name) for name in NAMES),
        memoryview,
    ]
    for buffer in (x, out):
        for use in uses:
            with pytest.raises(
                hc.errors.EscapeError, match="this Buffer belongs to a call"
            ):
                use(buffer)
        assert repr(buffer) == "<Buffer of a call that ended>"
    for name in ("stage", "stream", "device", "run"):
        with pytest.raises(
            hc.errors.EscapeError, match="this context belongs to a call"
        ):
            getattr(ctx, name)
    kept.clear()


def test_kept_buffers_are_not_opened_again():
    kept = []

    def host(ctx, out, x):
        assert all(x is not other for other in kept)
        kept.append(x)
        np.asarray(out)[...] = len(kept)

    f = jax.jit(hc.buffers.buffer_callback(host, spec()))
    assert [float(f(jnp.float32(1))) for _ in range(3)] == [1, 2, 3]
    assert all(repr(x) == "<Buffer of a call that ended>" for x in kept)
    kept.clear()


def test_no_types_to_make():
    for kind in (hc.buffers.Buffer, hc.buffers.ExecutionContext):
        with pytest.raises(TypeError, match="no constructor"):
            kind()


# --- Debug mode ----------------------------------------------------------------------


@pytest.fixture
def debug(monkeypatch):
    monkeypatch.setenv("HOSTCALL_DEBUG", "1")


@pytest.mark.parametrize("n", [1, 2, 3, 64, 5000])
@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8", "bfloat16"])
@modes
def test_small_outputs_that_nobody_writes_are_zero(mode, dtype, n):
    if np.dtype(getattr(jnp, dtype)).itemsize * n > 4096:
        pytest.skip("larger ones hold anything")
    out = run(mode, lambda ctx, out: None, spec(n, dtype=getattr(jnp, dtype)))
    np.testing.assert_array_equal(out, np.zeros(n))


UNWRITTEN = {
    "nothing": lambda out: None,
    "half": lambda out: fill(out[: len(out) // 2], 1),
    "all but one": lambda out: fill(out[:-1], 1),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "float16", "int8"])
@pytest.mark.parametrize("written", UNWRITTEN)
@modes
def test_debug_finds_what_was_not_written(mode, written, dtype, debug):
    size = np.dtype(dtype).itemsize
    if written == "all but one" and size < 4:
        pytest.skip("one element of less than 4 bytes can't be told from a result")

    def host(ctx, out):
        UNWRITTEN[written](np.asarray(out["a"]))

    text = r"`.*host` did not write all of out\['a'\] \(.*HOSTCALL_DEBUG=1"
    with pytest.raises(hc.errors.UnwrittenError, match=text):
        run(mode, host, {"a": spec(64, dtype=dtype)})


@modes
def test_debug_finds_writes_to_inputs(mode, debug):
    x = jnp.arange(4.0)

    def host(ctx, out, x):
        writeable = np.from_dlpack(Unversioned(x))
        # A consumer that does not know the read-only flag can do this.
        (ctypes.c_float * 4).from_address(writeable.ctypes.data)[2] = 9
        np.asarray(out)[...] = 0

    text = r"`.*host` wrote to args\[0\], which is an input"
    with pytest.raises(hc.errors.ResultError, match=text):
        run(mode, host, spec(), x)
    np.testing.assert_array_equal(x, np.arange(4.0))  # restored


@modes
def test_debug_lets_pass_what_is_right(mode, debug):
    def host(ctx, out, x, y):
        np.asarray(out[0])[...] = np.asarray(x)
        np.asarray(out[1])[...] += 1

    x, y = jnp.full(3, jnp.nan), jnp.arange(5)
    options = {"input_output_aliases": {1: 1}}
    one, two = run(mode, host, (spec(3), like(y)), x, y, **options)
    np.testing.assert_array_equal(one, x)
    np.testing.assert_array_equal(two, y + 1)


# --- Many at once --------------------------------------------------------------------


def test_many_threads():
    """Programs in flight on several threads have separate Buffers."""

    def host(ctx, out, x):
        view = np.asarray(out)
        view[...] = np.asarray(x)
        view += 1

    f = jax.jit(
        lambda x: lax.fori_loop(
            0, 50, lambda i, c: hc.buffers.buffer_callback(host, spec(16))(c), x
        )
    )
    failures = []

    def work(k):
        try:
            for _ in range(5):
                np.testing.assert_array_equal(f(jnp.full(16, float(k))), k + 50)
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_cycles_that_nobody_keeps_on_several_threads():
    """The collection of one thread does not stand for that of another one."""

    def host(ctx, out, x):
        cycle(np.asarray(x)), cycle(out.__array__()), cycle(np.from_dlpack(x))
        np.copyto(np.asarray(out), np.asarray(x))

    program = jax.jit(hc.buffers.buffer_callback(host, spec(4)))
    x = jnp.arange(4.0)
    failures = []

    def work():
        try:
            for _ in range(20):
                np.testing.assert_array_equal(program(x), x)
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_buffers_do_not_grow_memory():
    def host(ctx, out, x):
        memoryview(out).cast("B")[:] = memoryview(x).cast("B")
        np.asarray(x), x.__array__(), np.from_dlpack(x)

    f = hc.buffers.buffer_callback(host, spec(256))
    loop = jax.jit(lambda x: lax.fori_loop(0, 2000, lambda i, c: f(c), x))
    x = jnp.ones(256)
    loop(x).block_until_ready()
    before = resident_kib()
    for _ in range(10):
        loop(x).block_until_ready()
    assert resident_kib() - before < 4096  # for 40,000 Buffers and views of each kind


def test_a_buffer_that_nothing_has_made():
    kind = hc.buffers.Buffer
    made = kind.__new__(kind)
    for read in (memoryview, bytes):
        with pytest.raises(TypeError, match="hostcall"):
            read(made)
