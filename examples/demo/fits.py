"""The jobs of the demonstration: each is run, checked and reported.

The science is in the modules that this one imports. Every difference that is printed
has been compared with its tolerance first.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import bessel
import jax
import jax.numpy as jnp
import lynx
import numpy as np
import scipy.special
import sunspots
from bessel import jv
from text import close, heading, line

import hostcall as hc


def run(quick: bool, plot: Path) -> None:
    """Runs all jobs. `quick` means fewer starts and steps; the PNG goes to `plot`."""
    before = calls("") - calls("hc.progress")
    fit_lynx(quick, plot)
    check_bessel()
    fit_sunspots(quick)
    after = calls("") - calls("hc.progress")
    print(f"\n  {after - before} calls of SciPy, all from JAX programs.")


def timed(program: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    found = jax.block_until_ready(program())
    return found, time.perf_counter() - begin


def calls(*names: str) -> int:
    """The calls so far of host functions whose names begin with one of `names`."""
    return sum(
        s.calls for name, s in hc.monitor.stats().items() if name.startswith(names)
    )


# --- Lynx and hares -------------------------------------------------------------------

RATES = {
    "alpha, per year": "{:.3f}",
    "beta, per year and thousand lynx": "{:.4f}",
    "gamma, per year": "{:.3f}",
    "delta, per year and thousand hares": "{:.4f}",
}


def fit_lynx(quick: bool, path: Path) -> None:
    demo = lynx
    years = demo.YEARS
    heading(f"Lynx and hares, {years[0]:.0f} to {years[-1]:.0f} ({len(years)} years)")
    count = 2 if quick else 6
    first = demo.starts(count)
    (found, costs), seconds = timed(lambda: demo.fit(first))
    number = calls("trajectories_forward", "trajectories_jacobian")
    winner = int(np.argmin(costs))
    best, cost = np.asarray(found)[winner], float(costs[winner])
    spread = np.asarray(demo.covariance(best))
    print(
        "\n  Hares u and lynx v: u' = (alpha - beta v) u, v' = (delta u - gamma) v,"
        "\n  solved by SciPy's LSODA, a host function, and fitted to pelts by JAX's"
        f"\n  BFGS, whose gradients are its vjp: jit(vmap) from {count} starts."
        "\n  Standard errors (+-) come from its Jacobian, by jacfwd."
    )
    fitted(best, spread, cost)
    line("starts that reach this fit", f"{np.sum(costs < cost * 1.001)} of {count}")
    line("solves, each with all derivatives", number)
    line("time, with compilation", f"{seconds:.2f} s")
    lynx_checks(first, winner, best, cost)
    line("plot", plotted(path, best, spread))


def fitted(best: np.ndarray, spread: np.ndarray, cost: float) -> None:
    """Prints the parameters, each with its standard error."""
    demo = lynx
    values = np.exp(best)
    errors = values * np.sqrt(np.diag(spread))  # d exp(p) = exp(p) dp
    for i, (name, form) in enumerate(RATES.items()):
        both = f"{form.format(values[i])} +- {form.format(errors[i])}"
        line(name, f"{both:<19} (published: {demo.PUBLISHED[i]:g})")
    close((values[:4] - demo.PUBLISHED) / errors[:4], 0, 1)
    for name, value, error in zip(
        ("hares", "lynx"), values[4:], errors[4:], strict=True
    ):
        line(f"{name} in {demo.YEARS[0]:.0f}", f"{value:.1f} +- {error:.1f} thousand")
    length, slope = jax.value_and_grad(demo.period)(best)
    error = float(demo.deviations(slope, spread))
    line("period, peak to peak", f"{length:.2f} +- {error:.2f} years")
    rms = np.sqrt(2 * cost / demo.PELTS.size)
    line("root mean square of log(model/pelts)", f"{rms:.3f}")
    line("  as a factor", f"{np.exp(rms):.2f}")


def lynx_checks(first: np.ndarray, winner: int, best: np.ndarray, cost: float) -> None:
    """Compares with a solver in JAX, which JAX differentiates, and with plain SciPy."""
    demo = lynx
    points = np.stack([first[winner], (first[winner] + best) / 2])

    def gradients(model: Any) -> np.ndarray:
        return np.asarray(
            jax.jit(jax.vmap(jax.grad(lambda p: demo.misfit(p, model))))(points)
        )

    ours, theirs = gradients(demo.trajectories), gradients(demo.trajectories_in_jax)
    scale = np.abs(theirs).max(axis=1, keepdims=True)
    worst = close(ours / scale, theirs / scale, 1e-6)
    line("gradient, against a solver in JAX", f"max relative difference {worst:.1e}")
    plain = demo.fit_with_scipy(first[winner])
    squares = close(cost / plain.cost, 1, 1e-6)
    parameters = close(np.exp(best - plain.x), 1, 1e-3)
    print("  fit, against scipy.optimize.least_squares")
    line("  sum of squares", f"relative difference {squares:.1e}")
    line("  parameters", f"max relative difference {parameters:.1e}")


def plotted(path: Path, best: np.ndarray, spread: np.ndarray) -> str:
    """Draws the plot if matplotlib is there; returns what to print about it."""
    if importlib.util.find_spec("matplotlib") is None:
        return "not drawn without matplotlib: pip install matplotlib"
    lynx.plot(path, best, spread)
    return str(path)


# --- Bessel functions -----------------------------------------------------------------


def check_bessel() -> None:
    """Compares first, second and mixed derivatives with SciPy's."""
    heading("Bessel functions: SciPy's jv, with a rule in JAX code for its derivative")
    z, orders = np.linspace(0, 20, 201), np.arange(-3, 4)

    def table(f: Any) -> np.ndarray:
        over_z = jax.vmap(f, (None, 0))
        return np.asarray(jax.jit(jax.vmap(over_z, (0, None)))(orders, z))

    slope = jax.grad(jv, 1)
    n = orders[:, None]
    worst = {
        "jv": close(table(jv), scipy.special.jv(n, z), 1e-14),
        "its grad": close(table(slope), scipy.special.jvp(n, z), 1e-13),
        "grad(grad)": close(
            table(jax.grad(slope, 1)), scipy.special.jvp(n, z, 2), 1e-13
        ),
    }
    print(
        "\n  Orders -3 to 3 at 201 places, jit(vmap(vmap)); max differences from SciPy"
    )
    for name, difference in worst.items():
        line(name, f"{difference:.1e}")

    demo = bessel
    angles = np.linspace(0, 2 * np.pi, 50)
    points = np.linspace(0.1, 0.9, 50)[:, None] * np.stack(
        [np.cos(angles), np.sin(angles)], axis=1
    )
    hessians = np.asarray(jax.jit(jax.vmap(jax.hessian(demo.drum)))(points))
    analytic = close(hessians, demo.bends(points), 1e-10)
    wave = close(np.trace(hessians, axis1=1, axis2=2), demo.waves(points), 1e-10)
    print("\n  A struck drum, a sum of J_0(k r): jit(vmap(hessian)) at 50 points")
    line("against SciPy's jvp, by hand", f"max difference {analytic:.1e}")
    line("the wave equation, its trace", f"max residual {wave:.1e}")


