"""Calls with wrong arguments: refused when traced, with a text that says what to do."""

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import policies
import pytest

import hostcall as hc

F32 = jax.ShapeDtypeStruct((), jnp.float32)
MODES = {"eager": lambda f: f, "jit": jax.jit}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def host(x):
    raise AssertionError("a call that is written wrong must not run")


# --- The function ------------------------------------------------------------------


def generator(x):
    yield x


async def async_generator(x):
    yield x


class Callable:
    def method(self, x):
        yield x


@pytest.mark.parametrize(
    ("fn", "say"),
    [
        (generator, "next value: lambda: next(generator)"),
        (async_generator, "next(generator)"),
        (functools.partial(generator), "next(generator)"),
        (Callable().method, "next(generator)"),
        (3, "should be a function, got 3"),
        (F32, "Write hc.call(fn, result, *args)"),
    ],
)
@modes
def test_functions_that_could_not_work_are_refused(fn, say, mode):
    with pytest.raises(hc.errors.SpecError) as caught:
        mode(lambda x: hc.call(fn, F32, x))(1.0)
    assert say in str(caught.value)


# --- result= -----------------------------------------------------------------------


def shaped(shape, dtype="float32"):
    return type("Spec", (), {"shape": shape, "dtype": dtype})


RESULTS = {
    "text": ("3.0", "result= of `host` is '3.0'. A text is 'infer', or a signature"),
    "type": (float, "which has no shape and dtype. Write jax.ShapeDtypeStruct"),
    "like": (
        [hc.results.like(0)],
        "result[0] of `host` is like(0), which has no shape and dtype. It is"
        " only for the whole result. In a tree give the argument itself",
    ),
    "in a tree": ({"a": [F32, "x"]}, "result['a'][1] of `host` is 'x'"),
    "int64": (
        jax.ShapeDtypeStruct((), np.int64),
        "result of `host` is int64, but JAX is in 32-bit mode. Declare int32",
    ),
    "float64": ([np.zeros(3)], "result[0] of `host` is float64"),
    "complex128": (np.zeros(2, np.complex128), "Declare complex64, or enable"),
    "objects": ([np.zeros(3, object)], "result[0] of `host` is object, which JAX"),
    "fields": (
        jax.ShapeDtypeStruct((3,), np.dtype([("a", "f4")])),
        "is [('a', '<f4')], which JAX arrays can't have. Declare a numeric dtype",
    ),
    "dates": (np.zeros(3, "M8[s]"), "is datetime64[s], which JAX arrays can't have"),
    "long double": (np.zeros(3, np.longdouble), "which JAX arrays can't have"),
    "unknown size": (
        type("Spec", (), {"shape": (None, 2), "dtype": np.float32}),
        "has the shape (None, 2). Sizes must be integers",
    ),
    "negative size": (
        shaped((2, -1)),
        "has the shape (2, -1). Sizes must be integers of",
    ),
    "no shape": (shaped(None), "has the shape None. Sizes must be integers"),
    "no dtype": (
        shaped((), "nonsense"),
        "has the dtype 'nonsense', which NumPy does not",
    ),
}


@modes
@pytest.mark.parametrize(("result", "say"), RESULTS.values(), ids=RESULTS)
def test_result_that_means_nothing(mode, result, say):
    with pytest.raises(hc.errors.SpecError) as caught:
        mode(lambda x: hc.call(host, result, x))(1.0)
    assert say in str(caught.value)


@modes
def test_big_endian_arrays_are_converted(mode):
    """As FITS files and network formats have them. JAX itself refuses them."""
    x = np.array([1, 2, 3], ">f4")
    out = mode(lambda: hc.call(lambda y: y + y[0], x, x))()
    assert out.dtype == np.float32
    assert out.tolist() == [2, 3, 4]


@pytest.mark.parametrize("number", [True, 3, 2.5, 1j, np.float32(2)], ids=repr)
@pytest.mark.parametrize("wide", [False, True], ids=["32 bits", "64 bits"])
def test_a_python_number_is_a_scalar_of_the_dtype_it_has_under_jit(number, wide):
    def program(x):
        return hc.call(lambda y: y, {"x": x}, {"x": x})["x"]

    with jax.enable_x64(wide):
        want = jax.jit(lambda x: x)(number)
        eager, jitted = program(number), jax.jit(program)(number)
        written = jax.jit(lambda: program(number))()
    for got in (eager, jitted, written):
        assert (got.dtype, got.shape) == (want.dtype, ())
        assert got == want


def test_wide_results_in_64_bit_mode(x64):
    result = jax.ShapeDtypeStruct((), np.int64)
    assert hc.call(lambda: 2**40, result) == 2**40
    assert jax.jit(lambda: hc.call(lambda: -(2**40), result))() == -(2**40)


# --- Arguments ---------------------------------------------------------------------

TOO_WIDE = {
    "int": (2**40, str(2**40)),
    "negative": (-(2**31) - 1, str(-(2**31) - 1)),
    "huge": (2**100, str(2**100)),
    "array": (np.array([1, 2**40]), str(2**40)),
    "low": (np.array([-(2**40), 1]), str(-(2**40))),
    "high": (np.array([-(2**31), 2**31]), str(2**31)),
    "scalar": (np.int64(2**33), str(2**33)),
    "unsigned": (np.uint64(2**33), str(2**33)),
    "in a tree": ({"n": [2**40]}, str(2**40)),
}


