"""Kinds of arrays: what a function may return, and what `arrays=` passes to it."""

import array
import decimal
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc

MODES = {"eager": lambda f: f, "jit": jax.jit}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
WANT = np.arange(6, dtype=np.float32).reshape(2, 3)


def spec(x):
    return jax.ShapeDtypeStruct(np.shape(x), x.dtype)


class HasArray:
    def __init__(self, value):
        self.value = value

    def __array__(self, dtype=None, copy=None):
        return np.array(self.value, dtype=dtype)


class HasInterface:
    def __init__(self, value):
        self.value = value

    @property
    def __array_interface__(self):
        return self.value.__array_interface__


class HasBuffer(array.array):
    """An array that supports only Python's buffer protocol."""


class HasDLPack:
    """An array that supports only DLPack, like a tensor of a library unknown to NumPy."""

    def __init__(self, value):
        self.value = value

    def __dlpack__(self, **options):
        return self.value.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.value.__dlpack_device__()


class Subclass(np.ndarray):
    pass


def read_only():
    frozen = WANT.copy()
    frozen.flags.writeable = False
    return frozen


RETURNED = {
    "column-major": lambda: np.asfortranarray(WANT),
    "transposed": lambda: WANT.T.copy().T,
    "every other": lambda: np.repeat(WANT, 2, axis=1)[:, ::2],
    "backwards": lambda: WANT[::-1, ::-1].copy()[::-1, ::-1],
    "read-only": read_only,
    "big-endian": lambda: WANT.astype(">f4"),
    "big-endian, wider": lambda: WANT.astype(">f8"),
    "unaligned": lambda: np.frombuffer(b"x" + WANT.tobytes(), "f4", 6, 1).reshape(2, 3),
    "float64": lambda: WANT.astype(np.float64),
    "longdouble": lambda: WANT.astype(np.longdouble),
    "integers": lambda: WANT.astype(np.int16),
    "subclass": lambda: WANT.view(Subclass),
    "masked": lambda: np.ma.masked_array(WANT, mask=False),
    "record field": lambda: np.rec.fromarrays([WANT, WANT], names="a,b").a,
    "list": lambda: WANT.tolist(),
    "tuples": lambda: tuple(map(tuple, WANT.tolist())),
    "list of arrays": lambda: list(WANT),
    "list of jax.Arrays": lambda: [jnp.asarray(row) for row in WANT],
    "range": lambda: [range(3), range(3, 6)],
    "memoryview": lambda: memoryview(WANT),
    "column-major memoryview": lambda: memoryview(np.asfortranarray(WANT)),
    "jax.Array": lambda: jnp.asarray(WANT),
    "jax.Array of another dtype": lambda: jnp.asarray(WANT, jnp.bfloat16),
    "jax.Array elsewhere": lambda: jax.device_put(WANT, jax.devices()[-1]),
    "__array__": lambda: HasArray(WANT),
    "__array_interface__": lambda: HasInterface(WANT),
    "__dlpack__": lambda: HasDLPack(WANT.copy()),
    "__dlpack__ of bfloat16": lambda: HasDLPack(jnp.asarray(WANT, jnp.bfloat16)),
}


@modes
@pytest.mark.parametrize("make", RETURNED.values(), ids=RETURNED)
def test_arrays_that_may_be_returned(mode, make):
    # Leaves of a pytree are what lies between lists and tuples: here the value is one.
    out = mode(lambda: hc.call(make, spec(WANT)))()
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, WANT)


SCALARS = {
    "float": 3.0,
    "int": 3,
    "float64": np.float64(3),
    "float16": np.float16(3),
    "int8": np.int8(3),
    "bfloat16": jnp.bfloat16(3),
    "float8": np.array(3, jnp.float8_e4m3fn)[()],
    "0-d": np.array(3.0),
    "0-d big-endian": np.array(3.0, ">f8"),
    "memoryview": memoryview(np.array(3.0)),
    "jax.Array": HasArray(3.0),
}


@modes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("value", SCALARS.values(), ids=SCALARS)
def test_scalars_that_may_be_returned(mode, value, dtype):
    out = mode(lambda: hc.call(lambda: value, jax.ShapeDtypeStruct((), dtype)))()
    assert out.shape == ()
    assert out.dtype == dtype
    assert out == 3


@modes
def test_buffers_that_may_be_returned(mode):
    result = jax.ShapeDtypeStruct((3,), np.uint8)
    for value in (bytearray(b"abc"), HasBuffer("B", b"abc"), memoryview(b"abc")):
        out = mode(lambda value=value: hc.call(lambda: value, result))()
        np.testing.assert_array_equal(out, list(b"abc"))


@modes
@pytest.mark.parametrize("value", [decimal.Decimal(3), {1.0}, b"abc"], ids=str)
def test_results_that_are_not_arrays_of_numbers_are_refused(mode, value):
    result = jax.ShapeDtypeStruct((), np.float32)
    program = mode(lambda: hc.call(lambda: value, result))
    with (
        pytest.raises(hc.errors.ResultError, match="not an array of numbers"),
        hc.reraise(),
    ):
        jax.block_until_ready(program())


@modes
def test_torch_tensors_may_be_returned(mode):
    torch = pytest.importorskip("torch")
    for tensor in (
        torch.tensor(WANT),
        torch.tensor(WANT, requires_grad=True) * 1,
        torch.tensor(WANT).t().contiguous().t(),
        torch.tensor(WANT, dtype=torch.bfloat16),
    ):
        out = mode(lambda tensor=tensor: hc.call(lambda: tensor, spec(WANT)))()
        np.testing.assert_array_equal(out, WANT)


