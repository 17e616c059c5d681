"""hc.derivatives.finite_difference: derivatives of functions without rules."""

import pickle

import jax
import numpy as np
import pytest

import hostcall as hc

X = np.array([0.3, -1.2, 2.0])
TOLERANCE = 1e-9


def polynomial(p, n):
    a, b = p["a"], p["b"]
    return (a**3 * b, np.sin(a).sum() * b.sum() * n)


def exact(p, n):
    return (p["a"] ** 3 * p["b"], jax.numpy.sin(p["a"]).sum() * p["b"].sum() * n)


def test_jacobians_of_trees(x64):
    f = hc.host(polynomial, result="infer")
    assert hc.derivatives.finite_difference(f) is f
    p = {"a": X, "b": X[::-1].copy()}
    for derive in (jax.jacfwd, jax.jacrev):
        got = jax.jit(derive(lambda p: f(p, 2)))(p)
        want = jax.jacrev(lambda p: exact(p, 2))(p)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(
                a, b, rtol=TOLERANCE, atol=10 * TOLERANCE
            ),
            got,
            want,
        )
    error = f.difference_error(p, 2)
    jax.tree.map(
        lambda e, a, b: np.testing.assert_array_less(np.abs(a - b), e + 1e-14),
        error,
        jax.tree.map(np.asarray, got),
        jax.tree.map(np.asarray, want),
    )
    assert max(e.max() for e in jax.tree.leaves(error)) < 100 * TOLERANCE


def test_elementwise(x64):
    calls = []

    def fn(x, y):
        calls.append(np.shape(x))
        return np.sin(x) * y**2

    f = hc.derivatives.finite_difference(hc.host(fn, result=hc.results.elementwise))
    y = np.float64(1.5)  # broadcast
    got = jax.jit(jax.grad(lambda x, y: f(x, y).sum(), (0, 1)))(X, y)
    want = np.cos(X) * y**2, (2 * y * np.sin(X)).sum()
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=10 * TOLERANCE)
    assert len(calls) <= 5  # one value for two arguments
    dot = jax.jit(jax.vmap(lambda x: jax.jvp(f, (x, y), (x, y))[1]))(X)
    np.testing.assert_allclose(dot, want[0] * X + 2 * y**2 * np.sin(X), rtol=1e-5)
    e_x, e_y = f.difference_error(X, y)
    assert e_x.shape == e_y.shape == (3,)
    assert max(e_x.max(), e_y.max()) < 100 * TOLERANCE


# --- How accurate they are -----------------------------------------------------------

random = np.random.default_rng(7)
SMOOTH = random.uniform(0.1, 3, 400) * random.choice([1, 1, 100], 400)
NEAR_1 = 1 + random.choice([0, 1e-7, 1e-6, 1e-5, 1e-3], 400) * random.uniform(
    -2, 2, 400
)
NEAR_0 = 10 ** random.uniform(-6, 0, 400)


def inside(dtype, fn):
    """Makes a function as inaccurate as if it computed in another precision."""
    return lambda x: fn(np.asarray(x, dtype)).astype(np.float64)


def noisy(size, draw):
    return lambda x: np.sin(x) + size * draw(np.shape(x))


def even(shape):
    return random.uniform(-1, 1, shape)


def sine_of(w):
    return lambda x: np.sin(w * x), lambda x: w * np.cos(w * x), SMOOTH