MASKED = np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0])


@modes
def test_masked_arguments_are_refused(mode):
    with pytest.raises(hc.errors.SpecError) as caught:
        mode(lambda: hc.call(host, F32, [MASKED]))()
    assert "a masked array with 1 of 3 elements masked" in str(caught.value)
    assert "Pass np.ma.filled(x, number)" in str(caught.value)
    whole = np.ma.array([1.0, 2.0, 3.0], mask=False)
    assert mode(lambda: hc.call(np.sum, F32, whole))() == 6


@modes
@pytest.mark.parametrize(("value", "say"), TOO_WIDE.values(), ids=TOO_WIDE)
def test_integers_too_wide_for_jax_are_refused(mode, value, say):
    with pytest.raises(hc.errors.SpecError) as caught:
        mode(lambda: hc.call(host, F32, value))()
    assert f"an argument holds {say} (" in str(caught.value)
    assert "jax_enable_x64" in str(caught.value)


@modes
@pytest.mark.parametrize(
    "value", [2**31 - 1, -(2**31), np.array([2**31 - 1, -(2**31)])]
)
def test_wide_integers_that_fit_are_taken(mode, value):
    seen = mode(
        lambda: hc.call(
            lambda x: x, jax.ShapeDtypeStruct(np.shape(value), np.int32), value
        )
    )()
    np.testing.assert_array_equal(seen, value)


def test_wide_arguments_in_64_bit_mode(x64):
    result = jax.ShapeDtypeStruct((), np.int64)
    assert jax.jit(lambda: hc.call(lambda x: x, result, 2**40))() == 2**40


# --- Options -----------------------------------------------------------------------

OPTIONS = {
    "order": (
        {"order": "sometimes"},
        "order= of `host` should be one of 'pure', 'unordered', 'ordered',"
        " got 'sometimes'",
    ),
    "order of another kind": ({"order": ["pure"]}, "got ['pure']"),
    "vmap_method": (
        {"vmap_method": "rows"},
        "vmap_method= of `host` should be one of 'sequential', 'parallel',"
        " 'expand_dims', 'broadcast_all', 'legacy_vectorized', None, got 'rows'",
    ),
    "vmap_method of the drop-ins": (
        {"vmap_method": "sequential_unrolled"},
        "got 'sequential_unrolled'. 'sequential' does the same",
    ),
    "arrays": ({"arrays": "torch"}, "should be one of 'numpy', 'jax', 'dlpack'"),
    "lend": ({"lend": "in"}, "should be one of False, True, 'out', got 'in'"),
    "zero timeout": ({"timeout": 0}, "should be a number of seconds above 0, got 0"),
    "negative timeout": ({"timeout": -1.5}, "above 0, got -1.5"),
    "timeout nan": ({"timeout": float("nan")}, "above 0, got nan"),
    "timeout text": ({"timeout": "3"}, "above 0, got '3'"),
    "no executor": (
        {"executor": "pool", "vmap_method": "parallel"},
        "a Dask client or a pool such as multiprocessing.Pool, got 'pool'",
    ),
    "lend and timeout": ({"lend": True, "timeout": 1}, "has lend=True and timeout=."),
    "lend and parallel": (
        {"lend": "out", "vmap_method": "parallel"},
        "has lend='out' and vmap_method='parallel'. A function on another",
    ),
    "where of numbers": ({"where": 3}, "where= of `host` should be one bool, got int"),
    "where of rows": (
        {"where": np.array([True, False])},
        "should be one bool, got bool[2]. For one bool per row, vmap the function",
    ),
    "fill of another shape": (
        {"where": True, "fill": np.zeros(3)},
        "for result, which can't be converted to float32[]",
    ),
    "fill of text": ({"where": True, "fill": "x"}, "fill= of `host` is 'x' for result"),
    "on": ({"on": "gpu"}, "should be 'once' or a device"),
}


@modes
@pytest.mark.parametrize(("options", "say"), OPTIONS.values(), ids=OPTIONS)
def test_options_that_mean_nothing(mode, options, say):
    with pytest.raises(hc.errors.SpecError) as caught:
        mode(lambda x: policies.call(host, F32, x, **options))(1.0)
    assert say in str(caught.value)


def test_executor_without_parallel_rows():
    with ThreadPoolExecutor(1) as pool, pytest.raises(hc.errors.SpecError) as caught:
        hc.call(hc.host(host, executor=pool), F32, 1.0)
    assert 'Rows go to an executor with vmap_method="parallel"' in str(caught.value)


def test_fill_is_not_traced():
    with pytest.raises(
        hc.errors.SpecError, match="choose with jnp.where after the call"
    ):
        jax.jit(lambda x: hc.call(host, F32, x, where=True, fill=x))(1.0)


def test_errors_are_what_their_kind_says():
    assert issubclass(hc.errors.SpecError, hc.errors.HostcallError)
    assert issubclass(hc.errors.SpecError, ValueError)
    for kind in (
        hc.errors.EscapeError,
        hc.errors.UnwrittenError,
        hc.errors.DeadlockError,
    ):
        assert issubclass(kind, hc.errors.HostcallError)
        assert issubclass(kind, RuntimeError)
    assert issubclass(hc.errors.CallTimeoutError, TimeoutError)
