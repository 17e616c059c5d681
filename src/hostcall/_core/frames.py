"""Lets go of arrays: of those in the frames of exceptions, and of those in cycles.

A frame in a traceback keeps its local variables alive, large arrays among them.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import traceback
from types import CellType, FrameType, FunctionType, TracebackType
from typing import Any

import numpy as np


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
        behind = [_cause_of(current), _context_of(current)]
        if issubclass(type(current), BaseExceptionGroup):
            behind += _members_of(current)
        todo += [e for e in behind if e is not None]
    return found


def own_tracebacks(
    exception: BaseException,
) -> list[tuple[BaseException, TracebackType]]:
    """An exception that has just left a callback, and its chain, with the tracebacks
    that they have now.

    The callback may run on the dispatching thread while that thread handles another
    exception. Python chains that one as a context, but its frames belong to the caller.
    """
    found = chained(exception, around=sys.exception())
    return [(e, trace) for e in found if (trace := traceback_of(e)) is not None]


# The values that Python itself keeps in an exception. Its class may have attributes of
# these names, which may be anything and may raise.
traceback_of = vars(BaseException)["__traceback__"].__get__
_cause_of = vars(BaseException)["__cause__"].__get__
_context_of = vars(BaseException)["__context__"].__get__
_arguments = vars(BaseException)["args"]
_members_of = vars(BaseExceptionGroup)["exceptions"].__get__


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


def keep_lines(error: BaseException, trace: TracebackType) -> None:
    """Gives an exception that has this traceback its lines in place of it.

    Each frame keeps the one that called it, with its values: a callback's outermost
    frame those of the program's callers, after they have ended too. So the lines are in
    frames of generators that never run, which hold nothing.
    """
    lines = None
    for frame, told in reversed([*traceback.walk_tb(trace)]):
        code, names = frame.f_code, frame.f_globals
        line = _line(told)
        bare = _BARE.replace(
            co_filename=code.co_filename,
            co_name=code.co_name,
            co_qualname=code.co_qualname,
            co_firstlineno=line,
        )
        # Of these, linecache finds the text of a line that is in no file.
        known: dict[str, Any]
        known = {k: names[k] for k in ("__name__", "__loader__") if k in names}
        made = FunctionType(bare, known)().gi_frame
        lines = TracebackType(lines, made, 0, line)  # it is at its first line
    if traceback_of(error) is trace:  # else somebody has raised it since
        BaseException.with_traceback(error, lines)


_BARE = (lambda: (yield)).__code__


def _line(told: int | None) -> int:
    """A line that code can have. Code that was made or changed may tell of none: None
    stands for that, or -1 (Python 3.11.2).
    """
    return max(told or 1, 1)


def let_go(error: BaseException) -> None:
    """Makes an exception, and all behind it, release the arrays of a failed call.

    The frames of its traceback hold the function's arguments. They lose their values;
    the traceback keeps its lines. Arrays in the exception's `args` become copies.
    """
    for current in chained(error, around=sys.exception()):
        trace = traceback_of(current)
        cells = [cell for frame in ended(trace) for cell in _own_cells(frame)]
        clear_values(trace)
        for cell in cells:
            with contextlib.suppress(ValueError):  # the cell is empty
                del cell.cell_contents
        given = _arguments.__get__(current)
        copies = [a.copy() if isinstance(a, np.ndarray) else a for a in given]
        if any(copy is not arg for copy, arg in zip(copies, given, strict=True)):
            _arguments.__set__(current, tuple(copies))


def _own_cells(frame: FrameType) -> list[CellType]:
    """The cells of variables that a frame shares with functions defined in it.

    Clearing a frame does not empty them. Cells of the frame's own outer variables are
    left out, since they belong to functions further out.
    """
    inside = gc.get_referents(frame)
    free = {
        id(cell)
        for f in inside
        if isinstance(f, FunctionType) and f.__code__ is frame.f_code
        for cell in f.__closure__ or ()
    }
    cells = [x for x in inside if isinstance(x, CellType)]
    return [cell for cell in cells if id(cell) not in free]


# --- Garbage collection that has really run, also without the GIL -------------------
#
# There, an object is freed by the thread that made it, if another thread drops the last
# reference: when that thread next runs Python code, or by the garbage collector.
# `gc.collect()` returns at once while another thread collects, and that collection may
# have passed the object already.

_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()
_TRIES = 1000  # of a millisecond; a bound in case somebody clears gc.callbacks


class _OfThread(threading.local):
    has_collected = False


_thread = _OfThread()


def _note(phase: str, _: Any) -> None:
    if phase == "stop":
        _thread.has_collected = True


if not _GIL:
    gc.callbacks.append(_note)


def collect() -> None:
    """Collects on this thread, after a collection of another thread has ended."""
    _thread.has_collected = _GIL
    gc.collect()
    for _ in range(_TRIES):
        if _thread.has_collected:
            return
        time.sleep(0.001)
        gc.collect()
