"""`where=` for functions that take a whole batch: removes the rows that are False.

With "expand_dims" and "broadcast_all" the function sees the batch axes itself, in
front. The rows where the mask is True are stacked along the first of these axes; the
other batch axes keep size 1. The results are then put back into their rows:

    mask (4,)         True  False  True  True
    argument (4, 3)   row 0        row 2 row 3   ->  (3, 3)
    unbatched (1, 3)                             ->  (1, 3)

The layers of this file take (mask, *arrays) as a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hostcall._policies.layer import Body, Choices, Flat, Inner, Leaves, RowContext
from hostcall._runtime import context


class Unmasked:
    """A call without its False rows. Returns one full array for each result."""

    def __init__(self, inner: Inner, choices: Choices) -> None:
        self._inner = inner
        self._results = choices.results
        self._levels = choices.levels
        self._avals = choices.avals
        self._fills = choices.callback.fills

    def rows(self, rows: Sequence[Leaves], site: RowContext) -> list[Flat]:
        return [self._batch(row[0], row[1:], site) for row in rows]

    def _batch(self, mask: np.ndarray, arrays: Leaves, site: RowContext) -> Flat:
        levels = self._levels
        leads = [array.shape[:levels] for array in arrays]
        batch = np.broadcast_shapes(mask.shape, *leads)
        rows = np.nonzero(np.broadcast_to(mask, batch))
        outs = [self._filled(i) for i in range(len(self._avals))]
        count = len(rows[0])
        if count == 0:
            return tuple(outs)
        ones = (1,) * (levels - 1)
        taken = []
        for array, lead in zip(arrays, leads, strict=True):
            if any(size != 1 for size in lead):
                rest = array.shape[levels:]
                full = np.broadcast_to(array, batch + rest)
                array = full[rows].reshape((count, *ones, *rest))
            taken.append(array)
        (values,) = self._inner.rows([taken], site)
        # If all rows share every argument, one computed row serves them all.
        seen = count if any(size != 1 for lead in leads for size in lead) else 1
        for i, (out, value) in enumerate(zip(outs, values, strict=True)):
            rest = out.shape[levels:]
            want = (seen, *ones, *rest) if arrays else rest
            leaf = self._results.shaped(i, value, want)
            out[rows] = leaf.reshape((seen, *rest))
        return tuple(outs)

    def _filled(self, number: int) -> np.ndarray:
        aval = self._avals[number]
        fill = self._fills[number]
        dtype = np.dtype(aval.dtype)
        if fill is None:
            return np.zeros(aval.shape, dtype)
        row = np.frombuffer(fill, dtype)  # of a row, or one element for all (spec.py)
        row = row.reshape(() if row.size == 1 else aval.shape[self._levels :])
        return np.broadcast_to(row, aval.shape).copy()


class UnmaskedTap:
    """A tap of a batch without its False rows.

    An array with a batch axis arrives with one axis in front, for the remaining rows in
    row order. Any other array arrives unchanged.

    Args:
        inner: delivers the batch.
        batch: see `Choices`.
    """

    def __init__(
        self, inner: Body, batch: Sequence[tuple[Sequence[bool], int]]
    ) -> None:
        self._inner = inner
        self._levels = batch

    def rows(self, rows: Sequence[Leaves], site: RowContext) -> list[Any]:
        for row in rows:
            self._deliver(row, site)
        return [()] * len(rows)

    def _deliver(self, row: Leaves, site: RowContext) -> None:
        kept = np.nonzero(self._full(0, row[0]))
        if not len(kept[0]):
            return
        leaves = []
        for i, array in enumerate(row[1:], start=1):
            own = any(flags[i] for flags, _ in self._levels)
            leaves.append(self._full(i, array)[kept] if own else array)
        before = context.kept_rows.set(kept)
        try:
            self._inner.rows([leaves], site)
        finally:
            context.kept_rows.reset(before)

    def _full(self, number: int, array: np.ndarray) -> np.ndarray:
        """The array broadcast to all batch axes, the outermost first."""
        levels = self._levels
        has = [flags[number] for flags, _ in levels]
        rest = array.shape[sum(has) :]
        lead = tuple(size if f else 1 for f, (_, size) in zip(has, levels, strict=True))
        batch = tuple(size for _, size in levels)
        return np.broadcast_to(array.reshape(lead + rest), batch + rest)
