"""hc.host and hc.call of ufuncs, which say themselves what they return.

The oracle is NumPy: the same ufunc, called with the same arrays. Results have the dtype
that NumPy gives them at the precision that JAX promotes the arguments to.
"""

import inspect
import pickle
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import hostcall as hc

pytestmark = [
    # Some functions have no value for some of the numbers, and some of SciPy's want
    # integers.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def ufuncs_of(module):
    return {
        f"{module.__name__}.{name}": ufunc
        for name, ufunc in sorted(vars(module).items())
        if isinstance(ufunc, np.ufunc)
    }


ALL = ufuncs_of(np) | ufuncs_of(scipy.special)
# Some are there under two names.
ELEMENTWISE = {k: v for k, v in ALL.items() if v.signature is None}


def arguments_of(ufunc, dtype, seed=0):
    """Arrays that broadcast, with numbers between 0 and 2."""
    rng = np.random.default_rng(seed)
    shapes = [(4,), (3, 1), (), (3, 4), (4,), (1,), (3, 1), (4,), ()][: ufunc.nin]
    return [rng.uniform(0.1, 2, shape).astype(dtype) for shape in shapes]


def takes(ufunc, *dtypes):
    try:
        loop = ufunc.resolve_dtypes((*map(np.dtype, dtypes), *(None,) * ufunc.nout))
    except TypeError:
        return False
    return all(dtype.kind in "biufc" for dtype in loop)


def floats(ufunc):
    return takes(ufunc, *[np.float32] * ufunc.nin)


def wanted(ufunc, arrays, precision=np.float32):
    """What NumPy computes, at JAX's precision and with JAX's integers."""
    as_jax = {
        "f": precision,
        "c": np.result_type(precision, np.complex64),
        np.dtype(np.int64): np.int32,
        np.dtype(np.uint64): np.uint32,
    }
    with np.errstate(all="ignore"):
        results = jax.tree.leaves(ufunc(*arrays))
    rounded = []
    for result in map(np.asarray, results):
        dtype = result.dtype
        rounded.append(result.astype(as_jax.get(dtype.kind, as_jax.get(dtype, dtype))))
    return rounded


def same(got, want):
    got = jax.tree.leaves(got)
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(np.asarray(x), y)


# --- All ufuncs of NumPy and SciPy ------------------------------------------------------

FLOATS = {k: v for k, v in ELEMENTWISE.items() if floats(v)}
# `hc.monitor` names both of a pair, and JAX's default device computes in float32.
assert len(FLOATS) > 250


def as_it_is(function, ufunc):
    return function


def over_rows(function, ufunc):
    """`vmap` over the first argument alone: numbers beside arrays with more axes."""
    return jax.vmap(function, (0, *(None,) * (ufunc.nin - 1)))


def row_by_row(ufunc, first, *rest):
    rows = [wanted(ufunc, [number, *rest]) for number in first]
    return [np.stack(column) for column in zip(*rows, strict=True)]


def at_once(ufunc, *arrays):
    return wanted(ufunc, arrays)


@pytest.mark.parametrize(
    ("transform", "oracle"), [(as_it_is, at_once), (over_rows, row_by_row)]
)
def test_all_ufuncs_of_floats_in_one_program(transform, oracle):
    functions = {k: transform(hc.host(ufunc), ufunc) for k, ufunc in FLOATS.items()}
    arrays = {k: arguments_of(ufunc, np.float32) for k, ufunc in FLOATS.items()}
    got = jax.jit(lambda arrays: {k: f(*arrays[k]) for k, f in functions.items()})(
        arrays
    )
    for name, ufunc in FLOATS.items():
        same(got[name], oracle(ufunc, *arrays[name]))


@pytest.mark.parametrize(
    "name", [k for k, v in ELEMENTWISE.items() if takes(v, *[np.int32] * v.nin)]
)
def test_a_ufunc_of_integers_has_jaxs_precision(name):
    ufunc = ELEMENTWISE[name]
    arrays = [np.rint(x).astype(np.int32) for x in arguments_of(ufunc, np.float64)]
    got = hc.host(ufunc)
    with np.errstate(all="ignore"):
        double = ufunc(*arrays)
    largest = max(np.nanmax(np.abs(x), initial=0) for x in jax.tree.leaves(double))
    if not largest < 3e38:
        return  # a double that float32 has no number for is told of
    same(got(*arrays), wanted(ufunc, arrays))


@pytest.mark.parametrize(
    "name",
    [
        "numpy.sin",
        "numpy.abs",
        "numpy.multiply",
        "scipy.special.jv",
        "scipy.special.wofz",
    ],
)
def test_a_ufunc_of_complex_numbers(name):
    ufunc = ELEMENTWISE[name]
    arrays = [
        x.astype(np.complex64) * (1 + 1j) for x in arguments_of(ufunc, np.float32)
    ]
    if not takes(ufunc, *[np.complex64] * ufunc.nin):
        arrays[0] = arrays[0].real.copy()  # the order of a Bessel function
    same(jax.jit(hc.host(ufunc))(*arrays), wanted(ufunc, arrays))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, jnp.bfloat16])
