"""Derivatives along a direction by differences, for `hc.check`, with their error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

tree = jax.tree

# The first step, as a part of the arguments' size, and how much shorter each next one
# is. The last is where the rounding of float32, or of float64, is all that is seen.
_FIRST, _SHORTER = 1 / 64, 4.0
_STEPS = {False: 7, True: 10}


def slopes(
    g: Callable[..., Any], primals: Any, tangents: Any, wide: bool
) -> tuple[list[np.ndarray], list[float]]:
    """For each result its derivative along `tangents`, and how far that may be wrong.

    Central differences to shorter and shorter steps, extrapolated to none (Ridders,
    Accurate computation of F'(x) and F'(x)F''(x), 1982). No one step is right for all
    functions: one is too long for a fast one, the other too short for the rounding.

    Args:
        g: of arrays, gives a pytree of arrays.
        primals: where.
        tangents: in their structure, float0 where there is none.
        wide: all are of 64 bits.

    Returns:
        Zeros for integers. The error, of all elements together, is infinite where no
        difference was finite.

    Raises:
        Exception: what `g` raised, if it failed at all steps.
    """
    sizes = [float(jnp.abs(x).max()) for x in tree.leaves(primals) if x.size]
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
        values = tree.map(
            lambda x, t: x if t.dtype == jax.dtypes.float0 else x + sign * step * t,
            primals,
            tangents,
        )
        return [np.asarray(leaf) for leaf in tree.leaves(g(*values))]

    def slope(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            return np.zeros(a.shape)
        kind = np.complex128 if a.dtype.kind == "c" else np.float64
        return np.asarray((a.astype(kind) - b.astype(kind)) / (2 * step))

    return [slope(a, b) for a, b in zip(at(1.0), at(-1.0), strict=True)]


class _Extrapolated:
    """One result's differences, and the best that can be made of them."""

    def __init__(self, first: np.ndarray) -> None:
        self.best, self.error, self.done = first, np.inf, False
        self._row: list[np.ndarray] = []

    def add(self, difference: np.ndarray) -> None:
        """The difference to the next step."""
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
        # Shorter steps only add rounding.
        self.done = len(row) > 2 and _largest(row[-1] - self._row[-1]) > 2 * self.error
        self.done |= self.error == 0
        self._row = row


def _largest(x: np.ndarray) -> float:
    return float(np.max(np.abs(x), initial=0.0))
