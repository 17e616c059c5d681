"""Every dtype of JAX, in both directions, wherever bytes are moved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dtypes import DTYPES, SMALL, same, values

import hostcall as hc

pytestmark = pytest.mark.usefixtures("wide")

# jnp has these names in some versions of JAX, but a CPU has no such arrays in some or
# all of them.
ABSENT = {"int1", "uint1", "float6_e2m3fn", "float6_e3m2fn"}
SHAPES = [(), (7,), (3, 5), (0,), (2, 0, 3)]

dtypes = pytest.mark.parametrize("dtype", DTYPES)


def spec(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


class Echo:
    """A function that returns its arguments and records them."""

    def __init__(self):
        self.seen = []

    def __call__(self, x):
        self.seen.append(x)
        return x.copy()


def test_no_dtype_is_left_out():
    kind = type(jnp.float32)
    named = {np.dtype(s).name for s in vars(jnp).values() if isinstance(s, kind)}
    assert set(DTYPES) <= named <= set(DTYPES) | ABSENT


@dtypes
@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_scalars_vectors_and_empty_arrays(dtype, mode):
    xs, echo = [values(dtype, shape) for shape in SHAPES], Echo()

    def program(*xs):
        return [hc.call(echo, spec(x), x, order="unordered") for x in xs]

    for out, got, x in zip(mode(program)(*xs), echo.seen, xs, strict=True):
        same(out, x)
        same(got, x)


@dtypes
def test_as_rows_of_a_batch(dtype):
    # Rows of 7 and 15 elements end inside a byte that several small elements share.
    xs = [values(dtype, (3, *shape)) for shape in SHAPES]
    ys = [values(dtype, shape, 1) for shape in SHAPES]
    echo = Echo()

    def host(xs, ys):
        return [[echo(x) for x in xs], [echo(y) for y in ys]]

    def row(xs, ys):
        result = [[spec(x) for x in xs], [spec(y) for y in ys]]
        return hc.call(host, result, xs, ys)

    first, second = jax.jit(jax.vmap(row, in_axes=(0, None)))(xs, ys)
    seen = iter(echo.seen)
    for out, x in zip(first, xs, strict=True):
        same(out, x)
    for out, y in zip(second, ys, strict=True):
        same(out, np.broadcast_to(y, (3, *y.shape)))
    for i in range(3):
        for want in [*(x[i] for x in xs), *ys]:
            same(next(seen), want)


@dtypes
@pytest.mark.parametrize("method", ["expand_dims", "parallel"])
def test_as_a_whole_batch_and_in_parallel(dtype, method):
    x = values(dtype, (3, 5))
    echo = Echo()
    batched = jax.vmap(lambda x: hc.call(echo, spec(x), x, vmap_method=method))
    same(jax.jit(batched)(x), x)
    assert len(echo.seen) == (1 if method == "expand_dims" else 3)


@dtypes
@pytest.mark.parametrize("shape", [(), (7,)], ids=str)
def test_masked(dtype, shape):
    x = values(dtype, (4, *shape))
    mask = np.array([True, False, False, True])

    def row(fill, method):
        def call(x, wanted):
            return hc.call(
                Echo(), spec(x), x, where=wanted, fill=fill, vmap_method=method
            )

        return jax.jit(jax.vmap(call))(x, mask)

    ones = np.ones(shape, x.dtype)
    keep = mask.reshape(4, *(1,) * len(shape))
    zeros = np.zeros(shape, np.uint8 if x.dtype.itemsize == 1 else x.dtype)
    # Each two of method, fill and shape.
    one, none = ("sequential", "expand_dims")[:: -1 if shape else 1]
    same(row(1, one), np.where(keep, x, ones))
    same(row(None, none), np.where(keep, x, zeros.view(x.dtype)))
    one = jax.jit(lambda x: hc.call(Echo(), spec(x), x, where=False, fill=1))
    same(one(x[0]), ones)


def test_several_small_dtypes_in_one_call():
    args = [values(d, (n,)) for d, n in zip(SMALL, (3, 5, 1, 7, 9), strict=True)]
    args.insert(2, values("float32", (2,)))
    seen = []

    def host(*args):
        seen.extend(args)
        return args[::-1]

    program = jax.jit(lambda *args: hc.call(host, tuple(map(spec, args[::-1])), *args))
    for out, arg in zip(program(*args), args[::-1], strict=True):
        same(out, arg)
    for got, arg in zip(seen, args, strict=True):
        same(got, arg)


@dtypes
def test_between_other_operations(dtype):
    """Around the call, the compiler slices and transposes what it has packed."""
    x = values(dtype, (5, 3))

    def program(x):
        column = x[::2, 1]
        return hc.call(Echo(), spec(column), column)[::-1]

    same(jax.jit(program)(x), x[::2, 1][::-1])


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="jax makes no float6 arrays before 0.12"
)
@pytest.mark.parametrize("dtype", ["float6_e2m3fn", "float6_e3m2fn"])
def test_float6(dtype):
    x = np.arange(64, dtype=np.uint8)[:63].view(np.dtype(getattr(jnp, dtype)))
    echo = Echo()
    same(jax.jit(lambda x: hc.call(echo, spec(x), x))(x), x)
    same(echo.seen[0], x)


@pytest.mark.parametrize("dtype", ["float32", "int4"])
@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_many_dimensions(dtype, mode):
    x = values(dtype, (1,) * 29 + (2, 3, 5))
    assert x.ndim == 32
    echo = Echo()
    same(mode(lambda x: hc.call(echo, spec(x), x))(jnp.asarray(x)), x)
    same(echo.seen[0], x)


@pytest.mark.parametrize("dtype", ["float32", "uint4"])
def test_many_batch_axes(dtype):
    x = values(dtype, (2, 3, 1, 2, 3, 5))
    echo = Echo()
    batched = lambda x: hc.call(echo, spec(x), x)
    for _ in range(5):
        batched = jax.vmap(batched)
    same(jax.jit(batched)(x), x)
    for got, want in zip(echo.seen, x.reshape(-1, 5), strict=True):
        same(got, want)


# --- Typed PRNG keys ---------------------------------------------------------------

KINDS = ["threefry2x32", "rbg", "unsafe_rbg"]


def split(key):
    assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return jax.random.split(key, 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_keys(kind, mode):
    key = jax.random.key(7, impl=kind)
    result = jax.ShapeDtypeStruct((3,), key.dtype)
    out = mode(lambda key: hc.call(split, result, key))(key)
    assert out.dtype == key.dtype
    assert (out == split(key)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["sequential", "parallel", "expand_dims"])
def test_batches_of_keys(kind, method):
    keys = jax.random.split(jax.random.key(7, impl=kind), 4)

    def host(keys, x):
        return {"keys": keys, "shifted": x + 1}

    def row(key, x):
        result = {"keys": jax.ShapeDtypeStruct((), key.dtype), "shifted": spec(x)}
        return hc.call(host, result, key, x, vmap_method=method)

    out = jax.jit(jax.vmap(row))(keys, jnp.arange(4))
    assert (out["keys"] == keys).all()
    np.testing.assert_array_equal(out["shifted"], np.arange(4) + 1)


def test_arrays_of_keys_as_one_argument():
    keys = jax.random.split(jax.random.key(1), (2, 3))

    def host(keys):
        assert keys.shape == (2, 3)
        return keys[::-1, 0], jax.random.uniform(keys[0, 0])

    result = (jax.ShapeDtypeStruct((2,), keys.dtype), spec(jnp.float32(0)))
    column, number = jax.jit(lambda keys: hc.call(host, result, keys))(keys)
    assert (column == keys[::-1, 0]).all()
    assert number == jax.random.uniform(keys[0, 0])


def test_raw_key_data_may_be_returned_for_a_key():
    key = jax.random.key(3)
    raw = np.asarray(jax.random.key_data(key))
    assert jax.jit(lambda: hc.call(lambda: raw, spec(key)))() == key


# --- 64-bit arrays that outlive the mode in which they were made ----------------------

with jax.enable_x64(True):
    OUTLIVING = {
        "float64": jnp.array([1 / 3, 2.5]),
        "int64": jnp.array([2**40 + 5, -7]),
        "uint64": jnp.array([2**63, 7], "uint64"),
        "complex128": jnp.array([1 / 3 + 2j, 1j]),
    }

LOOKS = {
    "call": lambda see, x: hc.call(see, None, x, order="ordered", arrays="jax"),
    "lent": lambda see, x: hc.call(
        see, None, x, order="ordered", arrays="jax", lend=True
    ),
    "tap": lambda see, x: hc.tap(see, x, arrays="jax"),
    "batch": lambda see, x: hc.tap(lambda xs: see(xs[0]), x, arrays="jax", batch=2),
    "debug": lambda see, x: hc.debug.callback(see, x),
    "io": lambda see, x: hc.io_callback(see, None, x),
    "vmap": lambda see, x: jax.vmap(
        lambda x: hc.call(see, None, x, order="unordered", arrays="jax"),
    )(x[None]),
}


@pytest.mark.parametrize("dtype", OUTLIVING)
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_an_array_that_outlives_64_bit_mode_is_seen_whole(mode, look, dtype):
    """Its dtype, its memory and its values agree, and JAX computes with it."""
    x = OUTLIVING[dtype]
    seen, wanted = [], np.asarray(x).tolist()

    def see(v):
        assert isinstance(v, jax.Array)
        more = v + 1  # in 32 bits
        seen.append((v.dtype.name, np.asarray(v).dtype.name, v.tolist(), more.shape))

    with hc.reraise():
        mode(lambda x: look(see, x))(x)
        hc.barrier()
    assert seen == [(dtype, dtype, wanted, x.shape)]


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_arrays_made_while_64_bits_are_allowed(mode):
    """`jax_explicit_x64_dtypes="allow"`: asked-for dtypes are there in 32-bit mode."""
    if not hasattr(jax.config, "jax_explicit_x64_dtypes"):
        pytest.skip("this JAX has no such mode")
    before = jax.config.jax_explicit_x64_dtypes
    jax.config.update("jax_explicit_x64_dtypes", "allow")
    try:
        seen = []

        def program(x):
            y = jnp.full(2, 7, np.float64)
            see = lambda *vs: seen.extend((v.dtype.name, v.tolist()) for v in vs)
            hc.call(see, None, x, y, order="ordered", arrays="jax")
            hc.debug.callback(see, x, y)

        x = jnp.full(1, 1 / 3, np.float64)
        with hc.reraise():
            mode(program)(x)
            jax.effects_barrier()
        assert seen == [("float64", x.tolist()), ("float64", [7, 7])] * 2
    finally:
        jax.config.update("jax_explicit_x64_dtypes", before)
