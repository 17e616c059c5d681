"""Three centuries of sunspots.

The yearly sunspot numbers, 1700 to 2008, ship with statsmodels. Two JAX programs work
on them, and both need SciPy routines that JAX does not have:

`fit`: how the 11-year cycle is modulated. A sine with a swinging phase,
    cos(w t + beta sin(W t + psi)), has the spectrum J_n(beta) cos((w + n W) t + n psi),
    n = ..., -1, 0, 1, ...; J_n is SciPy's Bessel function `jv`. The fit is
    Levenberg-Marquardt least squares, jitted, scanned over steps, vmapped over starts,
    and differentiated: `jv` has a derivative rule (see `bessel`).

`forecast`: the next year's number from a van der Pol oscillator. SciPy's `solve_ivp`
    takes it from year to year, and the record corrects it each year. Jitted, scanned
    over years, vmapped over the strength of the oscillator's drive.

Both are compared with plain NumPy and SciPy. The module needs 64-bit mode.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.integrate
import scipy.optimize
import scipy.signal
import scipy.special
import statsmodels.api
from bessel import jv
from text import Array

import hostcall as hc

SIDEBANDS = np.arange(-4, 5)
CYCLE = 22.1  # years: the magnetic cycle, two sunspot cycles
AMPLITUDE = 10.0  # of the oscillator; its square is a sunspot number
CORRECTION = np.array([0.9, 0.4])  # of the oscillator's position and speed, per year


class Sunspots(NamedTuple):
    """The record: years, and mean sunspot numbers, (309,) each."""

    years: np.ndarray
    numbers: np.ndarray


def load() -> Sunspots:
    table = statsmodels.api.datasets.sunspots.load_pandas().data
    return Sunspots(table["YEAR"].to_numpy(), table["SUNACTIVITY"].to_numpy())


# --- The modulated cycle --------------------------------------------------------------

START = (50.0, 30.0, 0.0, 11.05, 1.0, 0.0, 0.0)  # `starts` sets the long period


def starts(count: int) -> np.ndarray:
    """(count, 7) parameters to start from, each with another long period."""
    made = np.tile(START, (count, 1))
    made[:, 5] = np.linspace(50, 250, count)
    return made


def curve(parameters: Array, t: Array, xp: Any, bessel: Any) -> Array:
    """The model at times t: with JAX (jnp, jv), or without (np, scipy.special.jv)."""
    mean, a, b, period, beta, long_period, psi = parameters
    n = SIDEBANDS[:, None]
    phase = 2 * np.pi * (1 / period + n / long_period) * t + n * psi
    waves = a * xp.cos(phase) + b * xp.sin(phase)
    return mean + bessel(SIDEBANDS, beta) @ waves


@partial(jax.jit, static_argnums=(3, 4))
@partial(jax.vmap, in_axes=(0, None, None, None, None))
def fit(
    start: Array, t: Array, numbers: Array, steps: int, record: Any
) -> tuple[Array, Array]:
    """Levenberg-Marquardt from one start: the parameters, half the sum of squares.

    Each step calls `record(step=..., cost=...)`, unless it is None.
    """

    def residuals(parameters: Array) -> Array:
        return curve(parameters, t, jnp, jv) - numbers

    def step(carry: Any, i: Array) -> tuple[Any, None]:
        old, cost, damping = carry
        # One bar for all starts; `misfit` shows as their mean and range.
        hc.progress(i, steps, desc="  fitting", misfit=cost)
        if record is not None:
            record(step=i, cost=cost)
        slopes = jax.jacfwd(residuals)(old)
        normal = slopes.T @ slopes
        damped = normal + damping * jnp.diag(jnp.diag(normal))
        new = old - jnp.linalg.solve(damped, slopes.T @ residuals(old))
        new_cost = 0.5 * jnp.sum(residuals(new) ** 2)
        better = new_cost < cost
        carry = (
            jnp.where(better, new, old),
            jnp.where(better, new_cost, cost),
            jnp.where(better, damping / 3, damping * 4),
        )
        return carry, None

    first = (start, 0.5 * jnp.sum(residuals(start) ** 2), jnp.asarray(1e-2))
    (parameters, cost, _), _ = jax.lax.scan(step, first, jnp.arange(steps))
    return parameters, cost


def fit_with_scipy(first: np.ndarray, t: np.ndarray, numbers: np.ndarray) -> Any:
    """The best fit of scipy.optimize.least_squares from the same starts."""
    found = [
        scipy.optimize.least_squares(
            lambda p: curve(p, t, np, scipy.special.jv) - numbers,
            start,
            x_scale=[10, 10, 10, 0.1, 0.5, 10, 1],
            max_nfev=200,
        )
        for start in first
    ]
    return min(found, key=lambda result: result.cost)


# --- The forecast ---------------------------------------------------------------------


def magnetic_field(numbers: np.ndarray) -> np.ndarray:
    """Square roots of the numbers; the sign changes at each minimum of the cycle."""
    minima, _ = scipy.signal.find_peaks(-numbers, distance=8, prominence=10)
    cycle = np.searchsorted(minima, np.arange(len(numbers)))
    field: np.ndarray = np.where(cycle % 2, -1.0, 1.0) * np.sqrt(numbers)
    return field


def next_year(state: np.ndarray, drive: np.ndarray) -> np.ndarray:
    """The oscillator's (position, speed) one year later, by SciPy, for one row."""
    w, limit, mu = 2 * np.pi / CYCLE, AMPLITUDE / 2, float(drive)

    def slope(_: float, u: np.ndarray) -> list[float]:
        x, v = u.tolist()
        return [v, mu * (1 - (x / limit) ** 2) * v - w * w * x]

    solved = scipy.integrate.solve_ivp(slope, (0, 1), state, rtol=1e-8, atol=1e-8)
    return solved.y[:, -1]  # type: ignore[no-any-return]


@jax.jit  # type: ignore[untyped-decorator]
@partial(jax.vmap, in_axes=(0, None))
def forecast(drive: Array, field: Array) -> Array:
    """Each year's field as forecast the year before, (years - 1,) per row."""

    def step(state: Array, seen: Array) -> tuple[Array, Array]:
        result = jax.ShapeDtypeStruct(state.shape, state.dtype)
        state = hc.call(next_year, result, state, drive, vmap_method="sequential")
        return state + CORRECTION * (seen - state[0]), state[0]

    first = jnp.stack([field[0], jnp.ones_like(field[0])])
    _, forecasts = jax.lax.scan(step, first, field[1:])
    return forecasts


def forecast_without_jax(drive: np.ndarray, field: np.ndarray) -> np.ndarray:
    rows = []
    for mu in drive:
        state, row = np.array([field[0], 1.0]), []
        for seen in field[1:]:
            state = next_year(state, mu)
            row.append(state[0])
            state = state + CORRECTION * (seen - state[0])
        rows.append(row)
    return np.array(rows)
