"""hc.finite_difference: derivatives of functions that have no other."""

import pickle

import jax
import numpy as np
import pytest

import hostcall as hc

X = np.array([0.3, -1.2, 2.0])
TOLERANCE = {"central": 1e-9, "forward": 1e-6, "complex": 1e-14}
SCHEMES = pytest.mark.parametrize("scheme", TOLERANCE)


def polynomial(p, n):
    a, b = p["a"], p["b"]
    return (a**3 * b, np.sin(a).sum() * b.sum() * n)


def exact(p, n):
    return (p["a"] ** 3 * p["b"], jax.numpy.sin(p["a"]).sum() * p["b"].sum() * n)


@SCHEMES
def test_jacobians_of_trees(scheme, x64):
    f = hc.host(polynomial, result="infer")
    assert hc.finite_difference(f, scheme=scheme) is f
    p = {"a": X, "b": X[::-1].copy()}
    for derive in (jax.jacfwd, jax.jacrev):
        got = jax.jit(derive(lambda p: f(p, 2)))(p)
        want = jax.jacrev(lambda p: exact(p, 2))(p)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(
                a, b, rtol=TOLERANCE[scheme], atol=10 * TOLERANCE[scheme]
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
    assert max(e.max() for e in jax.tree.leaves(error)) < 100 * TOLERANCE[scheme]


@SCHEMES
def test_elementwise(scheme, x64):
    calls = []

    def fn(x, y):
        calls.append(np.shape(x))
        return np.sin(x) * y**2

    f = hc.finite_difference(hc.host(fn, result=hc.elementwise), scheme=scheme)
    y = np.float64(1.5)  # broadcast
    got = jax.jit(jax.grad(lambda x, y: f(x, y).sum(), (0, 1)))(X, y)
    want = np.cos(X) * y**2, (2 * y * np.sin(X)).sum()
    tolerance = TOLERANCE[scheme]
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=10 * tolerance)
    assert len(calls) <= 5  # one value, twice an argument
    dot = jax.jit(jax.vmap(lambda x: jax.jvp(f, (x, y), (x, y))[1]))(X)
    np.testing.assert_allclose(dot, want[0] * X + 2 * y**2 * np.sin(X), rtol=1e-5)
    e_x, e_y = f.difference_error(X, y)
    assert e_x.shape == e_y.shape == (3,)
    assert max(e_x.max(), e_y.max()) < 100 * tolerance


def test_float32_programs_get_differences_in_float64():
    f = hc.finite_difference(hc.host(lambda x: np.sin(x), result=hc.like(0)))
    x = X.astype(np.float32)
    got = jax.jit(jax.jacrev(f))(x)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, np.diag(np.cos(x)), rtol=1e-6, atol=1e-7)


def test_integers_and_nondiff_do_not_move():
    f = hc.host(lambda n, x, w: x * n * w, result=hc.like(1), nondiff=2)
    hc.finite_difference(f, step=1e-3)
    x = np.float32(2)
    assert np.isclose(jax.grad(lambda x: f(3, x, 2.0))(x), 6)


def module_sine(x):
    return np.sin(x)


@pytest.mark.parametrize("result", [hc.elementwise, hc.like(0)], ids=["each", "whole"])
def test_it_can_be_pickled(result):
    f = hc.finite_difference(hc.host(module_sine, result=result, name="sine"))
    slope = lambda f: jax.grad(lambda x: f(x).sum())(X)
    want = slope(f)
    again = pickle.loads(pickle.dumps(f))
    assert again is not f
    np.testing.assert_array_equal(slope(again), want)
    assert again.difference_error(X).max() < 1e-8


def test_errors():
    f = hc.host(np.sin, result=hc.like(0), name="f")
    with pytest.raises(hc.SpecError, match="what hc.host returns"):
        hc.finite_difference(np.sin)
    with pytest.raises(hc.SpecError, match="scheme= of `f`"):
        hc.finite_difference(f, scheme="backward")
    with pytest.raises(hc.SpecError, match="step= of `f`"):
        hc.finite_difference(f, step=-1)
    hc.finite_difference(f)
    with pytest.raises(hc.SpecError, match="defjacobian already"):
        hc.finite_difference(f)
