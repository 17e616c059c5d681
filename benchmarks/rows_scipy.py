"""Rows: SciPy's minimizer of a JAX function, by hc.bridge.scipy and by jaxopt.

"SciPy" is scipy.optimize.minimize of the same function in NumPy, with its gradient by
hand, outside of any program. Without SciPy there are no rows; without jaxopt its case
is left out.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from benchmarks.harness import Case, Row, at_most, run_time

HAS_SCIPY = importlib.util.find_spec("scipy") is not None
HAS_JAXOPT = importlib.util.find_spec("jaxopt") is not None
SIZE = 10


def rosenbrock(x: Any, c: Any) -> Any:
    return (c * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def with_gradient(x: np.ndarray, c: np.ndarray) -> tuple[Any, np.ndarray]:
    far, near = x[1:] - x[:-1] ** 2, 1 - x[:-1]
    slope = np.zeros_like(x)
    slope[1:] += 2 * c * far
    slope[:-1] -= 4 * c * far * x[:-1] + 2 * near
    return (c * far**2 + near**2).sum(), slope


def minimum(quick: bool) -> dict[str, Case]:
    import scipy.optimize

    x0, c = jnp.zeros(SIZE, jnp.float32), jnp.float32(10)
    there, at = np.zeros(SIZE), np.float64(10)
    ours = hc.bridge.scipy.minimize(rosenbrock, method="BFGS")
    plain = lambda: scipy.optimize.minimize(with_gradient, there, at, "BFGS", True).x
    cases = {
        "hostcall": run_time(jax.jit(ours), x0, c),
        "SciPy": run_time(plain),
    }
    if HAS_JAXOPT:
        import jaxopt

        theirs = jaxopt.ScipyMinimize(fun=rosenbrock, method="BFGS")
        cases["jaxopt"] = run_time(lambda: theirs.run(x0, c).params)
    return cases


ROWS: tuple[Row, ...] = ()
if HAS_SCIPY:
    targets = (at_most(5, base="SciPy"),)
    if HAS_JAXOPT:
        targets += (at_most(1, base="jaxopt"),)
    ROWS = (Row(f"SciPy: a minimum over {SIZE} numbers, BFGS", targets, minimum),)
