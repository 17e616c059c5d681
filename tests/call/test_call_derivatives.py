"""Calls in custom derivatives and remat, and the derivatives they refuse."""

import re

import jax
import numpy as np
import pytest
from counting import counted
from jax import lax

import hostcall as hc

ROW = np.arange(3, dtype=np.float32)
EAGER_AND_JIT = pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit], ids=["eager", "jit"]
)


def assert_same(got, want):
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(np.asarray(got), want)


def sine(x):
    return np.sin(x)


def cosine(x):
    return np.cos(x)


def custom_sine(kind, host_sine, host_cosine):
    """sin on the host, with its derivative on the host too."""

    def call(fn, x):
        return hc.call(fn, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    if kind == "jvp":
        f = jax.custom_jvp(lambda x: call(host_sine, x))
        f.defjvp(lambda x, t: (f(*x), call(host_cosine, *x) * t[0]))
        return f
    f = jax.custom_vjp(lambda x: call(host_sine, x))
    f.defvjp(
        lambda x: (call(host_sine, x), x), lambda x, ct: (call(host_cosine, x) * ct,)
    )
    return f


@EAGER_AND_JIT
@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_custom_derivatives_around_a_call(kind, wrap):
    host_sine, host_cosine = counted(sine), counted(cosine)
    f = custom_sine(kind, host_sine, host_cosine)
    assert_same(wrap(f)(ROW), np.sin(ROW))
    value, gradient = wrap(jax.value_and_grad(lambda x: f(x).sum()))(ROW)
    np.testing.assert_allclose(value, np.sin(ROW).sum(), rtol=1e-6)
    assert_same(gradient, np.cos(ROW))
    assert (len(host_sine.seen), len(host_cosine.seen)) == (2, 1)
    jacobian = wrap(jax.jacrev(f))(ROW)
    np.testing.assert_array_equal(jacobian, np.diag(np.cos(ROW)))
    if kind == "jvp":
        assert_same(
            wrap(jax.jvp)(f, (ROW,), (ROW,))[1]
            if wrap is not jax.jit
            else jax.jit(lambda x: jax.jvp(f, (x,), (x,))[1])(ROW),
            np.cos(ROW) * ROW,
        )


def test_what_a_rule_gets_for_a_numpy_array_is_an_array():
    """NUMPY_PRIMALS in tests/older_jax.py."""
    types = []

    def host(x):
        types.append(type(x))
        return np.cos(x)

    f = jax.custom_jvp(np.sin)
    f.defjvp(lambda x, t: (x[0], hc.call(host, x[0], x[0]) * t[0]))
    gradient = jax.grad(lambda x: f(x).sum())(ROW)
    assert_same(gradient, np.cos(ROW))
    assert types == [np.ndarray]


@EAGER_AND_JIT
def test_stop_gradient_keeps_the_derivative_out(wrap):
    f = wrap(jax.grad(lambda x: (hc.call(sine, ROW, lax.stop_gradient(x)) * x).sum()))
    assert_same(f(ROW), np.sin(ROW))


DERIVATIVES = {
    "jvp": (lambda f: jax.jvp(f, (ROW,), (ROW,)), "has no derivative"),
    "grad": (lambda f: jax.grad(lambda x: f(x).sum())(ROW), "has no derivative"),
    "jit of grad": (
        lambda f: jax.jit(jax.grad(lambda x: f(x).sum()))(ROW),
        "has no derivative",
    ),
    "linear_transpose": (
        lambda f: jax.linear_transpose(f, ROW)(ROW),
        "can't be transposed",
    ),
}


@pytest.mark.parametrize(
    ("derive", "what"), DERIVATIVES.values(), ids=DERIVATIVES.keys()
)
def test_a_derivative_is_refused_with_the_remedy(derive, what):
    def f(x):
        return hc.call(sine, ROW, x)

    line = f.__code__.co_firstlineno + 1
    remedy = "linear_call" if "transposed" in what else "stop_gradient"
    with pytest.raises(hc.errors.DerivativeError) as caught:
        derive(f)
    text = str(caught.value)
    assert text.startswith(
        f"hostcall: the call of `sine` {what} ({__file__}:{line} in "
    )
    assert re.search(rf"jax\.custom_vjp.*{remedy}|{remedy}.*jax\.custom_vjp", text)


REMEDIES = {
    "pure": (
        "Write f = hc.host(sine, result=...) with a rule: f.defvjp(fwd, bwd),"
        " f.defjvp(rule), or hc.derivatives.finite_difference(f) without one. Or put"
    ),
    "ordered": (
        "It has order='ordered', and derivatives run a function again, or not at all."
        " If it needs no order, write f = hc.host(sine, result=...) with a rule:"
        " f.defvjp(fwd, bwd). Or put"
    ),
}


@pytest.mark.parametrize("order", REMEDIES)
def test_the_first_remedy_is_a_rule(order):
    with pytest.raises(hc.errors.DerivativeError) as caught:
        jax.grad(lambda x: hc.call(sine, ROW, x, order=order).sum())(ROW)
    assert f"). {REMEDIES[order]} jax.custom_jvp or" in str(caught.value)


@pytest.mark.parametrize("order", ["unordered", "ordered"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "remat"])
@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "transform",
    [jax.grad, jax.value_and_grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))],
    ids=["grad", "value_and_grad", "jvp"],
)
def test_effects_of_a_differentiated_scan_run_once(order, wrap, mode, transform):
    # JAX splits the scan, and keeps only effects of registered types.
    seen = []

    def body(c, _):
        hc.call(
            lambda v: seen.append(float(v)), None, jax.lax.stop_gradient(c), order=order
        )
        return c + 1, None

    def f(x):
        return jax.lax.scan(wrap(body), x, None, length=3)[0] ** 2

    jax.block_until_ready(mode(transform(f))(2.0))
    jax.effects_barrier()
    assert seen == [2, 3, 4]


@pytest.mark.parametrize("order", ["unordered", "ordered"])
@pytest.mark.parametrize(
    "derivative",
    [
        lambda f: jax.grad(f)(1.0),
        lambda f: jax.linearize(f, 1.0),
        lambda f: jax.jvp(f, (1.0,), (1.0,)),
    ],
    ids=["grad", "linearize", "jvp"],
)
def test_a_call_without_results_should_be_a_tap(order, derivative):
    def f(x):
        hc.call(lambda v: None, None, x, order=order)
        return x**2

    with pytest.raises(hc.errors.DerivativeError, match=r"write hc\.tap\("):
        derivative(f)
