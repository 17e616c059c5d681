"""Opens a debugger in a callback, as if lines of the user's program had called it.

A debugger shows frames: a file, a line, and the names in it. When a callback runs, the
frames in which the user wrote it are long gone. So they are noted while JAX traces, and
built again on the host: for each there is a code object with the file, the function's
name and the line, and it calls the next one. They call through C (`exec` in a
`functools.partial`), so no frame of hostcall lies between them.
"""

from __future__ import annotations

import bdb
import builtins
import collections
import functools
import os
import pdb
import sys
import threading
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax

import hostcall

_SKIPPED = tuple(
    os.path.dirname(os.path.abspath(str(package.__file__))) + os.sep
    for package in (hostcall, jax)
)
_LINES_AT_MOST = 32  # of a test runner or a server, the innermost are enough


@dataclass(frozen=True)
class UserLine:
    """A frame of the user's, as it was while JAX traced.

    Attributes:
        file, function: as in its code object.
        first: the first line of the function.
        line: the line that was running.
        names: the globals of its module. The locals are left out: they were tracers.
    """

    file: str
    function: str
    first: int
    line: int
    names: dict[str, Any] = field(compare=False, repr=False)


Lines: TypeAlias = tuple[UserLine, ...]


def users_lines() -> Lines:
    """The frames of the calling thread outside of hostcall and JAX, innermost first."""
    found: list[UserLine] = []
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        code = frame.f_code
        if not code.co_filename.startswith(_SKIPPED) and len(found) < _LINES_AT_MOST:
            at = code.co_filename, code.co_qualname, min(code.co_firstlineno, line)
            found.append(UserLine(*at, line, frame.f_globals))
    return tuple(found)


def _run_in(lines: Lines, names: dict[str, Any], opens: Callable[[], object]) -> None:
    """Calls `opens` in the innermost of these frames, with these locals."""
    # Debuggers up to Python 3.12 stop at the next line that begins, not in the call
    # that opens them. So there is a loop on the line: it opens the debugger, goes back
    # to the line's beginning, where the debugger stops, and does nothing more.
    hidden: dict[str, Any] = {
        "__more__": iter((True, True, False)).__next__,
        "__call__": iter((opens, int)).__next__,
    }
    source = "while __more__(): __call__()()"
    for line in lines:
        code = compile("\n" * (line.line - line.first) + source, line.file, "exec")
        code = code.replace(
            co_firstlineno=line.first,
            co_name=line.function.rpartition(".")[2],
            co_qualname=line.function,
        )
        # The hidden names are builtins of this frame, so that no list of names shows
        # them.
        around = {**line.names, "__builtins__": {**vars(builtins), **hidden}}
        step = functools.partial(exec, code, around, names)
        source, names, hidden = "__inner__()", {}, {"__inner__": step}
    step()


# Held while a debugger is open: two that read the same terminal would take each other's
# lines. Reentrant, because a program that the user starts in the debugger may stop in
# the same thread. `acquire` waits without the GIL, so the open debugger goes on.
_open = threading.RLock()

# The runs of programs whose debugger was quit. Guarded by `_open`.
_quit_runs: collections.deque[int] = collections.deque(maxlen=64)


def stop(lines: Lines, names: dict[str, Any]) -> None:
    """Opens the debugger of the user in a frame with these lines and names.

    Raises:
        bdb.BdbQuit: the user has quit the debugger, here or on another device of the
            same run of the program: its shards come one after another.
    """
    here = hostcall.current()
    run = -1 if here is None or here.run is None else here.run
    with _open:
        if run in _quit_runs:
            raise _quit(lines)
        try:
            # `breakpoint`, not the hook behind it: it reads PYTHONBREAKPOINT, and some
            # notebooks replace it.
            _run_in(lines, names, _pdb if _quit_ends_all() else builtins.breakpoint)
        except bdb.BdbQuit:
            if run != -1:
                _quit_runs.append(run)
            raise _quit(lines) from None


def _quit_ends_all() -> bool:
    """Whether `breakpoint` is Python's own, whose `quit` ends the process (3.14)."""
    return (
        sys.version_info >= (3, 14)
        and isinstance(builtins.breakpoint, types.BuiltinFunctionType)
        and sys.breakpointhook is sys.__breakpointhook__
        and os.environ.get("PYTHONBREAKPOINT") in (None, "", "pdb.set_trace")
        and pdb.set_trace.__module__ == "pdb"  # pytest replaces it
    )


def _pdb() -> None:
    """Python's debugger, whose `quit` raises BdbQuit, as in older versions."""
    pdb.Pdb().set_trace(sys._getframe(1))


def _quit(lines: Lines) -> bdb.BdbQuit:
    at = f"{lines[0].file}:{lines[0].line} in {lines[0].function}"
    return bdb.BdbQuit(
        f"the debugger that hostcall opened at {at} was quit, so the program ends here."
        " `continue` lets it go on"
    )
