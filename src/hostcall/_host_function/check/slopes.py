"""Derivatives along a direction by differences, with their error, for `check`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

# The first step relative to the size of the arguments, how much shorter each next step
# is, and how many there are. At the last step only rounding of float32 (or float64) is
# left to see.
_FIRST, _SHORTER = 1 / 64, 4.0
_STEPS = {False: 7, True: 10}


def slopes(
    g: Callable[..., Any], primals: Any, tangents: Any, wide: bool
) -> tuple[list[np.ndarray], list[float]]:
    """The derivative of each result along `tangents`, and how wrong it may be.

    Takes central differences over shorter and shorter steps, and extrapolates them to
    step zero (Ridders, Accurate computation of F'(x) and F'(x)F''(x), 1982). No single
    step suits all functions: a long one is wrong for a function that varies fast, and a
    short one drowns in rounding.

    Args:
        g: a function of floating arrays that returns a list of such arrays.
        primals: the point.
        tangents: the direction.
        wide: whether all arrays have 64 bits.

    Returns:
        The derivatives, and one error for each, over all of its elements; infinite if
        no difference was finite.

    Raises:
        Exception: what `g` raised, if it failed at all steps.
    """
    sizes = [float(jnp.abs(x).max()) for x in primals if x.size]
    step = _FIRST * max([1.0, *sizes])
    found: list[_Extrapolated] = []
    for left in reversed(range(_STEPS[wide])):
        try:
            differences = _central(g, primals, tangents, step)
        except Exception:  # so far from the example it is perhaps not defined
            if not left and not found:
                raise
        else:
            found = found or [_Extrapolated(difference) for difference in differences]
            for one, difference in zip(found, differences, strict=True):
                one.add(difference)
            if all(one.done for one in found):
                break
        step /= _SHORTER
    return [one.best for one in found], [one.error for one in found]


def _central(
    g: Callable[..., Any], primals: Any, tangents: Any, step: float
) -> list[np.ndarray]:
    def at(sign: float) -> list[np.ndarray]:
        moved = (x + sign * step * t for x, t in zip(primals, tangents, strict=True))
        outs = map(np.asarray, g(*moved))
        return [x.astype(np.result_type(x.dtype, np.float64)) for x in outs]

    return [(a - b) / (2 * step) for a, b in zip(at(1.0), at(-1.0), strict=True)]


class _Extrapolated:
    """The differences of one result, and the best extrapolation so far."""

    def __init__(self, first: np.ndarray) -> None:
        self.best, self.error, self.done = first, np.inf, False
        self._row: list[np.ndarray] = []

    def add(self, difference: np.ndarray) -> None:
        """Adds the difference over the next, shorter step."""
        if self.done or not np.isfinite(difference).all():
            self._row = []
            return
        row, power = [difference], 1.0
        for before in self._row:
            power *= _SHORTER**2
            better = (power * row[-1] - before) / (power - 1)
            error = max(_largest(better - row[-1]), _largest(better - before))
            if error <= self.error:
                self.best, self.error = better, error
            row.append(better)
        # Once the estimates move apart again, shorter steps only add rounding.
        self.done = len(row) > 2 and _largest(row[-1] - self._row[-1]) > 2 * self.error
        self.done |= self.error == 0
        self._row = row


def _largest(x: np.ndarray) -> float:
    return float(np.max(np.abs(x), initial=0.0))
