"""Lynx and hares: a fit through one of SciPy's ODE solvers.

The Hudson Bay Company counted the pelts that trappers sold: hares, and the lynx that
live on them. The Lotka-Volterra model of both, in the logarithms x of the hares and y
of the lynx (in thousands), is

    x' = alpha - beta e^y        y' = delta e^x - gamma

The parameters p, (6,), are logarithms too, so that all are positive: of alpha, beta,
gamma and delta (per year), and of the hares and lynx in the first year.

`trajectories` is a host function over SciPy's LSODA, which solves stiff and other
equations. Its rules integrate the sensitivities S = d(x, y) / dp beside the state,

    S' = [[0, -beta e^y], [delta e^x, 0]] S + d(x', y') / dp,

so one more solve gives all derivatives. For the vjp, S stays on the host until the
cotangent comes; for forward mode, S is the Jacobian. The module needs 64-bit mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import jax.scipy.optimize
import numpy as np
import scipy.integrate
import scipy.optimize
from text import Array

import hostcall as hc

# Thousands of pelts, hares and lynx. C. Gordon Hewitt, "The Conservation of the Wild
# Life of Canada" (1921), as it is widely tabulated.
YEARS = np.arange(1900.0, 1921.0)
HARES = (
    *(30.0, 47.2, 70.2, 77.4, 36.3, 20.6, 18.1, 21.4, 22.0, 25.4, 27.1),
    *(40.3, 57.0, 76.6, 52.3, 19.5, 11.2, 7.6, 14.6, 16.2, 24.7),
)
LYNX = (
    *(4.0, 6.1, 9.8, 35.2, 59.4, 41.7, 19.0, 13.0, 8.3, 9.1, 7.4),
    *(8.0, 12.3, 19.5, 45.7, 51.1, 29.7, 15.8, 9.7, 10.1, 8.6),
)
PELTS = np.stack([HARES, LYNX], axis=1)

# alpha, beta, gamma, delta: means of the posterior in B. Carpenter, "Predator-Prey
# Population Dynamics: the Lotka-Volterra model in Stan" (2018).
PUBLISHED = np.array([0.55, 0.028, 0.80, 0.024])

Slope = Callable[[float, np.ndarray], Any]

# --- The solver, on the host ----------------------------------------------------------


def equations(parameters: np.ndarray) -> Slope:
    """The function that gives the time derivative of (x, y)."""
    alpha, beta, gamma, delta = np.exp(parameters[:4]).tolist()

    def slope(_: float, state: np.ndarray) -> list[float]:
        x, y = state.tolist()
        return [alpha - beta * math.exp(y), delta * math.exp(x) - gamma]

    return slope


def with_sensitivities(parameters: np.ndarray) -> Slope:
    """The function that gives the time derivative of (x, y, dx/dp, dy/dp), (14,)."""
    alpha, beta, gamma, delta = np.exp(parameters[:4]).tolist()

    def slope(_: float, state: np.ndarray) -> np.ndarray:
        x, y = state[:2].tolist()
        eaten, born = beta * math.exp(y), delta * math.exp(x)
        made = np.empty(14)
        made[:2] = alpha - eaten, born - gamma
        made[2:8] = (alpha, -eaten, 0, 0, 0, 0) - eaten * state[8:]
        made[8:] = (0, 0, -gamma, born, 0, 0) + born * state[2:8]
        return made

    return slope


def integrate(slope: Slope, first: np.ndarray, years: np.ndarray) -> np.ndarray:
    """The state in each year, (years, state), where the first year's is `first`."""
    span = (years[0], years[-1])
    found = scipy.integrate.solve_ivp(
        slope, span, first, "LSODA", t_eval=years, rtol=1e-10, atol=1e-10
    )
    if not found.success:
        raise RuntimeError(f"LSODA failed: {found.message}")
    return found.y.T  # type: ignore[no-any-return]


@hc.host(
    result=lambda p, years: jax.ShapeDtypeStruct((*years.shape, 2), p.dtype), nondiff=1
)
def trajectories(parameters: np.ndarray, years: np.ndarray) -> np.ndarray:
    """Logarithms of hares and lynx in each year, (years, 2)."""
    return integrate(equations(parameters), parameters[4:], years)


def trajectories_forward(parameters: np.ndarray, years: np.ndarray) -> Any:
    """(trajectories, sensitivities (years, 2, 6))."""
    first = np.concatenate([parameters[4:], np.eye(2, 6, 4).ravel()])
    states = integrate(with_sensitivities(parameters), first, years)
    return states[:, :2], states[:, 2:].reshape(-1, 2, 6)


def trajectories_backward(sensitivities: np.ndarray, cotangent: np.ndarray) -> Any:
    return np.tensordot(cotangent, sensitivities, 2), None


def trajectories_jacobian(parameters: np.ndarray, years: np.ndarray) -> Any:
    return trajectories_forward(parameters, years)[1]


trajectories.defvjp(trajectories_forward, trajectories_backward)
trajectories.defjacobian(trajectories_jacobian)


def cycle(parameters: np.ndarray) -> float:
    """Years from one peak of the hares to the next; at a peak x' is 0 and y rises."""
    level = parameters[0] - parameters[1]  # of y

    def peak(_: float, state: np.ndarray) -> float:
        return float(state[1] - level)

    peak.direction = 1  # type: ignore[attr-defined]
    found = scipy.integrate.solve_ivp(
        equations(parameters),
        (0.0, 50.0),
        parameters[4:],
        "LSODA",
        events=peak,
        rtol=1e-10,
        atol=1e-10,
    )
    first, second, *_ = found.t_events[0].tolist()
    return second - first  # type: ignore[no-any-return]