def test_the_precision_is_that_of_the_arguments(dtype):
    with jax.enable_x64(True):
        x = jnp.linspace(0.1, 1, 5).astype(dtype)
        for ufunc in (np.sin, scipy.special.j0, scipy.special.jv):
            got = hc.host(ufunc)(*[x] * ufunc.nin)
            assert got.dtype == dtype
            want = ufunc(*[np.asarray(x)] * ufunc.nin).astype(dtype)
            np.testing.assert_array_equal(np.asarray(got), want)


def test_pythons_numbers_are_weakly_typed():
    with jax.enable_x64(True):
        x = jnp.ones(3, jnp.float32)
        assert hc.host(np.hypot)(x, 2.0).dtype == np.float32
        assert hc.host(scipy.special.jv)(0, x).dtype == np.float32
        assert hc.host(np.hypot)(x, np.float64(2)).dtype == np.float64


def test_float64_computes_in_float64():
    f = hc.host(scipy.special.erfinv, float64=True)
    x = np.float32([0.1, 0.9999])
    want = scipy.special.erfinv(x.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(jax.jit(f)(x)), want)


# --- Other faces ------------------------------------------------------------------------


def test_several_results_are_a_tuple():
    mantissa, exponent = jax.jit(hc.host(np.frexp))(np.float32([0.3, 10]))
    assert exponent.dtype == np.int32
    np.testing.assert_array_equal(np.ldexp(mantissa, exponent), np.float32([0.3, 10]))
    assert len(hc.host(scipy.special.airy)(1.0)) == 4


def test_hc_call_of_a_ufunc():
    x = jnp.linspace(0.1, 2, 4)

    @jax.jit
    def program(orders):
        return jax.vmap(lambda n: hc.call(scipy.special.jv, ..., n, x))(orders)

    want = [
        scipy.special.jv(np.int32(n), np.asarray(x)).astype(np.float32)
        for n in range(3)
    ]
    np.testing.assert_array_equal(np.asarray(program(jnp.arange(3))), want)
    hosted = hc.host(scipy.special.jv, tag="bessel")
    np.testing.assert_array_equal(np.asarray(hc.call(hosted, ..., 1, x)), want[1])


def test_rows_of_a_ufunc_on_an_executor():
    with ThreadPoolExecutor(1) as pool:
        f = hc.host(np.negative, executor=pool)
        x = jnp.arange(3.0)
        np.testing.assert_array_equal(jax.vmap(f)(x), -x)
        rows = jax.vmap(lambda x: hc.call(f, x, x, vmap_method="parallel"))
        np.testing.assert_array_equal(rows(x), -x)


def test_derivatives_of_a_ufunc_are_elementwise():
    f = hc.derivatives.finite_difference(hc.host(np.sin))
    x = np.linspace(0, 1, 5)
    with jax.enable_x64(True):
        got = jax.grad(lambda x: f(x).sum())(x)
    np.testing.assert_allclose(got, np.cos(x), rtol=1e-8)


def test_a_rule_for_a_ufunc():
    j0, j1 = hc.host(scipy.special.j0), hc.host(scipy.special.j1)
    j0.defjvps(lambda t, _, x: -j1(x) * t, where="jax")
    x = jnp.linspace(0.1, 2, 4)
    np.testing.assert_allclose(
        jax.vmap(jax.grad(j0))(x), -scipy.special.j1(x), rtol=1e-5
    )


