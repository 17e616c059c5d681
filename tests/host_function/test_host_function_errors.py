"""hc.host: the errors for rules that are missing or return something wrong."""

import re

import jax
import jax.numpy as jnp
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
    "jvp, shape": (
        wrong_jvp(X[:2]),
        r"the tangent of result that `wrong_jvp.<locals>.<lambda>`, the jvp rule of"
        r" `f`, returned should be float32\[3\], got float32\[2\]. A tangent has the"
        r" shape of the result whose tangent it is",
    ),
    "jvp, structure": (wrong_jvp({"a": X}), "float32"),
    "jvp in JAX, shape": (
        wrong_jvp(X[:2], "jax"),
        r"the jvp rule of `f` returned float32\[2\] where float32\[3\] is wanted for the"
        " tangent of result. A tangent has the shape of the result",
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
    "bwd, shape": (
        wrong_vjp((X, X), (X[:2],)),
        r"the cotangent of args\[0\] that `wrong_vjp.<locals>.<lambda>`, the backward"
        r" rule of `f`, returned should be float32\[3\], got float32\[2\]. A cotangent"
        " has the shape of its argument, and the rule returns one for each, in the order",
    ),
    "bwd in JAX, shape": (
        wrong_vjp((X, X), (X[:2],), "jax"),
        r"backward rule of `f` returned float32\[2\] where float32\[3\] is wanted for"
        r" the cotangent of args\[0\]. A cotangent has the shape of its argument",
    ),
    "jvps in JAX, shape": (
        wrong_jvps(lambda t: t.sum()),
        r"the jvp rule of `f` returned float32\[\] where float32\[3\] is wanted",
    ),
    "jacobian, shape": (
        wrong_jacobian(X[None]),
        r"the Jacobian of result by args\[0\] that `wrong_jacobian.<locals>.<lambda>`,"
        r" the Jacobian rule of `f`, returned should be float32\[3,3\], got float32\[1,3\]. A Jacobian"
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


def test_the_argument_whose_cotangent_is_wrong():
    """Each of two is named, by its path; what has no derivative is not counted."""

    def f(i, a, tree):
        return a @ tree["b"] * i

    def grads(swap):
        made = hc.host(f, result=lambda i, a, tree: jax.ShapeDtypeStruct((2,), a.dtype))

        def backward(r, ct):
            a, b = r
            of_a, of_b = np.outer(ct, b), {"b": a.T @ ct}
            return (None, of_a[:, :1], of_b) if swap == 1 else (None, of_a, {"b": ct})

        made.defvjp(lambda i, a, tree: (f(i, a, tree), (a, tree["b"])), backward)
        jax.grad(lambda a, b: made(1, a, {"b": b}).sum(), (0, 1))(
            jnp.ones((2, 3)), jnp.ones(3)
        )

    for swap, said in (
        (1, r"cotangent of args\[1\] that .* be float32\[2,3\], got float32\[2,1\]"),
        (2, r"cotangent of args\[2\]\['b'\] that .* be float32\[3\], got float32\[2\]"),
    ):
        with pytest.raises(hc.errors.ResultError, match=said):
            grads(swap)


def test_the_result_whose_tangent_is_wrong():
    f = hc.host(
        lambda a: (a.sum(), a), result=lambda a: (a.update(shape=()), a), name="f"
    )
    f.defjvp(
        lambda primals, tangents: ((primals[0].sum(), primals[0]), (tangents[0],) * 2)
    )
    with pytest.raises(
        hc.errors.ResultError, match=r"the tangent of result\[0\] that "
    ):
        jax.jvp(f, (jnp.ones(3),), (jnp.ones(3),))


def test_the_argument_whose_transpose_is_wrong():
    f = hc.host(lambda a: a[:2], result=lambda a: a.update(shape=(2,)), name="f")
    f.deftranspose(lambda ct: ct)
    with pytest.raises(
        hc.errors.ResultError,
        match=r"cotangent of args\[0\] that .* the transposition rule of `f`",
    ):
        jax.grad(lambda a: f(a).sum())(jnp.ones(3))


NUMPY = {
    "backward": (lambda f: f.defvjp(lambda x: (x, x), lambda r, ct: (np.sin(r) * ct,), where="jax"), jax.grad),
    "forward": (lambda f: f.defvjp(lambda x: (np.sin(x), x), lambda r, ct: (ct,), where="jax"), jax.grad),
    "jvp": (lambda f: f.defjvp(lambda p, t: float(p[0]) * t[0], where="jax"), jax.grad),
    "if": (lambda f: f.defjvp(lambda p, t: t[0] if p[0] > 0 else -t[0], where="jax"), jax.grad),
    "Jacobian": (lambda f: f.defjacobian(lambda x: np.cos(x), where="jax"), jax.grad),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMPY)
def test_numpy_in_a_rule_of_jax_code(name):
    """JAX's error has a note that says where the rule runs."""
    give, derivative = NUMPY[name]
    f = hc.host(lambda x: x, result=hc.results.like(0), name="f")
    give(f)
    with pytest.raises((TypeError, jax.errors.ConcretizationTypeError)) as caught:
        jax.jit(derivative(f))(1.0)
    (note,) = [n for n in caught.value.__notes__ if n.startswith("hostcall:")]
    assert 'rule of `f`, has where="jax", so it is JAX code' in note
    assert "Write it with jax.numpy, or leave out where=" in note