# `cycle` has no derivative rule, so it gets finite differences.
period = hc.derivatives.finite_difference(
    hc.host(cycle, result=lambda p: jax.ShapeDtypeStruct((), p.dtype), name="period")
)


# --- The fit, in JAX ------------------------------------------------------------------


def starts(count: int) -> np.ndarray:
    """(count, 6) parameters to start from: one guess, and others around it."""
    guess = np.log([0.5, 0.03, 0.8, 0.03, *PELTS[0]])
    spread = np.array([0.2, 0.2, 0.1, 0.2, 0.0, 0.0])
    around = np.random.default_rng(1900).uniform(-spread, spread, (count, 6))
    around[0] = 0
    made: np.ndarray = guess + around
    return made


def residuals(parameters: Array, model: Any = trajectories) -> Array:
    """log(fitted / counted), (years * 2,): errors of counts are taken as relative."""
    return (model(parameters, YEARS) - np.log(PELTS)).ravel()


def misfit(parameters: Array, model: Any = trajectories) -> Array:
    """Half the sum of squares."""
    return 0.5 * jnp.sum(residuals(parameters, model) ** 2)


@jax.jit  # type: ignore[untyped-decorator]
@jax.vmap  # type: ignore[untyped-decorator]
def fit(start: Array) -> tuple[Array, Array]:
    """Fits from one start; returns the parameters and half the sum of squares.

    JAX's own BFGS, with gradients by the vjp. Its first step is as long as the
    gradient, which is in the hundreds here, while the parameters are logarithms. So it
    works on q, where parameters = start + L^-T q and J^T J = L L^T at the start: in q
    the first step is the one of Gauss and Newton.
    """
    slopes = jax.jacfwd(residuals)(start)  # by the Jacobian rule: one solve
    factor = jnp.linalg.cholesky(slopes.T @ slopes)

    def parameters(q: Array) -> Array:
        return start + jax.scipy.linalg.solve_triangular(factor.T, q)

    found = jax.scipy.optimize.minimize(
        lambda q: misfit(parameters(q)), jnp.zeros_like(start), method="BFGS"
    )
    return parameters(found.x), found.fun


@jax.jit  # type: ignore[untyped-decorator]
def covariance(best: Array) -> Array:
    """The covariance of the parameters, (6, 6): s^2 (J^T J)^-1, to first order.

    It assumes that the errors of the logarithms are independent, normal and equally
    large.
    """
    slopes = jax.jacfwd(residuals)(best)
    left = slopes.shape[0] - slopes.shape[1]
    return 2 * misfit(best) / left * jnp.linalg.inv(slopes.T @ slopes)


@jax.jit  # type: ignore[untyped-decorator]
def deviations(slopes: Array, spread: Array) -> Array:
    """Standard errors of quantities with slopes (..., 6); `spread` is the covariance
    of the parameters.
    """
    return jnp.sqrt(jnp.einsum("...i,ij,...j", slopes, spread, slopes))


# --- What it is compared with ---------------------------------------------------------


def trajectories_in_jax(parameters: Array, years: Array) -> Array:
    """Runge and Kutta's method of order 4, 200 steps a year; JAX differentiates it."""
    alpha, beta, gamma, delta = jnp.exp(parameters[:4])
    h = 1 / 200

    def slope(state: Array) -> Array:
        x, y = state
        return jnp.stack([alpha - beta * jnp.exp(y), delta * jnp.exp(x) - gamma])

    def step(state: Array, _: None) -> tuple[Array, None]:
        a = slope(state)
        b = slope(state + h / 2 * a)
        c = slope(state + h / 2 * b)
        d = slope(state + h * c)
        return state + h / 6 * (a + 2 * b + 2 * c + d), None

    def year(state: Array, _: None) -> tuple[Array, Array]:
        state, _ = jax.lax.scan(step, state, length=200)
        return state, state

    first = parameters[4:]
    _, rest = jax.lax.scan(year, first, length=len(years) - 1)
    return jnp.concatenate([first[None], rest])


def fit_with_scipy(start: np.ndarray) -> Any:
    """The fit of scipy.optimize.least_squares, with its own finite differences."""
    model = trajectories.fn
    return scipy.optimize.least_squares(partial(residuals, model=model), start)


# --- The plot -------------------------------------------------------------------------


def plot(path: Path, best: np.ndarray, spread: np.ndarray) -> None:
    """The record, the fitted curves and their bands of two standard errors, as PNG."""
    from matplotlib.figure import Figure

    years = np.linspace(YEARS[0], YEARS[-1], 401)
    logs = np.asarray(trajectories(best, years))
    errors = 2 * np.asarray(deviations(jax.jacfwd(trajectories)(best, years), spread))
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    looks = {"snowshoe hare": ("#0072b2", "o"), "Canada lynx": ("#d55e00", "s")}
    for i, (name, (color, marker)) in enumerate(looks.items()):
        low, high = (np.exp(logs[:, i] + sign * errors[:, i]) for sign in (-1, 1))
        axes.fill_between(years, low, high, color=color, alpha=0.2, linewidth=0)
        axes.plot(years, np.exp(logs[:, i]), color=color, label=f"{name}, model")
        axes.plot(YEARS, PELTS[:, i], marker, color=color, label=f"{name}, pelts")
    axes.set_title("Hudson Bay Company pelts and the fitted Lotka-Volterra model")
    axes.set_xlabel("year")
    axes.set_ylabel("pelts (thousands)")
    axes.set_xticks(YEARS[::2])
    axes.set_xlim(YEARS[0] - 0.5, YEARS[-1] + 0.5)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        ncols=4,
        frameon=False,
        title="bands: two standard errors of the model's curves",
    )
    figure.savefig(path, format="png", dpi=120)