# Function, derivative, points, and the most that the estimate may be at the median
# (with the default step).
TRIED = {
    "smooth": (np.sin, np.cos, SMOOTH, 1e-9),
    "large": (lambda x: 1e6 * np.sin(x), lambda x: 1e6 * np.cos(x), SMOOTH, 1e-3),
    "on a large value": (lambda x: 1e6 + np.sin(x), np.cos, SMOOTH, 1e-3),
    "growing": (np.exp, np.exp, SMOOTH[SMOOTH < 3], 1e-8),
    "root": (lambda x: abs(x) ** 0.5, lambda x: 0.5 / x**0.5, NEAR_0 + 1e-4, 1e-2),
    "float32 inside": (inside(np.float32, np.sin), np.cos, SMOOTH, 0.2),
    "float32 inside, growing": (
        inside(np.float32, np.exp),
        np.exp,
        SMOOTH[SMOOTH < 3],
        2,
    ),
    "float32 results": (lambda x: np.sin(x).astype("f4"), np.cos, SMOOTH, 0.1),
    "float16 results": (lambda x: np.sin(x).astype("f2"), np.cos, SMOOTH, 50),
    "float16 inside": (lambda x: np.sin(x).astype("f2") * 1.0, np.cos, SMOOTH, 50),
    "a small slope in float32": (
        inside(np.float32, lambda x: np.float32(1e4) + np.float32(1e-3) * x),
        lambda x: 1e-3 + 0 * x,
        SMOOTH,
        1,
    ),
    "five decimals": (lambda x: np.round(np.sin(x), 5), np.cos, SMOOTH, 20),
    "noise of 1e-12": (noisy(1e-12, even), np.cos, SMOOTH, 1e-5),
    "noise of 1e-9": (noisy(1e-9, even), np.cos, SMOOTH, 1e-2),
    "noise of 1e-6": (noisy(1e-6, even), np.cos, SMOOTH, 10),
    "normal noise": (noisy(1e-6, random.standard_normal), np.cos, SMOOTH, 10),
    "a fine wave": (lambda x: np.sin(x) + 1e-7 * np.sin(1e10 * x), np.cos, SMOOTH, 1),
    "faster, 1e2": (*sine_of(1e2), 1e-2),
    "faster, 1e4": (*sine_of(1e4), 1e4),
    "a kink": (lambda x: abs(x - 1), lambda x: np.where(x < 1, -1, 1), NEAR_1, 3),
    "flat, and a kink": (
        lambda x: np.maximum(x - 1, 0),
        lambda x: np.where(x < 1, 0, 1),
        NEAR_1,
        3,
    ),
    "a jump": (lambda x: np.where(x < 1, 0.0, 1.0), lambda x: 0 * x, NEAR_1, np.inf),
    "steep": (
        lambda x: np.tanh(1e4 * (x - 1)),
        lambda x: 1e4 / np.cosh(1e4 * (x - 1)) ** 2,
        NEAR_1,
        1e3,
    ),
    "constant": (lambda x: 3.0 + 0 * x, lambda x: 0 * x, SMOOTH, 1e-3),
}


@pytest.mark.parametrize(("fn", "slope", "x", "most"), TRIED.values(), ids=TRIED)
def test_the_error_is_at_most_twice_the_estimate(fn, slope, x, most):
    for step in (None, 1e-3, 0.1):
        f = hc.host(fn, result=hc.results.elementwise)
        hc.derivatives.finite_difference(f, step=step)
        got = f.differences(x)
        told = f.difference_error(x)
        wrong = abs(got - slope(x))
        # If a function changes faster than the step, differences fail, and a warning
        # says so.
        nothing_known = (told >= abs(got)) & (got != 0)
        np.testing.assert_array_less(wrong, 2 * told + 1e-300 + 1e300 * nothing_known)
        if step is None:
            assert np.median(told) <= most


@pytest.mark.parametrize("w", [1e6, 1e7, 1e8])
def test_of_a_wave_much_finer_than_the_step_nothing_is_known(w):
    fn, slope, x = sine_of(w)
    for step in (None, 1e-3, 0.1):
        f = hc.host(fn, result=hc.results.elementwise)
        hc.derivatives.finite_difference(f, step=step)
        got = f.differences(x)
        told = f.difference_error(x)
        # It goes unnoticed if all the points happen to fit a slower wave.
        known = (told < abs(got)) & (2 * told < abs(got - slope(x)))
        assert known.mean() < 0.01


def test_the_error_of_a_jacobian_in_float32():
    """Noise that the dtype does not show: the estimate of the error used to be 40 times
    too small.
    """
    fn = inside(np.float32, lambda x: np.array([x[0] * x[1], np.sin(x).sum(), x[2]]))
    f = hc.derivatives.finite_difference(hc.host(fn, result=hc.results.like(0)))
    for x in random.uniform(0.1, 3, (40, 3)):
        c, z = np.cos(x), 0.0
        want = [[x[1], x[0], z], c, [z, z, 1.0]]
        wrong = abs(f.differences(x) - want)
        told = f.difference_error(x)
        assert (wrong <= 2 * told).all()
        assert told.max() < 2
        assert (told[2, :2] < 1e-3).all()  # entries that are constant


