"""Frames of exceptions that hostcall keeps: whose they are, and emptying them."""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from types import FrameType, TracebackType


def chained(
    exception: BaseException, around: BaseException | None = None
) -> list[BaseException]:
    """An exception and those behind it (causes, contexts, members of groups), without
    `around` and what is behind that alone.
    """
    found: list[BaseException] = []
    todo, seen = [exception], {id(around)}
    while todo:
        current = todo.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        found.append(current)
        behind = [current.__cause__, current.__context__]
        behind += getattr(current, "exceptions", ())
        todo += [e for e in behind if e is not None]
    return found


def own_tracebacks(exception: BaseException) -> tuple[TracebackType, ...]:
    """Those of an exception that has just left a callback, and of those behind it.

    The callback may run on the thread that dispatched it while that thread handles an
    exception of its own. Python chains that one too; its frames are not the callback's.
    """
    traces = [e.__traceback__ for e in chained(exception, around=sys.exception())]
    return tuple(trace for trace in traces if trace is not None)


def ended(trace: TracebackType | None) -> list[FrameType]:
    """The frames of a traceback that have ended.

    Not those that run, nor that of a generator that has caught the exception and waits
    at a `yield`: Python (3.11, 3.12) would close it where its frame is cleared. Only
    frames that have ended hold their values themselves, and show them to the collector.
    """
    frames = (frame for frame, _ in traceback.walk_tb(trace))
    return [frame for frame in frames if gc.get_referents(frame)]


def clear_values(trace: TracebackType | None) -> None:
    """Empties the frames of a traceback that have ended. Its lines stay."""
    for frame in ended(trace):
        with contextlib.suppress(RuntimeError):  # it is running
            frame.clear()
