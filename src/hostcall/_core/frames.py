"""Finds and empties the frames of exceptions that hostcall keeps.

A frame in a traceback keeps its local variables alive, large arrays among them.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from types import FrameType, TracebackType


def chained(
    exception: BaseException, around: BaseException | None = None
) -> list[BaseException]:
    """An exception and all behind it: causes, contexts, and members of groups.

    `around` is left out, and so are exceptions that are only behind `around`.
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
        if isinstance(current, BaseExceptionGroup):
            behind += current.exceptions
        todo += [e for e in behind if e is not None]
    return found


def own_tracebacks(exception: BaseException) -> tuple[TracebackType, ...]:
    """The tracebacks of an exception that has just left a callback, and of its chain.

    The callback may run on the dispatching thread while that thread handles another
    exception. Python chains that one as a context, but its frames belong to the caller.
    """
    traces = [e.__traceback__ for e in chained(exception, around=sys.exception())]
    return tuple(trace for trace in traces if trace is not None)


def ended(trace: TracebackType | None) -> list[FrameType]:
    """The frames of a traceback that have ended and can be cleared.

    Left out are running frames, and the frame of a generator that has caught the
    exception and waits at a `yield`: clearing it would close the generator (Python 3.11
    and 3.12). Only a frame object that has ended owns its values, and only then does
    the garbage collector find referents in it.
    """
    frames = (frame for frame, _ in traceback.walk_tb(trace))
    return [frame for frame in frames if gc.get_referents(frame)]


def clear_values(trace: TracebackType | None) -> None:
    """Clears the local variables of a traceback's ended frames; its lines stay."""
    for frame in ended(trace):
        with contextlib.suppress(RuntimeError):  # the frame is running after all
            frame.clear()
