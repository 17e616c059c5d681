"""Estimates the error of a finite difference from values of the function nearby.

Two things make the difference over a step h wrong: the function is no straight line,
and its values have noise, which is divided by the step. Noise is not only the rounding
of float64. A function that computes in float32, or a solver that stops at a tolerance,
has a million times more of it, and nothing says so beforehand. So noise is measured
(Moré and Wild, Estimating computational noise, 2011).

The function is called on a line through the point, at

    -1.5h  -h  -h/2  0  h/2  h  1.5h    a grid, for differences of differences
    and four places between             where a smooth function is predictable

- **Noise.** The fourth and higher differences of a smooth function on the grid are
  almost zero. So is the distance of its four values in between from the polynomial
  through the grid. Anything more is noise, or a kink, a jump or an oscillation, all of
  which are errors. The four places are irregular, so that an oscillation can't hide by
  having the period of the grid.
- **Curvature.** As long as h is small, the central differences over h/2 and 3h/2 differ
  from the one over h by known parts of its error (3/4 and 5/4).
- **No change at all.** The function may be constant, or rounded so coarsely that the
  whole line lies on one of its steps. If all values seen fit into float32 or less, the
  function may have that precision only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import factorial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from hostcall._host_function.comparisons import largest

# The grid and the places between its points, in units of the step.
GRID = (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5)
BETWEEN = (0.381966, -0.707107, 0.2113, -0.5477)

# The largest part of a difference of two values that noise may explain, in standard
# deviations of the noise. For evenly distributed values it is at most 2 sqrt(3); a bit
# more is allowed, since the deviation is estimated from ten values.
_NOISE = 4.0
# A distance -> (the results there, how far the argument really moved).
At: TypeAlias = Callable[[float], tuple[list[np.ndarray], np.ndarray | float]]
_EPS = float(np.finfo(np.float64).eps)


@dataclass
class Line:
    """The values of one result on a line through the point.

    Attributes:
        dtype: of the values as they were returned; they are widened here.
        grid, between: the values at GRID and at BETWEEN.
        offsets: how far the argument really moved, for each place of the grid.
    """

    dtype: np.dtype
    grid: np.ndarray
    between: np.ndarray
    offsets: list[np.ndarray | float]

    @property
    def size(self) -> np.ndarray:
        return np.asarray(abs(self.grid).max(0))

    @property
    def flat(self) -> np.ndarray:
        return np.asarray((self.grid == self.grid[3]).all(0))

    def central(self, k: int) -> np.ndarray:
        """The central difference over k half steps to each side."""
        rise = self.grid[3 + k] - self.grid[3 - k]
        return np.asarray(rise / (self.offsets[3 + k] - self.offsets[3 - k]))


def lines(at: At, step: float) -> list[Line]:
    """The lines of all results of a function; `step` is the unit of the grid."""
    on_grid = [at(place * step) for place in GRID]
    between = [at(place * step) for place in BETWEEN]
    first_results, _ = on_grid[0]
    of_results = []
    for i, first in enumerate(first_results):
        line = Line(
            dtype=first.dtype,
            grid=_wide([results[i] for results, _ in on_grid]),
            between=_wide([results[i] for results, _ in between]),
            offsets=[offset for _, offset in on_grid],
        )
        of_results.append(line)
    return of_results


def _wide(values: list[np.ndarray]) -> np.ndarray:
    """The values as one array, in 64 bits for each part of a number."""
    kinds = {value.dtype.kind for value in values}
    dtype = np.complex128 if "c" in kinds else np.float64
    wide_values = [value.astype(dtype) for value in values]
    return np.stack(wide_values)


def central_error(eps: float | np.ndarray, line: Line) -> np.ndarray:
    """The error of `line.central(2)`; for `eps` see `eps_of`."""
    slope = line.central(2)
    # The error of a central difference grows with the square of its step, so those over
    # h/2 and 3h/2 differ from this one by 3/4 and 5/4 of its error.
    from_half = abs(slope - line.central(1)) * 4 / 3
    from_three_halves = abs(line.central(3) - slope) * 4 / 5
    bent = np.maximum(from_half, from_three_halves)
    # A kink between two places of the grid shows in the fourth difference.
    (fourth_difference,) = np.diff(line.grid[1:6], 4, axis=0)
    kinked = abs(fourth_difference) / 2
    rounded = _EPS * line.size
    # What is wrong with the values, a difference divides by the step.
    step = (line.offsets[5] - line.offsets[1]) / 2
    wrong_values = _noise_of(line) + kinked + rounded
    error = bent + wrong_values / step
    # If the line is flat: the values' relative rounding, over the whole line.
    width = line.offsets[-1] - line.offsets[0]
    unseen = abs(eps * line.size / width)
    error += np.where(line.flat, unseen, 0)
    # NaN says that nothing is known, as where the function is infinite.
    is_unknown = np.isnan(error)
    return np.where(is_unknown, np.inf, error)


def _noise_of(line: Line) -> np.ndarray:
    """How much of a difference of two values a smooth function can't explain."""
    deviation = np.zeros(line.grid.shape[1:])
    for order in range(4, len(GRID)):
        # The variance of a difference of this order, as a multiple of one value's.
        times = factorial(2 * order) / factorial(order) ** 2
        squares = abs(np.diff(line.grid, order, axis=0)) ** 2
        by_differences = np.sqrt(squares.mean(0) / times)
        deviation = np.maximum(deviation, by_differences)
    for value, weights in zip(line.between, _WEIGHTS, strict=True):
        foreseen = np.tensordot(weights, line.grid[1:6], 1)
        # The value's own noise, and that of the grid's values as they are weighted.
        times = np.hypot(1, np.linalg.norm(weights))
        by_prediction = abs(value - foreseen) / times
        deviation = np.maximum(deviation, by_prediction)
    return _NOISE * deviation