@pytest.mark.parametrize("ufunc", [np.matmul, np.vecdot], ids=lambda u: u.__name__)
def test_a_generalized_ufunc(ufunc):
    rng = np.random.default_rng(0)
    a, b = (
        rng.normal(size=(2, 5, 3, 4)).astype(np.float32),
        rng.normal(size=(5, 4, 4)).astype(np.float32),
    )
    if ufunc is np.vecdot:
        b = b[:, :1]
    f = hc.host(ufunc)
    want = np.stack([ufunc(x, b) for x in a])
    np.testing.assert_array_equal(np.asarray(jax.jit(f)(a, b)), want)
    np.testing.assert_array_equal(np.asarray(jax.vmap(f, (0, None))(a, b)), want)
    got = jax.vmap(jax.vmap(f, (0, 0)), (0, None))(a, b)
    np.testing.assert_array_equal(np.asarray(got), want)
    np.testing.assert_array_equal(np.asarray(hc.call(ufunc, ..., a, b)), want)


@pytest.mark.parametrize(
    "shapes", [((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 4)), ((2, 3), (3, 4))]
)
def test_dimensions_that_may_be_missing(shapes):
    a, b = [np.ones(shape, np.float32) for shape in shapes]
    assert hc.host(np.matmul)(a, b).shape == np.matmul(a, b).shape
    rows = np.ones((5, *shapes[0]), np.float32)
    assert jax.vmap(hc.host(np.matmul), (0, None))(rows, b).shape == (
        5,
        *np.matmul(a, b).shape,
    )


def test_objects_of_frompyfunc_become_numbers():
    words = np.frompyfunc(lambda a, b: a + 2 * b, 2, 1)
    f = hc.host(words, dtype=np.float32)
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(np.asarray(jax.jit(f)(x, 1.0)), x + 2)
    assert jax.vmap(f, (0, None))(x, x).shape == (3, 3)


def test_a_ufunc_of_numba():
    numba = pytest.importorskip("numba")
    f = hc.host(numba.vectorize(lambda x, y: x + 2 * y))
    g = hc.host(numba.vectorize(["float64(float64)"])(lambda x: 2 * x))
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(np.asarray(jax.jit(f)(x, 1.0)), x + 2)
    np.testing.assert_array_equal(np.asarray(jax.jit(g)(x)), 2 * x)

    @numba.guvectorize(["void(float32[:], float32[:])"], "(n)->()")
    def total(x, out):
        out[0] = x.sum()

    np.testing.assert_array_equal(
        np.asarray(jax.vmap(hc.host(total))(np.ones((2, 3), np.float32))), [3, 3]
    )


def test_numbas_guvectorize_without_types_is_refused():
    numba = pytest.importorskip("numba")

    @numba.guvectorize("(n)->(n)")
    def double(x, out):
        out[:] = 2 * x

    with pytest.raises(hc.errors.SpecError, match="without types") as caught:
        hc.host(double)(np.ones(3, np.float32))
    assert "@guvectorize(['void(float32[:], float32[:])'], '(n)->(n)')" in str(
        caught.value
    )


def test_ufuncs_of_astropy():
    erfa = pytest.importorskip("erfa")
    theta, phi = jax.jit(hc.host(erfa.ufunc.c2s))(np.float32([[1, 0, 0], [0, 1, 0]]))
    np.testing.assert_allclose(theta, [0, np.pi / 2], rtol=1e-6)
    assert phi.shape == (2,)


def test_what_a_ufunc_shows_of_itself():
    f = hc.host(scipy.special.jv)
    assert str(inspect.signature(f)) == "(x1, x2, /)"
    assert repr(f) == "<hostcall.typing.HostFunction jv (ufunc)>"
    items = hc.host(np.vecdot)
    assert str(inspect.signature(items)) == "(x1: '(n)', x2: '(n)', /) -> '()'"
    assert "Bessel" in f.__doc__
    again = pickle.loads(pickle.dumps(f))
    assert again(0, 1.0) == f(0, 1.0)