# --- Sunspots -------------------------------------------------------------------------


def fit_sunspots(quick: bool) -> None:
    record = sunspots.load()
    years, numbers = record
    heading(f"Sunspots, {years[0]:.0f} to {years[-1]:.0f} ({len(years)} years)")
    modulation(years - years.mean(), numbers)
    forecasts(numbers, 3 if quick else 9)


def modulation(t: np.ndarray, numbers: np.ndarray) -> None:
    demo = sunspots
    first, steps = demo.starts(16), 100
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        with recorder(run) as rec:
            (parameters, costs), seconds = timed(
                lambda: demo.fit(first, t, numbers, steps, rec)
            )
        recorded = rows_of(run, steps, costs) if rec else {}
    hc.barrier()  # the bar is complete before the next line is printed
    best = np.asarray(parameters)[int(np.argmin(costs))]
    plain = demo.fit_with_scipy(first, t, numbers)
    curve = jax.jit(lambda p: demo.curve(p, t, jnp, jv))(best)
    difference = close(curve, demo.curve(best, t, np, scipy.special.jv), 1e-9)
    close(np.min(costs) / plain.cost, 1.0, 1e-6)
    period, depth, long_period = np.abs(best[3:6])
    worse = close(np.abs(best[:6]), np.abs(plain.x[:6]), 0.1)

    print(
        f"\n  Slow modulation of the cycle: jit(vmap(scan)), 16 starts x {steps} steps"
    )
    line("cycle", f"{period:.2f} years")
    line("its phase swings once in", f"{long_period:.0f} years")
    line("its phase swings by", f"{depth:.2f} rad")
    error = np.sqrt(2 * np.min(costs) / len(t))
    line("root mean square error", f"{error:.1f} sunspots")
    line("  the mean of the record", f"{numbers.mean():.1f} sunspots")
    line("time, with compilation", f"{seconds:.2f} s")
    for name, value in recorded.items():  # none without pyarrow
        line(name, value)
    line("against plain SciPy, the curve", f"max difference {difference:.1e}")
    line("  least_squares, parameters", f"max difference {worse:.1e}")


