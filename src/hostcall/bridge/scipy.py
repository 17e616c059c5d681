"""`hc.bridge.scipy`: SciPy solves equations and minimizes functions that are JAX code.

Each solver takes a JAX function `fun(x, *args)` and makes a `HostFunction` of a first
guess and the args, which returns the solution.

The idea: a solution x is where some JAX function F(x, args) is zero: `fun` itself, or
the gradient of what is minimized. SciPy finds x. If F(x, args) stays zero while args
move, then F_x dx + F_args dargs = 0, so

    dx = -F_x^-1 F_args dargs

(the implicit function theorem). That is JAX code over x, so JAX transposes it and
differentiates it again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from hostcall._core.mistakes import check_function
from hostcall._core.suggestions import suggests
from hostcall._host_function.host import host
from hostcall.bridge._scipy.implicit import ImplicitRule
from hostcall.bridge._scipy.problem import Outcome, Problem
from hostcall.bridge._scipy.solvers import LeastSquares, Minimize, Root

__all__ = ["Outcome", "least_squares", "minimize", "root"]

_DERIVED = "JAX derives it from fun: leave it out"
_ARGUMENTS = "The function that is returned takes them: solve(x0, *args)"
# Options of SciPy's functions, and what to write instead.
_OF_SCIPY = {
    "args": _ARGUMENTS,
    "x0": _ARGUMENTS,
    "jac": _DERIVED,
    "hess": _DERIVED,
    "hessp": _DERIVED,
    "constraints": (
        "A derivative through constraints is not offered. Bounds are: bounds=(low,"
        " high). For other constraints add a penalty to fun, or call"
        " scipy.optimize.minimize in a function of hc.call or hc.host"
    ),
    "callback": "To see the values of fun, write hc.tap or hc.print in it",
}


@suggests("hc.bridge.scipy.root", _OF_SCIPY)
def root(
    fun: Callable[..., Any] | None = None,
    *,
    tol: float | None = None,
    options: Mapping[str, Any] | None = None,
    full_output: bool = False,
    vmap_method: str | None = None,
    timeout: float | None = None,
    name: str | None = None,
) -> Any:
    """Makes a solver of `fun(x, *args) = 0`: SciPy finds x, which has derivatives.

        @hc.bridge.scipy.root
        def kepler(E, M, e):                    # a JAX function, zero at the solution
            return E - e * jnp.sin(E) - M

        E = kepler(M, M, e)                     # from the first guess E = M
        jax.grad(kepler, 2)(M, M, e)            # dE/de

    Args:
        fun: a JAX function `fun(x, *args)`. The unknown `x` is a pytree of real
            floating arrays, and the result has as many numbers. The args are any
            pytrees; what has derivatives or is traced must be among them, and not in a
            closure. Without `fun`, `root` returns a decorator.
        tol: as in `scipy.optimize.root`.
        options: as in `scipy.optimize.root`, whose method is "hybr": the others make no
            use of the exact Jacobian, or may end where `fun` is not zero ("lm").
        full_output: whether the result is `(x, ending)`, with an `Outcome`. A solve
            that fails then returns its last x and `ending.success == False`.
        vmap_method: "sequential" (default) or "parallel": one solve for each row.
        timeout: as in `hc.host`: seconds for one solve, compilation included.
        name: as in `hc.host`.

    Returns:
        A `HostFunction`, called as `solve(x0, *args)`; it returns x, in the structure,
        shapes and dtypes of x0.

    Raises:
        PackageError: SciPy is not installed.
        SpecError: an option is wrong, or `fun` or `x0` does not fit, when the program
            is traced.
        HostcallError: SciPy found no solution, with SciPy's message, when the program
            runs (unless `full_output`). A root from which a Newton step is shorter than
            `tol` (default: 1.5e-8) of x is one, though "hybr" may not say so. Where a
            value is NaN or infinite is none, though SciPy may say so.

    Under transformations:
        jit, scan, while_loop, cond, remat, shard_map: as a pure `hc.call`.
        jit over sharded arrays: one solve, with the whole args. The derivative needs
            them on each device.
        vmap: one solve for each row.
        jvp, grad, jacobian, hessian, any order, both modes: one solve, and JAX code of
            the program: the Jacobian of `fun` at x, and a linear solve with it, in the
            program's precision. The first guess has no influence, so its derivative is
            zero. A singular Jacobian gives infinite or NaN derivatives.

    Cost: a host call, SciPy's own time, and 30 us for each value of `fun`, and for each
    Jacobian; 60 us for a value with a gradient. `fun` and its derivatives are traced in
    float64, whatever JAX's mode, and compiled once for each combination of shapes.
    Derivatives of x need a dense n x n matrix for n numbers in x.

    Source: scipy.optimize; the rule is that of `jax.lax.custom_root`.
    """
    return _solver(root, Root, dict(locals()))


@suggests("hc.bridge.scipy.minimize", _OF_SCIPY)
def minimize(
    fun: Callable[..., Any] | None = None,
    *,
    method: str | None = None,
    tol: float | None = None,
    options: Mapping[str, Any] | None = None,
    bounds: tuple[Any, Any] | None = None,
    full_output: bool = False,
    vmap_method: str | None = None,
    timeout: float | None = None,
    name: str | None = None,
) -> Any:
    """Makes a function that minimizes `fun(x, *args)` over x by SciPy.

        closest = hc.bridge.scipy.minimize(lambda x, p: ((x - p) ** 4).sum() + x @ x)
        x = closest(jnp.zeros(3), p)
        jax.jacobian(closest, 1)(jnp.zeros(3), p)

    Args:
        fun: as in `root`, with one real number as its result. It must have second
            derivatives, and at the solution a Hessian that is not singular.
        method: as in `scipy.optimize.minimize`, one that gets the gradient: "BFGS",
            "CG", "L-BFGS-B", "TNC", "SLSQP", or (with the Hessian, too) "Newton-CG",
            "dogleg", "trust-ncg", "trust-krylov", "trust-exact". Others may end where
            the gradient is not zero, and there the derivative of x does not follow.
            Default: "BFGS"; with bounds "L-BFGS-B".
        tol: as in `scipy.optimize.minimize`. SciPy's defaults end at a gradient of
            1e-5, so x and its derivatives are no more exact than that.
        options: as in `scipy.optimize.minimize`: of the method.
        bounds: (low, high), each a number, or a pytree like x of what broadcasts to it;
            infinite for none. For "L-BFGS-B", "TNC" and "SLSQP". They are constants.
            A number of x that is at a bound stays there: its derivative is zero.
        full_output: as in `root`.
        vmap_method: as in `root`.
        timeout: as in `root`.
        name: as in `root`.

    Returns:
        As `root`: a `HostFunction`, called as `solve(x0, *args)`.

    Raises:
        As `root`. A minimum from which a Newton step is shorter than 1.5e-8 of x is
        one, though a line search that has lost its precision does not say so.

    Under transformations:
        As `root`, with the gradient of `fun` in place of `fun`: a derivative of x needs
        the Hessian. Where a number of x is at its bound and its gradient is zero as
        well, x has no derivative; the result is then that of a number at its bound.

    Cost: as `root`.

    Source: scipy.optimize.
    """
    return _solver(minimize, Minimize, dict(locals()))


@suggests("hc.bridge.scipy.least_squares", _OF_SCIPY)
def least_squares(
    fun: Callable[..., Any] | None = None,
    *,
    method: str = "trf",
    tol: float | None = None,
    options: Mapping[str, Any] | None = None,
    bounds: tuple[Any, Any] | None = None,
    full_output: bool = False,
    vmap_method: str | None = None,
    timeout: float | None = None,
    name: str | None = None,
) -> Any:
    """Makes a function that minimizes the sum of squares of `fun(x, *args)` by SciPy.

        @hc.bridge.scipy.least_squares
        def fit(p, t, y):
            return p[0] * jnp.exp(p[1] * t) - y

        jax.jacobian(fit, 2)(p0, t, y)          # how the fit depends on the data

    Args:
        fun: as in `root`, with any pytree of real floating arrays as its result.
        method: as in `scipy.optimize.least_squares`: "trf", "dogbox", "lm".
        tol: `ftol`, `xtol` and `gtol` of `scipy.optimize.least_squares`.
        options: others of its keywords: `ftol`, `xtol`, `gtol`, `max_nfev`, `x_scale`,
            `tr_solver`, `tr_options`.
        bounds: as in `minimize`, for "trf" and "dogbox".
        full_output: as in `root`.
        vmap_method: as in `root`.
        timeout: as in `root`.
        name: as in `root`.

    Returns:
        As `root`: a `HostFunction`, called as `solve(x0, *args)`.

    Raises:
        As `root`.

    Under transformations:
        As `minimize`, of half the sum of squares. The Hessian is the full one, with the
        second derivatives of `fun`, so derivatives are exact for large residuals too.

    Cost: as `root`.

    Source: scipy.optimize.
    """
    return _solver(least_squares, LeastSquares, dict(locals()))


def _solver(
    face: Callable[..., Any], kind: type[Problem], settings: dict[str, Any]
) -> Any:
    """The solver of a problem; without `fun`, a decorator that makes it.

    `settings` are the arguments of the public function `face`.
    """
    fun = settings.pop("fun")
    if fun is None:
        return functools.partial(face, **settings)
    name = settings["name"]
    if not name:
        usage = f"hc.bridge.scipy.{kind.word}(fun)"
        name = check_function(fun, usage).name
    settings["name"] = name
    problem = kind(fun, settings)
    solver = host(
        problem,
        result=problem.spec,
        float64=True,  # SciPy computes in it, whatever JAX's mode is
        vmap_method=settings["vmap_method"],
        timeout=settings["timeout"],
        name=name,
    )
    solver.defjvp(ImplicitRule(problem, solver), where="jax")
    return solver