def test_where_the_function_is_no_number_nothing_is_known(x64):
    f = hc.derivatives.finite_difference(
        hc.host(np.log, result=hc.results.elementwise), step=0.1
    )
    with np.errstate(all="ignore"):
        assert f.difference_error(np.float64([0.05, 5.0])).tolist()[0] == np.inf


@pytest.mark.parametrize(
    "result", [hc.results.elementwise, hc.results.like(0)], ids=["each", "whole"]
)
def test_half_precision_moves_too(result):
    f = hc.derivatives.finite_difference(hc.host(lambda x: x * x, result=result))
    x = jax.numpy.array([0.5, 1.5], jax.numpy.bfloat16)
    assert jax.vjp(f, x)[1](jax.numpy.ones_like(x))[0].tolist() == [1, 3]
    assert f.difference_error(x).max() < 1e-8


def test_float32_programs_get_differences_in_float64():
    f = hc.derivatives.finite_difference(
        hc.host(lambda x: np.sin(x), result=hc.results.like(0))
    )
    x = X.astype(np.float32)
    got = jax.jit(jax.jacrev(f))(x)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, np.diag(np.cos(x)), rtol=1e-6, atol=1e-7)


def test_integers_and_nondiff_do_not_move():
    f = hc.host(lambda n, x, w: x * n * w, result=hc.results.like(1), nondiff=2)
    hc.derivatives.finite_difference(f, step=1e-3)
    x = np.float32(2)
    assert np.isclose(jax.grad(lambda x: f(3, x, 2.0))(x), 6)


def module_sine(x):
    return np.sin(x)


@pytest.mark.parametrize(
    "result", [hc.results.elementwise, hc.results.like(0)], ids=["each", "whole"]
)
def test_it_can_be_pickled(result):
    f = hc.derivatives.finite_difference(
        hc.host(module_sine, result=result, name="sine")
    )
    slope = lambda f: jax.grad(lambda x: f(x).sum())(X)
    want = slope(f)
    again = pickle.loads(pickle.dumps(f))
    assert again is not f
    np.testing.assert_array_equal(slope(again), want)
    assert again.difference_error(X).max() < 1e-8


def test_errors():
    f = hc.host(np.sin, result=hc.results.like(0), name="f")
    with pytest.raises(hc.errors.SpecError, match="what hc.host returns"):
        hc.derivatives.finite_difference(np.sin)
    with pytest.raises(hc.errors.SpecError, match="step= of `f`"):
        hc.derivatives.finite_difference(f, step=-1)
    hc.derivatives.finite_difference(f)
    before = f.difference_error(0.5)
    with pytest.raises(hc.errors.SpecError, match="defjacobian already"):
        hc.derivatives.finite_difference(f, step=1e-1)
    assert f.difference_error(0.5) == before  # the refused step changes nothing


def test_complex_results_of_a_function_with_a_jacobian():
    spec = jax.ShapeDtypeStruct((2,), np.complex64)
    f = hc.host(lambda x: x * (1 + 2j), result=spec)
    hc.derivatives.finite_difference(f)
    x = jax.numpy.array([1.0, 2.0])
    _, dots = jax.jvp(f, (x,), (jax.numpy.ones(2),))
    np.testing.assert_allclose(dots, [1 + 2j, 1 + 2j], rtol=1e-3)


def test_complex_arguments_are_refused_by_name():
    scaled = lambda x, z: x * z.real
    f = hc.derivatives.finite_difference(hc.host(scaled, result=hc.results.like(0)))
    z = np.complex64(1 + 2j)
    text = r"args\[1\] of `<lambda>` is complex.* give hc.host nondiff=1"
    with pytest.raises(hc.errors.DerivativeError, match=text), hc.reraise():
        jax.grad(f)(2.0, z)
    g = hc.host(scaled, result=hc.results.like(0), nondiff=1)
    slope = jax.grad(hc.derivatives.finite_difference(g))(2.0, z)
    np.testing.assert_allclose(slope, 1, rtol=1e-5)
