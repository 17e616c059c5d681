"""How long Python threads have waited for programs, for `hc.monitor.report()`."""

from __future__ import annotations

import threading

from hostcall import _native

# The C++ enum EventKind (native/base/event.h), and those that Python code makes.
KINDS = ("call", "tap", "delivery", "team", "rows", "wait", "feed")
ROW, WAIT = KINDS.index("rows"), KINDS.index("wait")

_lock = threading.Lock()
_waits: dict[str, tuple[int, float]] = {}


def add(what: str, start: int) -> None:
    """Counts a wait of this thread that began at `start`, in ticks, and ends now."""
    seconds = (_native.ticks() - start) * _native.tick_ns() * 1e-9
    with _lock:
        times, total = _waits.get(what, (0, 0.0))
        _waits[what] = times + 1, total + seconds
    _native.note_event(WAIT, 0, start, -1, 1)


def all_waits() -> dict[str, tuple[int, float]]:
    """What was waited in -> (how often, seconds)."""
    with _lock:
        return dict(_waits)


_free: list[int] = []  # rows of a trace that nothing is on
_rows = 0


class Lane:
    """A row of a trace for something that runs elsewhere, such as another process.

    Things on one row must not overlap, so each takes the first free one.
    """

    def __init__(self, place: int, number: int, count: int) -> None:
        global _rows
        self._place, self._number, self._count = place, number, count
        self._start = _native.ticks()
        with _lock:
            if not _free:
                _rows += 1
                _free.append(_rows)
            self._row = min(_free)
            _free.remove(self._row)

    def end(self) -> None:
        _native.note_event(
            ROW, self._place, self._start, self._number, self._count, self._row
        )
        with _lock:
            _free.append(self._row)
