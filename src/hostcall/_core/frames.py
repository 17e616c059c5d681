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

from hostcall import _jax


def chained(
    exception: BaseException, around: BaseException | None = None
) -> list[BaseException]:
    """An exception and all behind it: causes, contexts, and members of groups.

    `around` is left out, and so are exceptions that are only behind `around`.
    """
    exceptions: list[BaseException] = []
    stack = [exception]
    ids_seen = {id(around)}
    while stack:
        current = stack.pop()
        if id(current) in ids_seen:  # a chain may lead back to itself
            continue
        ids_seen.add(id(current))
        exceptions.append(current)
        behind = [_cause_of(current), _context_of(current)]
        if issubclass(type(current), BaseExceptionGroup):
            behind += _members_of(current)
        stack += [error for error in behind if error is not None]
    return exceptions


def own_tracebacks(
    exception: BaseException,
) -> list[tuple[BaseException, TracebackType]]:
    """An exception that has just left a callback, and its chain, with the tracebacks
    that they have now.

    The callback may run on the dispatching thread while that thread handles another
    exception. Python chains that one as a context, but its frames belong to the caller.
    """
    errors = chained(exception, around=sys.exception())
    pairs = [(error, traceback_of(error)) for error in errors]
    return [(error, trace) for error, trace in pairs if trace is not None]


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
    for frame, line_or_none in reversed([*traceback.walk_tb(trace)]):
        code = frame.f_code
        line = _line(line_or_none)
        bare = _BARE.replace(
            co_filename=code.co_filename,
            co_name=code.co_name,
            co_qualname=code.co_qualname,
            co_firstlineno=line,
        )
        # Of these, linecache finds the text of a line that is in no file.
        names = frame.f_globals
        source: dict[str, Any] = {
            name: names[name] for name in ("__name__", "__loader__") if name in names
        }
        bare_frame = FunctionType(bare, source)().gi_frame
        lines = TracebackType(lines, bare_frame, 0, line)  # it is at its first line
    if traceback_of(error) is trace:  # else somebody has raised it since
        # Not `error.with_traceback`, which its class may have written.
        BaseException.with_traceback(error, lines)


_BARE = (lambda: (yield)).__code__


def _line(line_or_none: int | None) -> int:
    """A line that code can have. Code that was made or changed may have none: None
    stands for that, or -1 (Python 3.11.2).
    """
    return max(line_or_none or 1, 1)


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
        arguments = _arguments.__get__(current)
        if any(isinstance(argument, np.ndarray) for argument in arguments):
            copies = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
            _arguments.__set__(current, tuple(copies))


def _own_cells(frame: FrameType) -> list[CellType]:
    """The cells of variables that a frame shares with functions defined in it.

    Clearing a frame does not empty them. Cells of the frame's own outer variables are
    left out, since they belong to functions further out.
    """
    referents = gc.get_referents(frame)
    # A frame refers to its function, whose closure has the outer ones.
    outer = {
        id(cell)
        for function in referents
        if isinstance(function, FunctionType) and function.__code__ is frame.f_code
        for cell in function.__closure__ or ()
    }
    cells = [referent for referent in referents if isinstance(referent, CellType)]
    return [cell for cell in cells if id(cell) not in outer]


# --- Views of lent memory that only seem to be kept -----------------------------------
#
# After a call the engine counts the references to each lent array. One that is left may
# be a view that the function has kept, or be held by what nobody can reach any more:
# the frames of an error, jaxlib's list of arrays to release, a reference cycle. Only
# what is still held after all of that was released is kept.
#
# A whole collection takes 60 ms in a process with JAX, and almost each cycle that holds
# a view was made during the call. So the youngest objects are collected first.

_HAS_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()
# Without a GIL each collection is a whole one.
_GENERATIONS = (0, 1, 2) if _HAS_GIL else (2,)


def release_views(step: int, error: BaseException | None) -> bool:
    """Releases, in steps from 0, what may hold a lent array though nobody can reach it.

    Args:
        step: the cheap ones come first, so the caller looks after each what is held.
        error: what the function raised.

    Returns:
        Whether there is another step.
    """
    assert 0 <= step <= len(_GENERATIONS), "the caller stops where this returns False"
    if step == 0:
        if error is not None:
            let_go(error)
    else:
        collect(_GENERATIONS[step - 1])
    # A jax.Array over lent memory gives its reference to jaxlib's list when it dies.
    _jax.release_arrays()
    return step < len(_GENERATIONS)


# `gc.collect()` returns at once while another thread collects. That collection may have
# passed an object already, and has not freed what it has found. So a collection counts
# only if it has run on the calling thread, which gc.callbacks tell.

# Seconds, for a finalizer in the other thread's collection that never ends.
_WAIT = 10.0


class _Collections(threading.local):
    """The calling thread's collections."""

    is_running = False
    oldest = -1  # the oldest generation that was collected since this was last reset


_collections = _Collections()


def _note(phase: str, about: dict[str, int]) -> None:
    _collections.is_running = phase == "start"
    if phase == "stop":
        _collections.oldest = max(_collections.oldest, about["generation"])


gc.callbacks.append(_note)


def collect(generation: int = 2) -> None:
    """Collects on this thread, after a collection of another thread has ended."""
    if _collections.is_running:
        # A finalizer of this thread's collection made the call. No other one can begin
        # before it returns.
        return
    assert generation >= 0, "-1 stands for none"
    _collections.oldest = -1
    deadline = time.monotonic() + _WAIT
    while True:
        if _note not in gc.callbacks:  # somebody has cleared the list
            gc.callbacks.append(_note)
        gc.collect(generation)
        if _collections.oldest >= generation or time.monotonic() > deadline:
            return
        time.sleep(0.001)
