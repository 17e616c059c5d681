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


@pytest.mark.parametrize(
    "result", [hc.results.elementwise, hc.results.like(0)], ids=["each", "whole"]
)
def test_half_precision_moves_too(result):
    f = hc.derivatives.finite_difference(hc.host(lambda x: x * x, result=result))
    x = jax.numpy.array([0.5, 1.5], jax.numpy.bfloat16)
    assert jax.vjp(f, x)[1](jax.numpy.ones_like(x))[0].tolist() == [1, 3]


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


def test_errors():
    f = hc.host(np.sin, result=hc.results.like(0), name="f")
    with pytest.raises(hc.errors.SpecError, match="what hc.host returns"):
        hc.derivatives.finite_difference(np.sin)
    with pytest.raises(hc.errors.SpecError, match="step= of `f`"):
        hc.derivatives.finite_difference(f, step=-1)
    hc.derivatives.finite_difference(f)
    before = jax.grad(f)(0.5)
    with pytest.raises(hc.errors.SpecError, match="defjacobian already"):
        hc.derivatives.finite_difference(f, step=1e-1)
    assert jax.grad(f)(0.5) == before  # the refused step changes nothing


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
