"""`coalesce=`: one call of the function for calls of several devices and programs.

Each call puts its arrays into a batch (_runtime/coalesce.py). The function gets all
entries of a batch, stacked along a new axis in front, and returns results with that
axis, which go back to the entries.

One merged call of a function at a time. A function may write its results into a buffer
that it keeps, and return that:

  1. One thread's merged call returns the buffer.
  2. Before the results are copied out of it, another thread's batch, also one of other
     shapes, runs the function, which writes into the buffer.
  3. The first thread copies the second one's results.

So a function's runs, each with the copy of its results, take turns by a lock. They
would not get faster in parallel: the next batch fills meanwhile. A call in the function
itself must not wait for its own turn. It runs on a host client of a higher rung
(_runtime/host_device.py), and each rung has a lock of its own, so nothing waits in a
circle. Only a thread that the function starts and waits for, and that calls it again,
would wait for ever; that is said in the log. Coroutine functions have no turns: their
merged calls wait together.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hostcall._core import coerce
from hostcall._core.wait import SLICE
from hostcall._engine.info import CallInfo
from hostcall._engine.params.equation import Equation
from hostcall._runtime import tasks
from hostcall._runtime.coalesce import Meeting

logger = logging.getLogger("hostcall")

# Seconds after which a wait for a turn is named in the log.
_TOLD = 5.0

# Where the calls of each function meet, while a program with such a call exists. The
# key has the options and the shapes too, so that entries can be stacked.
_meetings: weakref.WeakValueDictionary[Any, Meeting] = weakref.WeakValueDictionary()
_lock = threading.Lock()  # two programs may be lowered at once


def _meeting_of(params: Equation, operands: Sequence[Any]) -> Meeting:
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


class _Turn:
    """Held by the thread that runs a function for a batch, until it has its results."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def taken(self, name: str) -> Iterator[None]:
        began, told = time.monotonic(), False
        while not self._lock.acquire(timeout=SLICE):
            if not told and time.monotonic() - began > _TOLD:
                told = True
                logger.warning(
                    "hostcall: a merged call of `%s` (coalesce=) has waited %g s for"
                    " another one to end. Merged calls of one function run one at a"
                    " time. If the function waits for a thread that calls it too, it"
                    " waits for ever: leave out coalesce=, or make that call on the"
                    " function's own thread",
                    name,
                    _TOLD,
                )
        try:
            yield
        finally:
            self._lock.release()


# The turns of each function on each rung, while a program with such a call exists.
_turns: weakref.WeakValueDictionary[Any, _Turn] = weakref.WeakValueDictionary()


def _turn_of(params: Equation, device: Any) -> _Turn:
    key = params.callback.fn, device
    with _lock:
        found = _turns.get(key)
        if found is None:
            found = _turns[key] = _Turn()
        return found


class Coalesced:
    """A call that is made together with others.

    Args:
        params, operands: of the equation.
        info: describes the call in messages.
        whole: the function, with one array for each leaf.
        converters: make the kind of array that the function gets.
        device: where JAX code in the function runs.
    """

    def __init__(
        self,
        params: Equation,
        operands: Sequence[Any],
        info: CallInfo,
        whole: Callable[..., Any],
        converters: Sequence[Callable[[Any], Any] | None],
        device: Any,
    ) -> None:
        self._params, self._info = params, info
        self._whole, self._converters = whole, converters
        self._meeting = _meeting_of(params, operands)
        self._turn = None if params.callback.awaits else _turn_of(params, device)

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
        turn = self._turn
        with contextlib.nullcontext() if turn is None else turn.taken(self._info.name):
            values = self._info.flatten(self._whole(*leaves))
            n = len(entries)
            outs = [self._leaf(i, value, n) for i, value in enumerate(values)]
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
