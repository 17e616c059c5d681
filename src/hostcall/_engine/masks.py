"""`where=` for functions that take a whole batch: removes the rows that are False.

With "expand_dims" and "broadcast_all" the function sees the batch axes itself, in
front. The rows where the mask is True are stacked along the first of these axes; the
other batch axes keep size 1. The results are then put back into their rows:

    mask (4,)         True  False  True  True
    argument (4, 3)   row 0        row 2 row 3   ->  (3, 3)
    unbatched (1, 3)                             ->  (1, 3)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hostcall._core import coerce
from hostcall._engine.info import CallInfo
from hostcall._engine.params.equation import Equation
from hostcall._runtime import context


class CompressedCall:
    """A call without its False rows.

    Called with (mask, *arrays). Returns one full array for each leaf of the result.
    """

    def __init__(
        self,
        params: Equation,
        info: CallInfo,
        whole: Callable[..., Any],
    ) -> None:
        self._params, self._info, self._whole = params, info, whole

    def __call__(self, mask: np.ndarray, *arrays: np.ndarray) -> tuple[Any, ...]:
        params, levels = self._params, self._params.levels
        batch = self._batch(mask, arrays)
        rows = np.nonzero(np.broadcast_to(mask, batch))
        count = len(rows[0])
        outs = [self._filled(i) for i in range(len(params.avals))]
        if count == 0:
            return tuple(outs)
        ones = (1,) * (levels - 1)
        # If all rows share every argument, one computed row serves them all.
        wide = any(size != 1 for array in arrays for size in array.shape[:levels])
        seen = count if wide else 1
        taken = []
        for array in arrays:
            lead, rest = array.shape[:levels], array.shape[levels:]
            if any(size != 1 for size in lead):
                full = np.broadcast_to(array, batch + rest)
                array = full[rows].reshape((count, *ones, *rest))
            taken.append(array)
        values = self._info.flatten(self._whole(*taken))
        for i, (out, value) in enumerate(zip(outs, values, strict=True)):
            rest = params.avals[i].shape[levels:]
            want = (seen, *ones, *rest) if arrays else rest
            leaf = self._leaf(i, value, want)
            out[rows] = leaf.reshape((seen, *rest))
        return tuple(outs)

    def _batch(self, mask: np.ndarray, arrays: tuple[np.ndarray, ...]) -> Any:
        levels = self._params.levels
        return np.broadcast_shapes(
            mask.shape, *(array.shape[:levels] for array in arrays)
        )

    def _filled(self, number: int) -> np.ndarray:
        aval, fill = self._params.avals[number], self._params.callback.fills[number]
        dtype = np.dtype(aval.dtype)
        if fill is None:
            return np.zeros(aval.shape, dtype)
        row = np.frombuffer(fill, dtype)  # of a row, or one element for all (spec.py)
        row = row.reshape(() if row.size == 1 else aval.shape[self._params.levels :])
        return np.broadcast_to(row, aval.shape).copy()

    def _leaf(self, number: int, value: Any, shape: tuple[int, ...]) -> np.ndarray:
        info = self._info
        return coerce.coerce(
            value,
            self._params.avals[number].dtype,
            shape,
            lambda: info.result(number),
            lambda got: info.shape_hint(number, shape, got),
        )


class CompressedTap:
    """A tap of a batch without its False rows.

    Called with (mask, *arrays). An array with a batch axis arrives with one axis in
    front, for the remaining rows in row order. Any other array arrives unchanged.

    Args:
        levels: for each vmap, the outermost first: whether each operand has its axis,
            and its size.
        whole: the function.
    """

    def __init__(
        self,
        levels: Sequence[tuple[Sequence[bool], int]],
        whole: Callable[..., Any],
    ) -> None:
        self._levels, self._whole = levels, whole

    def __call__(self, mask: np.ndarray, *arrays: np.ndarray) -> None:
        rows = np.nonzero(self._full(0, mask))
        if not len(rows[0]):
            return
        leaves = []
        for i, array in enumerate(arrays, start=1):
            own = any(flags[i] for flags, _ in self._levels)
            leaves.append(self._full(i, array)[rows] if own else array)
        with context.only_rows(rows):
            self._whole(*leaves)

    def _full(self, number: int, array: np.ndarray) -> np.ndarray:
        """The array broadcast to all batch axes, the outermost first."""
        levels = self._levels
        has = [flags[number] for flags, _ in levels]
        rest = array.shape[sum(has) :]
        lead = tuple(size if f else 1 for f, (_, size) in zip(has, levels, strict=True))
        batch = tuple(size for _, size in levels)
        return np.broadcast_to(array.reshape(lead + rest), batch + rest)