def eps_of(line: Line) -> float:
    """The relative rounding of a result, by its dtype and its values on this line.

    The dtype is not enough: a function that computes in float32 may return float64.
    """
    dtype = line.dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    if dtype not in (np.float64, np.complex128):
        return float(jnp.finfo(dtype).eps)
    values = np.concatenate([line.grid, line.between])
    components = np.stack([values.real, values.imag])
    is_constant = bool((values == values[0]).all())
    # A single value is too little evidence for float16.
    candidates = (np.float32,) if is_constant else (np.float16, np.float32)
    with np.errstate(over="ignore"):  # a value may be infinite as a float16
        for dtype_narrow in candidates:
            narrowed = components.astype(dtype_narrow)
            if np.array_equal(narrowed, components, equal_nan=True):
                return float(np.finfo(dtype_narrow).eps)
    return 0.0


# For each place between, the weights of the grid's inner five values in the value there
# of the polynomial through them.
_POWERS = np.vander(GRID[1:6], increasing=True).T
_WEIGHTS = [np.linalg.solve(_POWERS, np.power(place, range(5))) for place in BETWEEN]


# --- The best of several steps --------------------------------------------------------


class Slope(NamedTuple):
    """The slope of one result, by differences.

    Attributes:
        value: for each element.
        error: how wrong it may be, at the worst element.
    """

    value: np.ndarray
    error: float

    def is_exact(self, share: float) -> bool:
        """Whether the error is at most this share of the slope."""
        return self.error <= share * largest(self.value)


def best_slopes(
    code: Callable[..., Sequence[jax.Array]],
    primals: Sequence[jax.Array],
    tangents: Sequence[jax.Array],
    step_count: int,
    share: float,
) -> list[Slope]:
    """For each result of `code` its slope along the tangents, by that one of several
    steps which is least wrong.

    Args:
        code: a function of arrays.
        primals: where.
        tangents: in which direction.
        step_count: how many steps to try, each a quarter of the one before.
        share: no further step is tried if all errors are at most this share.
    """

    def at(distance: float) -> tuple[list[np.ndarray], float]:
        moved = [
            primal + distance * tangent
            for primal, tangent in zip(primals, tangents, strict=True)
        ]
        return list(map(np.asarray, code(*moved))), distance

    # In proportion to the largest number, beside which a smaller step is rounded away.
    step = max([1.0, *map(largest, primals)]) / 16
    best: list[Slope] = []
    varies: list[np.ndarray] = []  # where a step so far saw each result change
    for steps_left in reversed(range(step_count)):
        step /= 4
        try:
            of_results = lines(at, step)
        except Exception:  # so far from the example it is perhaps not defined
            if not steps_left and not best:
                raise
            continue
        # Where a longer step saw a change, none now is rounding.
        changes = [~line.flat for line in of_results]
        varies = list(map(np.logical_or, varies or changes, changes))
        slopes: list[Slope] = []
        for line, changed in zip(of_results, varies, strict=True):
            errors = central_error(eps_of(line) * changed, line)
            slopes.append(Slope(line.central(2), largest(errors)))
        best = list(map(_less_wrong, slopes, best or slopes))
        if all(slope.is_exact(share) for slope in best):
            break
    return best


def _less_wrong(first: Slope, second: Slope) -> Slope:
    return second if second.error < first.error else first