def recorder(folder: Path) -> AbstractContextManager[Any]:
    """A recorder, or None without the package that it needs."""
    found = importlib.util.find_spec("pyarrow")
    return nullcontext() if found is None else hc.Recorder(folder)


def rows_of(run: Path, steps: int, costs: Any) -> dict[str, str]:
    """Reads the costs that the fit recorded; returns the lines to print about them."""
    table = hc.tools.read(run).table()
    count = len(costs)
    rows = table["cost"].to_numpy().reshape(steps, count)
    assert table["row"].to_pylist() == list(range(count)) * steps
    best = rows[:, int(np.argmin(costs))]
    assert best[-1] >= np.min(costs)
    near = int(np.argmax(best < 1.001 * best[-1]))
    return {
        "recorded while it ran": f"{table.num_rows} rows",
        "  the best start converged in": f"{near} steps",
    }


def forecasts(numbers: np.ndarray, count: int) -> None:
    """Forecasts with oscillators of increasing drive; the first has none."""
    demo = sunspots
    field = demo.magnetic_field(numbers)
    drive = np.linspace(0, 0.4, count)
    ahead, seconds = timed(lambda: demo.forecast(drive, field))
    difference = close(ahead, demo.forecast_without_jax(drive, field), 1e-9)

    def error(guess: np.ndarray) -> np.ndarray:
        """Root mean square, without the first 20 years, in which it settles."""
        miss = (guess - numbers[1:])[..., 20:]
        return np.sqrt(np.mean(miss**2, axis=-1))  # type: ignore[no-any-return]

    errors = error(np.asarray(ahead) ** 2)
    best = int(np.argmin(errors))
    assert errors[best] < error(numbers[:-1])
    steps = len(field) - 1
    print(
        "\n  Forecast a year ahead by a van der Pol oscillator, solved by solve_ivp and"
        f"\n  corrected each year: jit(vmap(scan)), {count} drives x {steps} years"
    )
    line(f"error (rms), best drive ({drive[best]:.2f})", f"{errors[best]:.1f} sunspots")
    line("  a harmonic oscillator's", f"{errors[0]:.1f}")
    line("  next year like this one", f"{error(numbers[:-1]):.1f}")
    line("time, with compilation", f"{seconds:.2f} s")
    line("against plain SciPy", f"max difference {difference:.1e}")
