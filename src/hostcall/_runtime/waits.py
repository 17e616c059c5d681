"""What Python code adds to the events of the engine (hc.monitor.events)."""

from __future__ import annotations

import itertools
from typing import ClassVar

from hostcall import _native

# The C++ enum EventKind (native/base/event.h), and those that Python code makes.
KINDS = ("call", "tap", "delivery", "team", "rows", "wait", "feed")
ROW, WAIT = KINDS.index("rows"), KINDS.index("wait")


class TraceRow:
    """A row of a trace for something that runs elsewhere, such as another process.

    Things on one row must not overlap, so each takes a free one. Lists and counts
    change in single steps, with the GIL and without, so there is no lock.
    """

    _free: ClassVar[list[int]] = []  # rows that nothing is on
    _numbers = itertools.count(1)

    def __init__(self, place: int, number: int, count: int) -> None:
        self._place, self._number, self._count = place, number, count
        self._start = _native.ticks()
        try:
            self._row = self._free.pop()
        except IndexError:
            self._row = next(self._numbers)

    def end(self) -> None:
        _native.note_event(
            ROW, self._place, self._start, self._number, self._count, self._row
        )
        self._free.append(self._row)
