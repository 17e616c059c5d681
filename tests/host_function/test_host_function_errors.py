"""hc.host: the errors for rules that are missing or return something wrong."""

import re

import jax
import numpy as np
import pytest

import hostcall as hc

X = np.array([0.3, -1.2, 2.0], dtype=np.float32)


def make(**rules):
    f = hc.host(np.sin, result=hc.results.like(0), name="f")
    for name, rule in rules.items():
        rule(getattr(f, name))
    return f


def host_jvp(define):
    define(lambda p, t: np.cos(p[0]) * t[0])


def host_vjp(define):
    define(lambda x: (np.sin(x), np.cos(x)), lambda c, ct: (c * ct,))


def jvp(f):
    return jax.jvp(f, (X,), (X,))


def grad(f):
    return jax.grad(lambda x: f(x).sum())(X)


MISSING = {
    "none, forward": (
        {},
        jvp,
        r"`f` has no derivative rule \(called at .*\)\. Give one: f\.defjvp\(rule\) for"
        r" forward mode, f\.defvjp\(fwd, bwd\) for reverse mode, f\.defjacobian\(rule\)"
        r" for both, hc\.derivatives\.finite_difference\(f\) .*stop_gradient",
    ),
    "none, reverse": ({}, grad, "`f` has no derivative rule"),
    "forward": (
        {"defvjp": host_vjp},
        jvp,
        r"has a rule for reverse mode \(defvjp\), and is differentiated in forward mode"
        r".*Add f\.defjvp\(rule\).*or f\.defjacobian\(rule\)",
    ),
    "reverse": (
        {"defjvp": host_jvp},
        grad,
        r"has a rule for forward mode in host code \(defjvp\), and is differentiated in"
        r" reverse mode.*Add f\.defvjp\(fwd, bwd\).*f\.defjacobian\(rule\).*"
        r"f\.defjvp\(rule, where='jax'\)",
    ),
    "second order, forward": (
        {"defjvp": host_jvp},
        lambda f: jax.jvp(lambda x: jvp_at(f, x), (X,), (X,)),
        "a rule of `f` in host code, is itself differentiated.*where='jax'",
    ),
    "second order, reverse": (
        {"defvjp": host_vjp},
        lambda f: jax.grad(lambda x: jax.grad(lambda x: f(x).sum())(x).sum())(X),
        "a rule of `f` in host code, is itself differentiated.*where='jax'",
    ),
    "jacobian of a host jacobian": (
        {"defjacobian": lambda define: define(lambda x: np.diag(np.cos(x)))},
        lambda f: jax.jacfwd(jax.jacrev(f))(X),
        "a rule of `f` in host code, is itself differentiated",
    ),
    "transposition": (
        {},
        lambda f: jax.linear_transpose(f, X)(X),
        r"`f` can't be transposed: .*f\.deftranspose\(rule\)",
    ),
}


def jvp_at(f, x):
    return jax.jvp(f, (x,), (X,))[1]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("rules", "derive", "text"), MISSING.values(), ids=MISSING.keys()
)
def test_a_missing_rule_names_itself(rules, derive, text, wrap):
    f = make(**rules)
    with pytest.raises(hc.errors.HostcallError) as caught:
        wrap(lambda: derive(f))()
    assert re.search(text, str(caught.value)), caught.value
    assert isinstance(caught.value, (hc.errors.DerivativeError, hc.errors.SpecError))


def test_the_error_names_the_users_line():
    f = make()

    def program(x):
        return f(x).sum()

    line = program.__code__.co_firstlineno + 1
    with pytest.raises(
        hc.errors.DerivativeError, match=re.escape(f"{__file__}:{line} in ")
    ):
        jax.grad(program)(X)


def test_the_error_names_the_users_line_where_jax_makes_the_call():
    line = test_the_error_names_the_users_line_where_jax_makes_the_call.__code__
    text = re.escape(f"{__file__}:{line.co_firstlineno + 4} in ")
    with pytest.raises(hc.errors.DerivativeError, match=text):
        jax.jacfwd(make())(X)


def test_an_argument_that_defjvps_leaves_out():
    f = hc.host(np.multiply, result=hc.results.like(0), name="f")
    f.defjvps(lambda t, out, x, y: t * y, None)
    np.testing.assert_array_equal(jax.jvp(lambda x: f(x, X), (X,), (X,))[1], X * X)
    with pytest.raises(
        hc.errors.DerivativeError, match=r"argument 1, for which defjvps"
    ):
        jax.jvp(lambda y: f(X, y), (X,), (X,))


def test_the_nonlinear_argument_of_a_linear_function():
    f = hc.host(lambda a, x: a * x, result=hc.results.like(1), nondiff=0, name="f")
    f.deftranspose(lambda ct, a: a * ct)
    with pytest.raises(
        hc.errors.DerivativeError, match="argument 0, which is in nondiff"
    ):
        jax.grad(lambda a: f(a, X).sum())(X)
    with pytest.raises(
        hc.errors.DerivativeError, match="argument 0, in which it isn't linear"
    ):
        jax.linear_transpose(lambda a: f(a, X), X)(X)
    back = lambda a: jax.linear_transpose(lambda x: f(a, x), X)(X)[0]
    np.testing.assert_array_equal(back(X), X * X)
    with pytest.raises(hc.errors.DerivativeError, match="itself differentiated"):
        jax.jvp(back, (X,), (X,))


