"""`hc.bridge.sympy` against SciPy's own derivatives and JAX's."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.test_util import check_grads

import hostcall as hc

sp = pytest.importorskip("sympy")
special = pytest.importorskip("scipy.special")
# A warning of SymPy's own, from its use of newer mpmath.
pytestmark = pytest.mark.filterwarnings("ignore:bitcount:DeprecationWarning")

n, x, y = sp.symbols("n x y")
X = jnp.array([0.5, 1.5, 4.0])


def close(got, want, rtol=2e-5):
    if isinstance(want, list) and isinstance(want[0], float):
        want = np.array(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


@pytest.fixture
def bessel():
    return hc.bridge.sympy(sp.besselj(n, x), (n, x))


def test_derivatives_of_any_order(x64, bessel):
    at = np.float64([0.5, 1.5, 4.0])
    g = lambda x: bessel(2, x)
    for order in range(4):
        close(jax.jit(jax.vmap(g))(at), special.jvp(2, at, order), 1e-12)
        g = (
            jax.grad(g)
            if order % 2
            else (lambda g: lambda x: jax.jvp(g, (x,), (1.0,))[1])(g)
        )
    check_grads(jax.jit(lambda x: bessel(2, x)), (at,), 3)


def test_hc_check(bessel):
    assert hc.testing.check(bessel, (2, X), (np.arange(3), 1.5))
    assert hc.testing.check(
        hc.bridge.sympy([x * y, sp.sin(x), sp.Integer(3)], [x, y]), (X, X + 1)
    )
    assert hc.testing.check(
        hc.bridge.sympy(sp.Matrix([[x * y, sp.gamma(x)]]), (x, y)), (X, 2.0)
    )
    assert hc.testing.check(hc.bridge.sympy(sp.exp(sp.I * x), x), X)


def test_transformations():
    f = hc.bridge.sympy(sp.sin(x) * y**2 + x / y, (x, y))
    plain = lambda x, y: jnp.sin(x) * y**2 + x / y
    for transform in (
        lambda f: f(X, 2.0),
        lambda f: f(X[:, None], X),
        lambda f: jax.jacrev(f, (0, 1))(X, X + 1),
        lambda f: jax.hessian(f, (0, 1))(1.5, 2.5),
        lambda f: jax.vmap(f, (0, None))(X, X),  # the batch axis is outside
        lambda f: jax.vmap(jax.vmap(f, (0, None)), (None, 0))(X, X),
        lambda f: jax.vmap(jax.grad(f), (0, None))(X, 2.0),
        lambda f: jax.grad(lambda x: jax.vmap(f, (0, None))(x, 2.0).sum())(X),
        lambda f: lax.scan(lambda c, x: (c + f(x, c), f(c, x)), 1.0, X),
        lambda f: jax.grad(jax.checkpoint(lambda x: jnp.sin(f(x, 2.0)).sum()))(X),
        lambda f: f(jnp.zeros((0, 2)), 1.0),
        lambda f: f(1, 2),
    ):
        close(jax.jit(lambda: transform(f))(), jax.jit(lambda: transform(plain))())


def test_vmap_is_one_call_and_unused_derivatives_none(bessel, monkeypatch):
    names = []
    evaluate = type(bessel.fn).__call__

    def counted(self, *arrays):
        names.append(self.__name__)
        return evaluate(self, *arrays)

    monkeypatch.setattr(type(bessel.fn), "__call__", counted)
    jax.jit(jax.vmap(lambda x: bessel(2, x)))(X)
    assert names == ["besselj(n, x)"]
    names.clear()
    jax.jit(jax.vmap(jax.grad(bessel, 1), (None, 0)))(2.0, X)
    assert names == ["d(besselj(n, x))/dx"]


def test_a_derivative_has_only_the_expressions_of_its_symbol():
    f = hc.bridge.sympy([x, y], (x, y))
    _, pull = jax.vjp(f, 1.0, 2.0)
    # Zero times the infinite cotangent of the other expression would be NaN.
    assert pull([jnp.float32(np.inf), jnp.float32(1)]) == (np.inf, 1)


def test_lists_and_matrices():
    several = hc.bridge.sympy([x * y, sp.cos(x), sp.pi], (x, y))
    one, two, three = several(X, 2.0)
    close((one, two, three), (2 * X, jnp.cos(X), np.full(3, np.pi)))
    slope = jax.jvp(lambda x: several(x, 2.0), (X,), (jnp.ones(3),))[1]
    close(slope, [np.full(3, 2.0), -jnp.sin(X), np.zeros(3)])
    matrix = hc.bridge.sympy(sp.Matrix([[x, y], [x * y, 1], [0, y**2]]), (x, y))
    plain = lambda x, y: jnp.array([[x, y], [x * y, 1.0], [0.0, y**2]])
    assert matrix(X, 2.0).shape == (3, 3, 2)
    close(jax.jacfwd(matrix, (0, 1))(1.5, 2.0), jax.jacfwd(plain, (0, 1))(1.5, 2.0))
    close(
        jax.vmap(jax.hessian(matrix, 1), (0, None))(X, 2.0),
        jax.vmap(jax.hessian(plain, 1), (0, None))(X, 2.0),
    )


def test_steps_and_absolute_values():
    f = hc.bridge.sympy(
        sp.Abs(x) + 3 * sp.sign(x) + sp.Heaviside(x) + sp.Max(x, 0) ** 2, x
    )
    at = jnp.array([-1.5, 2.0])
    close(jax.vmap(jax.grad(f))(at), [-1.0, 5.0])
    close(jax.vmap(jax.grad(jax.grad(f)))(at), [0.0, 2.0])


def test_piecewise():
    f = hc.bridge.sympy(sp.Piecewise((x**2, x > 1), (x, True)), x)
    close(jax.vmap(f)(X), [0.5, 2.25, 16.0])
    close(jax.vmap(jax.grad(f))(X), [1.0, 3.0, 8.0])


def test_complex():
    f = hc.bridge.sympy(sp.besselj(1, x) * x, x)
    close(f(X + 0.5j), special.jv(1, np.asarray(X + 0.5j)) * (X + 0.5j))
    check_grads(jax.jit(f), (X + 0.5j,), 2, rtol=2e-2, atol=2e-2)
    unit = hc.bridge.sympy(sp.exp(sp.I * x), x)
    assert unit(X).dtype == np.complex64
    close(jax.jvp(unit, (X,), (jnp.ones(3),))[1], 1j * jnp.exp(1j * X))


def test_complex_values_of_real_arrays_are_nan():
    f = hc.bridge.sympy(sp.LambertW(x), x)
    close(f(jnp.array([1.0, -1.0])), [float(special.lambertw(1).real), np.nan])


def test_dtypes(bessel, x64):
    assert bessel(2, jnp.float32(1)).dtype == np.float32
    assert bessel(2, jnp.bfloat16(1)).dtype == jnp.bfloat16
    assert bessel(2, 3).dtype == np.float64
    assert hc.bridge.sympy(1 / x, x)(2) == 0.5


def test_a_function_of_your_own():
    own = {"polylog": lambda n, x: x + n}
    f = hc.bridge.sympy(sp.polylog(2, x), x, modules=[own, "numpy"])
    close(f(X), X + 2)


def refused(text, make, error=hc.errors.SpecError):
    with pytest.raises(error, match=text):
        make()


def test_refusals(bessel):
    bridge, real = hc.bridge.sympy, sp.Symbol("r", real=True)
    refused(
        "`polylog.2, x.` uses polylog, which .* don't have",
        lambda: bridge(sp.polylog(2, x), x),
    )
    refused(
        "`x.y` has the symbols y, which are not among its arguments",
        lambda: bridge(x * y, x),
    )
    refused("got 'x'. Make one from text with sympy.sympify", lambda: bridge("x", x))
    refused("whose values are numbers, got x > 0", lambda: bridge(x > 0, x))
    refused(
        r"which SymPy has not evaluated.* Try expr.doit\(\)",
        lambda: bridge(sp.Integral(sp.exp(x * y**3), (y, 0, 1)), x),
    )
    refused(
        "a list of the Symbols that are its arguments, got 'x'", lambda: bridge(x, "x")
    )
    refused(r"takes an array for each of \(n, x\), got 1", lambda: bessel(1.0))
    refused(
        "complex array for r, which is declared real",
        lambda: bridge(sp.Abs(real), real)(1j),
    )


def test_derivatives_that_sympy_has_not(bessel):
    zeta = hc.bridge.sympy(sp.zeta(x), x)
    text = (
        r"SymPy can't differentiate zeta\(x\) with respect to x: it returns"
        r" Derivative\(zeta\(x\), x\)"
    )
    refused(text, lambda: jax.grad(zeta)(2.0), hc.errors.DerivativeError)
    refused(
        "besselj.n, x. with respect to n",
        lambda: jax.jit(jax.grad(bessel))(2.0, 3.0),
        hc.errors.DerivativeError,
    )
    size = hc.bridge.sympy(sp.Abs(x), x)
    refused(
        "with respect to x: it returns",
        lambda: jax.grad(lambda z: size(z).real)(1j),
        hc.errors.DerivativeError,
    )


def test_pickle(bessel):
    close(pickle.loads(pickle.dumps(bessel))(2, X), bessel(2, X))


def test_without_sympy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sympy", None)
    refused("pip install sympy", lambda: hc.bridge.sympy(x, x), ImportError)


def test_factorial_where_scipys_is_zero():
    f = hc.bridge.sympy(sp.factorial(x), x)
    np.testing.assert_allclose(f(-0.7), float(sp.factorial(-0.7)), rtol=1e-6)


def test_a_symbol_named_twice():
    with pytest.raises(hc.errors.SpecError, match="names a symbol twice"):
        hc.bridge.sympy(x * y, (x, x, y))


def test_floor_and_ceiling_are_steps():
    f = hc.bridge.sympy(sp.floor(x**2) * x + sp.ceiling(y), (x, y))
    at = jnp.float32(1.7)
    assert f(at, y=at) == 2 * at + 2
    np.testing.assert_allclose(jax.grad(f, (0, 1))(at, at), (2, 0))
    with pytest.raises(
        hc.errors.SpecError, match=r"got 1 by position and the keywords \['z'\]"
    ):
        f(at, z=at)