def test_an_argument_may_be_returned_as_it_is():
    program = jax.jit(
        lambda x: hc.call(lambda x: (x, x, x[::-1]), (spec(WANT),) * 3, x)
    )
    first, second, turned = program(WANT)
    np.testing.assert_array_equal(first, WANT)
    np.testing.assert_array_equal(second, WANT)
    np.testing.assert_array_equal(turned, WANT[::-1])


# --- arrays= -----------------------------------------------------------------------


@modes
@pytest.mark.parametrize("lend", [False, True])
def test_numpy_arrays_are_what_a_function_gets(mode, lend):
    def host(x, n):
        assert type(x) is np.ndarray
        assert type(n) is np.ndarray
        assert x.flags.c_contiguous
        assert x.flags.writeable != lend
        return x * n

    out = mode(lambda x: hc.call(host, spec(WANT), x, 2, lend=lend))(WANT)
    np.testing.assert_array_equal(out, WANT * 2)


@modes
@pytest.mark.parametrize("lend", [False, True])
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "int4", "float8_e5m2", "bool"]
)
def test_jax_arrays_on_a_device_of_hostcalls_own(mode, lend, dtype):
    x = WANT.astype(dtype)

    def host(x):
        assert isinstance(x, jax.Array)
        assert x.dtype == dtype
        assert x.devices().isdisjoint(jax.devices())
        assert jnp.zeros(()).devices() == x.devices()
        return x[::-1].astype(jnp.float32) + jnp.ones(3)

    out = mode(lambda x: hc.call(host, spec(WANT), x, arrays="jax", lend=lend))(x)
    np.testing.assert_array_equal(out, x[::-1].astype(np.float32) + 1)


@modes
@pytest.mark.parametrize("method", ["sequential", "parallel", "expand_dims"])
def test_jax_arrays_in_batches(mode, method):
    def host(x, y):
        assert isinstance(x, jax.Array)
        assert isinstance(y, jax.Array)
        return jnp.sin(x) + y

    row = lambda x: hc.call(host, x, x, 1.5, arrays="jax", vmap_method=method)
    out = mode(jax.vmap(row))(WANT)
    np.testing.assert_allclose(out, np.sin(WANT) + 1.5, rtol=1e-6)


@modes
@pytest.mark.parametrize("lend", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "complex64", "float16"])
def test_dlpack_for_numpy(mode, lend, dtype):
    x = WANT.astype(dtype)

    def host(x):
        assert (x.shape, x.dtype) == ((2, 3), dtype)
        view = np.from_dlpack(x)
        np.testing.assert_array_equal(view, np.asarray(x))
        return view[::-1].copy()

    out = mode(lambda x: hc.call(host, spec(x), x, arrays="dlpack", lend=lend))(x)
    np.testing.assert_array_equal(out, x[::-1])


@modes
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32", "bool"]
)
def test_dlpack_for_jax(mode, dtype):
    x = WANT.astype(dtype)

    def host(x):
        taken = jnp.from_dlpack(x)
        assert taken.dtype == dtype
        return taken[::-1]

    out = mode(lambda x: hc.call(host, spec(x), x, arrays="dlpack"))(x)
    np.testing.assert_array_equal(out, x[::-1])


@pytest.mark.parametrize("dtype", ["bfloat16", "int4", "float8_e3m4", "uint2"])
def test_dlpack_arrays_are_readable_as_they_are(dtype):
    x = WANT.astype(dtype)

    def host(x):
        assert repr(x) == f"DLPackArray(dtype={dtype}, shape=(2, 3))"
        assert x.__dlpack_device__() == (1, 0)
        return x

    out = jax.jit(lambda x: hc.call(host, spec(x), x, arrays="dlpack"))(x)
    np.testing.assert_array_equal(out, x)


def test_dlpack_for_torch():
    torch = pytest.importorskip("torch")
    x = WANT.astype(jnp.bfloat16)

    def host(x):
        tensor = torch.from_dlpack(x)
        assert tensor.dtype == torch.bfloat16
        return tensor + 1

    out = jax.jit(lambda x: hc.call(host, spec(x), x, arrays="dlpack"))(x)
    np.testing.assert_array_equal(out, x + 1)


X = np.float32(1)
FACES = {
    "call": (hc.call, lambda word: hc.call(len, 1.0, X, arrays=word)),
    "tap": (hc.tap, lambda word: hc.tap(len, X, arrays=word)),
    "tap_through": (hc.tap_through, lambda word: hc.tap_through(len, X, arrays=word)),
    "host": (hc.host, lambda word: hc.host(len, result=1.0, arrays=word)),
}


@pytest.mark.parametrize("name", FACES)
def test_the_annotation_of_arrays_has_what_the_option_takes(name):
    """The pages of the reference show it."""
    face, use = FACES[name]
    hint = typing.get_type_hints(face)["arrays"]
    all_of_it = [hint, *typing.get_args(hint)]
    (words,) = [
        typing.get_args(part)
        for part in all_of_it
        if typing.get_origin(part) is typing.Literal
    ]
    with pytest.raises(hc.errors.SpecError, match="should be one of") as caught:
        use("free")
    assert f"one of {', '.join(map(repr, words))}, got 'free'" in str(caught.value)