def wrong_jvp(value, where="host"):
    f = make()
    f.defjvp(lambda p, t: value, where=where)
    return lambda: jvp(f)


def wrong_jvps(share):
    f = hc.host(np.add, result=hc.results.like(0), name="f")
    f.defjvps(lambda t, *_: t, lambda t, *_: share(t), where="jax")
    return lambda: jax.jvp(f, (X, X), (X, X))


def wrong_vjp(forward, backward, where="host", residuals=None):
    f = make()
    rules = (lambda x: forward), (lambda r, ct: backward)
    f.defvjp(*rules, where=where, residuals=residuals)
    return lambda: grad(f)


def wrong_jacobian(value, where="host"):
    f = make()
    f.defjacobian(lambda x: value, where=where)
    return lambda: jvp(f)


WRONG = {
    "jvp, shape": (wrong_jvp(X[:2]), r"float32\[3\]"),
    "jvp, structure": (wrong_jvp({"a": X}), "float32"),
    "jvp in JAX, shape": (
        wrong_jvp(X[:2], "jax"),
        r"the jvp rule of `f` returned float32\[2\] where float32\[3\] is wanted",
    ),
    "fwd": (
        wrong_vjp(X, (X,)),
        r"forward rule of `f` should return \(out, residuals\)",
    ),
    "fwd in JAX": (wrong_vjp(X, (X,), "jax"), r"should return \(out, residuals\)"),
    "fwd in JAX, structure": (
        wrong_vjp(({"a": X}, X), (X,), "jax"),
        r"the forward rule of `f` returned dict where float32\[3\] is wanted",
    ),
    "fwd, residuals": (
        wrong_vjp((X, X), (X,), residuals=(X, X)),
        r"residuals in the structure of residuals=",
    ),
    "bwd, no tuple": (
        wrong_vjp((X, X), X),
        r"backward rule of `f` should return a tuple of 1.*\(None for zero\), as in `return \(x_bar,\)`",
    ),
    "bwd, count": (wrong_vjp((X, X), (X, X)), r"got PyTreeDef\(\(\*, \*\)\)"),
    "bwd, shape": (wrong_vjp((X, X), (X[:2],)), r"float32\[3\]"),
    "bwd in JAX, shape": (
        wrong_vjp((X, X), (X[:2],), "jax"),
        r"backward rule of `f` returned float32\[2\] where float32\[3\] is wanted",
    ),
    "jvps in JAX, shape": (
        wrong_jvps(lambda t: t.sum()),
        r"the jvp rule of `f` returned float32\[\] where float32\[3\] is wanted",
    ),
    "jacobian, shape": (
        wrong_jacobian(X[None]),
        r"the Jacobian of result by args\[0\] that `wrong_jacobian.<locals>.<lambda>`, a"
        r" rule of `f`, returned should be float32\[3,3\], got float32\[1,3\]. A Jacobian"
        " has the axes of the result, then those of the argument",
    ),
    "jacobian in JAX, shape": (
        wrong_jacobian(X, "jax"),
        r"Jacobian rule of `f` returned float32\[3\] where float32\[3, 3\]",
    ),
}


@pytest.mark.parametrize(("derive", "text"), WRONG.values(), ids=WRONG.keys())
def test_what_a_rule_returns_is_checked(derive, text):
    with pytest.raises(hc.errors.HostcallError, match=text):
        derive()


def test_the_block_of_a_jacobian_is_named():
    f = hc.host(lambda x, n, y: {"a": x * n, "b": y}, result="infer", name="f")
    f.defjacobian(lambda x, n, y: {"a": (np.eye(3) * n, x[:2]), "b": (0 * x, 1.0)})
    text = re.escape("the Jacobian of result['a'] by args[2] that `")
    with pytest.raises(hc.errors.ResultError, match=text):
        jax.jvp(lambda x, y: f(x, 3, y), (X, X[0]), (X, X[0]))


def test_a_structure_of_results_that_a_rule_misses():
    f = hc.host(lambda x: {"a": x, "b": x}, result=lambda x: {"a": x, "b": x}, name="f")
    f.defjvp(lambda p, t: {"a": t[0]}, where="jax")
    with pytest.raises(hc.errors.DerivativeError, match="the structure of the result"):
        jvp(f)
    g = hc.host(lambda t: t["a"], result=lambda t: t["a"], name="g")
    g.defvjp(lambda t: (t["a"], None), lambda r, ct: ({"b": ct},), where="jax")
    with pytest.raises(hc.errors.DerivativeError, match="for argument 0 the structure"):
        jax.grad(lambda x: g({"a": x}).sum())(X)
