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
        """Calls the function for the rows that are True, and puts its results back."""
        levels = self._levels
        # The batch axes of each array, of size 1 where its rows are the same.
        leads = [array.shape[:levels] for array in arrays]
        batch = np.broadcast_shapes(mask.shape, *leads)
        # For each batch axis, the indices of the rows that are True.
        rows = np.nonzero(np.broadcast_to(mask, batch))
        count = len(rows[0])
        results = [self._filled(i) for i in range(len(self._avals))]
        if count == 0:  # the function is not called
            return tuple(results)
        computed = 1  # one row serves all, if they share every argument
        taken = []
        for array, lead in zip(arrays, leads, strict=True):
            if any(size != 1 for size in lead):  # it differs from row to row
                array = self._rows_of(array, batch, rows)
                computed = count
            taken.append(array)
        (values,) = self._inner.rows([taken], site)
        lead_of_results = self._lead(computed)
        for i, (result, value) in enumerate(zip(results, values, strict=True)):
            row_shape = result.shape[levels:]
            # A function without arguments can't know of any batch.
            shape = lead_of_results + row_shape if arrays else row_shape
            leaf = self._results.shaped(i, value, shape)
            # NumPy repeats a single row for all that are assigned.
            result[rows] = leaf.reshape((computed, *row_shape))
        return tuple(results)

    def _lead(self, count: int) -> tuple[int, ...]:
        """The batch axes of so many rows: the first has them all."""
        return (count, *[1] * (self._levels - 1))

    def _rows_of(
        self, array: np.ndarray, batch: tuple[int, ...], rows: tuple[np.ndarray, ...]
    ) -> np.ndarray:
        """These rows of an array that has some batch axes."""
        row_shape = array.shape[self._levels :]
        whole = np.broadcast_to(array, batch + row_shape)
        taken: np.ndarray = whole[rows]
        lead = self._lead(len(taken))
        return taken.reshape(lead + row_shape)

    def _filled(self, number: int) -> np.ndarray:
        """A result in which each row has its fill."""
        aval = self._avals[number]
        fill = self._fills[number]
        dtype = np.dtype(aval.dtype)
        if fill is None:
            return np.zeros(aval.shape, dtype)
        row = np.frombuffer(fill, dtype)
        # One element stands for all of a row (spec.py).
        row_shape = () if row.size == 1 else aval.shape[self._levels :]
        return np.broadcast_to(row.reshape(row_shape), aval.shape).copy()


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
        mask, *arrays = row
        kept_rows = np.nonzero(self._full(0, mask))
        if len(kept_rows[0]) == 0:  # nothing is delivered
            return
        leaves = []
        for i, array in enumerate(arrays, start=1):
            if any(flags[i] for flags, _ in self._levels):  # it has a batch axis
                array = self._full(i, array)[kept_rows]
            leaves.append(array)
        token = context.kept_rows.set(kept_rows)  # for `hc.current().rows`
        try:
            self._inner.rows([leaves], site)
        finally:
            context.kept_rows.reset(token)

    def _full(self, number: int, array: np.ndarray) -> np.ndarray:
        """The array broadcast to all batch axes, the outermost first.

        Operand `number` has only some of them in front, for example of a (2,) and b
        (3,) the second: (3, 5) -> (1, 3, 5) -> (2, 3, 5).
        """
        batch = []
        lead = []
        axes_of_array = 0
        for flags, size in self._levels:
            has_axis = flags[number]
            axes_of_array += has_axis
            batch.append(size)
            # Size 1 for an axis that it lacks: NumPy then repeats it along that.
            lead.append(size if has_axis else 1)
        row_shape = array.shape[axes_of_array:]
        return np.broadcast_to(array.reshape((*lead, *row_shape)), (*batch, *row_shape))
