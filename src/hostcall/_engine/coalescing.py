"""`coalesce=`: one call of the function for calls of several devices and programs.

Each call puts its arrays into a batch (_runtime/coalesce.py). The function gets all
entries of a batch, stacked along a new axis in front, and returns results with that
axis, which go back to the entries.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hostcall._core import coerce
from hostcall._engine.info import CallInfo
from hostcall._engine.params.call import CallParams
from hostcall._runtime import tasks
from hostcall._runtime.coalesce import Meeting

# Where the calls of each function meet, while a program with such a call exists. The
# key has the options and the shapes too, so that entries can be stacked.
_meetings: weakref.WeakValueDictionary[Any, Meeting] = weakref.WeakValueDictionary()
_lock = threading.Lock()  # two programs may be lowered at once


def _meeting_of(params: CallParams, operands: Sequence[Any]) -> Meeting:
    callback = params.callback
    assert callback.coalesce is not None
    own = operands[1:] if params.masked else operands
    batched = params.batched[1:] if params.masked else params.batched
    flags = batched or ((),) * len(own)
    shapes = tuple(
        (operand.shape[sum(axes) :], str(operand.dtype))
        for operand, axes in zip(own, flags, strict=True)
    )
    with _lock:
        found = _meetings.get((callback, shapes))
        if found is None:
            found = _meetings[callback, shapes] = Meeting(*callback.coalesce)
        return found


class Coalesced:
    """A call that is made together with others.

    Args:
        params, operands: of the equation.
        info: describes the call in messages.
        whole: the function, with one array for each leaf.
        converters: make the kind of array that the function gets.
    """

    def __init__(
        self,
        params: CallParams,
        operands: Sequence[Any],
        info: CallInfo,
        whole: Callable[..., Any],
        converters: Sequence[Callable[[Any], Any] | None],
    ) -> None:
        self._params, self._info = params, info
        self._whole, self._converters = whole, converters
        self._meeting = _meeting_of(params, operands)

    def __call__(self, *arrays: np.ndarray) -> Any:
        (value,) = self.rows([arrays], [])
        return value

    def rows(self, rows: list[Any], _: list[Any]) -> list[Any]:
        """The runner of a batch: each row is an entry."""
        callback = self._params.callback
        if callback.awaits:  # another thread may make the call, and need the loop
            tasks.refuse_on_loop(callback.function)
        return self._meeting.call(rows, self._together)

    def _together(self, entries: list[Any]) -> Sequence[Any]:
        leaves = []
        columns = zip(*entries, strict=True)
        for convert, column in zip(self._converters, columns, strict=True):
            stacked = np.stack(column)
            leaves.append(stacked if convert is None else convert(stacked))
        values = self._info.flatten(self._whole(*leaves))
        outs = [self._leaf(i, value, len(entries)) for i, value in enumerate(values)]
        fill = self._params.callback.results.treedef.unflatten
        return [fill(row) for row in zip(*outs, strict=True)]

    def _leaf(self, number: int, value: Any, count: int) -> np.ndarray:
        aval = self._params.avals[number]

        def where() -> str:
            path = self._params.callback.results.paths()[number]
            return f"{path} of `{self._info.name}`, called for {count} with coalesce=,"

        array = coerce.coerce(value, aval.dtype, (count, *aval.shape), where)
        # The function may write its buffer again before all entries have been read.
        return array.copy()
