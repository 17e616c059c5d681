"""The problems of `hc.bridge.scipy`, a class for each function of SciPy's.

Each calls it, and decides what SciPy leaves open: whether a solve that SciPy does not
call a success ended at a solution all the same. That is so where a Newton step, which
would lead to the solution, is too short to matter.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import numpy as np

from hostcall.bridge._scipy.problem import Code, Evaluations, Limits, Problem

_NEAR = 1.5e-8  # of the length of x: the root of float64's precision


class Root(Problem):
    word = "root"
    returns = "as many real floating numbers as the unknown has"
    methods = ("hybr",)

    @staticmethod
    def zero(fun: Code) -> Code:
        return fun

    @staticmethod
    def fits(unknown: int, result: int) -> bool:
        return result == unknown

    def solve(self, start: np.ndarray, codes: Evaluations, limits: Limits) -> Any:
        value, slope = codes
        solution = self.scipy.root(
            value, start, jac=slope, tol=self.tol, options=dict(self.options)
        )
        if not solution.success:
            # "hybr" makes "no good progress" at a root that is exact up to rounding, as
            # of a linear function. Its own criterion, of a Newton step from there.
            with contextlib.suppress(np.linalg.LinAlgError):
                x = solution.x
                step = np.linalg.solve(slope(x), value(x))
                solution.success = _is_short(step, x, self.tol or _NEAR)
        return solution


class Minimize(Problem):
    word = "minimize"
    returns = "one real floating number"
    codes = (jax.value_and_grad, jax.hessian)
    result_shape = ()
    with_hessian = ("Newton-CG", "dogleg", "trust-ncg", "trust-krylov", "trust-exact")
    methods_with_bounds = ("L-BFGS-B", "TNC", "SLSQP")
    methods = ("BFGS", "CG", *methods_with_bounds, *with_hessian)
    on_other_methods = (
        " (others may end where the gradient is not zero, or take no bounds)"
    )
    zero = staticmethod(jax.grad)

    @staticmethod
    def fits(unknown: int, result: int) -> bool:
        return result == 1

    def solve(self, start: np.ndarray, codes: Evaluations, limits: Limits) -> Any:
        value_and_slope, bend = codes
        of_method: dict[str, Any] = {}
        if self.method in self.with_hessian:
            of_method["hess"] = bend
        if limits is not None:
            low, high = limits
            of_method["bounds"] = self.scipy.Bounds(low, high)
        solution = self.scipy.minimize(
            value_and_slope,
            start,
            jac=True,
            method=self.method,
            tol=self.tol,
            options=dict(self.options),
            **of_method,
        )
        if not solution.success:
            # Line searches end with a "precision loss" where values no longer differ,
            # and that may be before the gradient is below `tol`.
            x = solution.x
            _, slope = value_and_slope(x)
            solution.success = _is_minimum(x, slope, bend(x), limits)
        return solution


def _is_minimum(
    x: np.ndarray, slope: np.ndarray, bend: np.ndarray, limits: Limits
) -> bool:
    """Whether a Newton step from `x` would not matter, of what no bound holds."""
    is_free = np.ones(x.shape, bool)
    if limits is not None:
        low, high = limits
        # The function rises from a lower bound, and falls towards an upper one.
        held_below = (x <= low) & (slope >= 0)
        held_above = (x >= high) & (slope <= 0)
        is_free = ~(held_below | held_above)
    bend = bend[is_free][:, is_free]
    try:
        np.linalg.cholesky(bend)  # which fails where it is no minimum
        step = np.linalg.solve(bend, slope[is_free])
    except np.linalg.LinAlgError:
        return False
    return _is_short(step, x, _NEAR)


def _is_short(step: np.ndarray, x: np.ndarray, of_x: float) -> bool:
    """Whether a step is at most this part of x long."""
    return bool(np.linalg.norm(step) <= of_x * np.linalg.norm(x))


class LeastSquares(Problem):
    word = "least_squares"
    methods_with_bounds = ("trf", "dogbox")
    methods = (*methods_with_bounds, "lm")
    on_other_methods = " ('lm' takes no bounds)"
    tolerances = ("ftol", "xtol", "gtol")
    option_names = (*tolerances, "max_nfev", "x_scale", "tr_solver", "tr_options")
    on_other_options = (
        f": {option_names}. Another loss= is another problem (write it into fun)"
    )

    @staticmethod
    def zero(fun: Code) -> Code:
        def half_sum_of_squares(*args: Any) -> jax.Array:
            return (fun(*args) ** 2).sum() / 2

        slope: Code = jax.grad(half_sum_of_squares)
        return slope

    @staticmethod
    def fits(unknown: int, result: int) -> bool:
        return True  # there may be any number of residuals

    def solve(self, start: np.ndarray, codes: Evaluations, limits: Limits) -> Any:
        residuals, slopes = codes
        options: dict[str, Any] = {}
        if self.tol is not None:
            options = dict.fromkeys(self.tolerances, self.tol)
        options |= self.options  # which may have others for some of them
        if limits is not None:
            options["bounds"] = limits
        solution = self.scipy.least_squares(
            residuals, start, slopes, method=self.method, **options
        )
        if limits is not None:  # "trf" stays inside, within a rounding of the bound
            at_bound = solution.active_mask  # -1 at the lower one, 1 at the upper one
            is_at_bound = [at_bound < 0, at_bound > 0]
            solution.x = np.select(is_at_bound, limits, solution.x)
        return solution
