"""How long Python threads have waited for programs, for `hc.monitor.report()`."""

from __future__ import annotations

import threading

from hostcall import _native
from hostcall._core.process import Owned

# The C++ enum EventKind (native/base/event.h), and those that Python code makes.
KINDS = ("call", "tap", "delivery", "team", "rows", "wait", "feed")
ROW, WAIT = KINDS.index("rows"), KINDS.index("wait")


class _Waits(Owned):
    """`lock` protects the rest."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.of: dict[str, tuple[int, float]] = {}
        self.free: list[int] = []  # rows of a trace that nothing is on
        self.rows = 0  # how many there are
        super().__init__()


_waits = _Waits()


def add(what: str, start: int) -> None:
    """Counts a wait of this thread that began at `start`, in ticks, and ends now."""
    seconds = (_native.ticks() - start) * _native.tick_ns() * 1e-9
    with _waits.lock:
        times, total = _waits.of.get(what, (0, 0.0))
        _waits.of[what] = times + 1, total + seconds
    _native.note_event(WAIT, 0, start, -1, 1)


def all_waits() -> dict[str, tuple[int, float]]:
    """What was waited in -> (how often, seconds)."""
    with _waits.lock:
        return dict(_waits.of)


class Lane:
    """A row of a trace for something that runs elsewhere, such as another process.

    Things on one row must not overlap, so each takes the first free one.
    """

    def __init__(self, place: int, number: int, count: int) -> None:
        self._place, self._number, self._count = place, number, count
        self._start = _native.ticks()
        with _waits.lock:
            if not _waits.free:
                _waits.rows += 1
                _waits.free.append(_waits.rows)
            self._row = min(_waits.free)
            _waits.free.remove(self._row)

    def end(self) -> None:
        _native.note_event(
            ROW, self._place, self._start, self._number, self._count, self._row
        )
        with _waits.lock:
            _waits.free.append(self._row)
