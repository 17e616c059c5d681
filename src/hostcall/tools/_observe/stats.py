"""`hc.observe(stats=True)`: statistics of the values that each line computes.

A line's values are the floating results of its equations that other lines use, or that
the level returns. Each is reduced on the device to eight numbers. A level taps those of
all its values as one small array in each of its executions.

Six reductions serve an array whose values are all within float16's range. Only if some
are not, the others are computed too.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from hostcall._jax import Var, jaxprs
from hostcall._jax.rewriting import Insertion, Level
from hostcall.tools._observe import labels

# Beyond these, a rounded number is infinite, or zero.
_F16_MOST, _F16_LEAST = 65520.0, 2.0**-25
_BF16_MOST = 3.3961775e38
_COUNTS_AS_FLOAT = 1 << 24  # so many ones can be added up in float32


Key: TypeAlias = tuple[str, int, bool]  # file, line, whether backward


@dataclass(frozen=True)
class Stats:
    """The values of a line, in one pass.

    Attributes:
        file, line, text: the line, and its source text.
        backward: whether these are values of a backward pass.
        calls: how many arrays it has computed.
        size: how many numbers these had.
        min, max, mean, rms: of the finite numbers; NaN if there are none.
        zeros, nonfinite: the share of numbers that are 0; NaN or infinite.
        beyond_bf16, beyond_f16: the share of finite numbers that would be infinite in
            this type; for float16 also of those that would be 0, and are not.
    """

    file: str
    line: int
    text: str
    backward: bool
    calls: int
    size: int
    min: float
    max: float
    mean: float
    rms: float
    zeros: float
    nonfinite: float
    beyond_bf16: float
    beyond_f16: float


class Statistics:
    """Puts the reductions into programs, and adds up what they deliver."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # between the tap worker and readers
        # Min, max, sum, sum of squares, four counts; calls, size.
        self._rows: dict[Key, np.ndarray] = {}

    def look(self, level: Level) -> Iterator[Insertion]:
        found = list(_values_of_lines(level))
        if not found:
            return
        keys, variables = zip(*found, strict=True)
        sizes = [int(np.prod(v.aval.shape)) for v in variables]

        def add(found: np.ndarray) -> None:  # of shape (executions, values, 8)
            times, totals = len(found), _merged(found.astype(np.float64))
            with self._lock:
                for key, size, one in zip(keys, sizes, totals, strict=True):
                    row = np.array([*one, times, times * size])
                    both = np.stack([self._rows.get(key, _NOTHING), row])
                    self._rows[key] = _merged(both)

        def tap(*values: jax.Array) -> None:
            rows = list(map(_reduced, values))
            dtype = jnp.result_type(*rows)
            hc.tap(add, jnp.stack([row.astype(dtype) for row in rows]), batch=64)

        yield Insertion(tap, variables)

    def rows(self) -> list[Stats]:
        with self._lock:
            rows = sorted(self._rows.items())
        return [_stats(key, row) for key, row in rows]


# As a row of nothing.
_NOTHING = np.array([np.inf, -np.inf, *[0.0] * 8])


def _merged(rows: np.ndarray) -> np.ndarray:
    least, most, sums = rows[..., :1], rows[..., 1:2], rows[..., 2:]
    return np.concatenate([least.min(0), most.max(0), sums.sum(0)], -1)


def _stats(key: Key, row: np.ndarray) -> Stats:
    low, high, total, squares, zeros, bad, *beyond, calls, size = map(float, row)
    finite = max(size - bad, 1)
    numbers = low, high, total / finite, (squares / finite) ** 0.5
    if bad == size:
        numbers = (math.nan,) * 4
    shares = zeros / size, bad / size, *(n / finite for n in beyond)
    file, line, backward = key
    head = file, line, labels.text_in(file, line), backward, int(calls), int(size)
    return Stats(*head, *numbers, *shares)


def _values_of_lines(level: Level) -> Iterator[tuple[Key, Var]]:
    lines = [place.users_line for place in level.places]
    places = [(line.file, line.line) if line else None for line in lines]
    users = [*places, "results"]  # as `uses` numbers them
    for at, place in zip(level.places, places, strict=True):
        if place is None:
            continue
        eqn, backward = at.eqn, at.is_backward
        for var in eqn.outvars:
            leaves = any(users[n] != place for n, _ in level.uses.get(var, ()))
            if leaves and jaxprs.is_float(var) and var.aval.size:
                yield (*place, backward), var


# --- On the device --------------------------------------------------------------------


def _reduced(x: jax.Array) -> jax.Array:
    """min, max, sum, sum of squares, zeros, non-finite, beyond bfloat16, float16."""
    if jnp.iscomplexobj(x):
        x = jnp.abs(x)
    if x.dtype.itemsize < 4:
        x = x.astype(jnp.float32)
    least, most = x.min(), x.max()
    size = jnp.abs(x)

    def plain() -> list[jax.Array]:
        zeros = _count(x == 0)
        none = jnp.float32(0)
        small = _count(size <= _F16_LEAST) - zeros
        return [least, most, x.sum(), (x * x).sum(), zeros, none, none, small]

    def careful() -> list[jax.Array]:
        finite = jnp.isfinite(x)
        kept = jnp.where(finite, x, 0)
        beyond = finite & (size >= _BF16_MOST)
        f16 = finite & ((size >= _F16_MOST) | ((size <= _F16_LEAST) & (x != 0)))
        return [
            jnp.where(finite, x, jnp.inf).min(),
            jnp.where(finite, x, -jnp.inf).max(),
            kept.sum(),
            (kept * kept).sum(),
            *map(_count, (x == 0, ~finite, beyond, f16)),
        ]

    # A comparison with NaN is False.
    within = (least > -_F16_MOST) & (most < _F16_MOST)

    def stacked(numbers: Callable[[], list[jax.Array]]) -> jax.Array:
        return jnp.stack([number.astype(x.dtype) for number in numbers()])

    return jax.lax.cond(within, lambda: stacked(plain), lambda: stacked(careful))


def _count(flags: jax.Array) -> jax.Array:
    """How many are True. Floats are added up faster than integers on CPUs."""
    if flags.size < _COUNTS_AS_FLOAT:
        return flags.astype(jnp.float32).sum()
    return flags.sum().astype(jnp.float32)


# --- The table ------------------------------------------------------------------------

_HEADS = (
    *("", "line", "calls", "min", "max", "mean", "rms"),
    *("zeros", "non-finite", ">bf16", ">f16", "text"),
)
_TO_THE_LEFT = ("", "line", "text")


def table(rows: list[Stats]) -> str:
    """The rows as text."""
    columns = []
    for column in zip(_HEADS, *map(_cells, rows), strict=True):
        width = max(map(len, column))
        side = str.ljust if column[0] in _TO_THE_LEFT else str.rjust
        columns.append([side(cell, width) for cell in column])
    lines = zip(*columns, strict=True)
    return "\n".join("  ".join(cells).rstrip() for cells in lines)


def _cells(row: Stats) -> tuple[str, ...]:
    shares = row.zeros, row.nonfinite, row.beyond_bf16, row.beyond_f16
    return (
        "<-" * row.backward,
        f"{labels.short(row.file)}:{row.line}",
        str(row.calls),
        *(f"{n:.3g}" for n in (row.min, row.max, row.mean, row.rms)),
        *map(_percent, shares),
        row.text[:40],
    )


def _percent(share: float) -> str:
    if share == 0:
        return "-"
    return "<0.01%" if share < 1e-4 else f"{share:.2%}"
