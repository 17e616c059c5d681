"""Opens the debugger in a callback, for one thread at a time."""

from __future__ import annotations

import bdb
import builtins
import collections
import os
import pdb
import sys
import threading
import types
from typing import Any

import hostcall as hc
from hostcall.tools._breakpoint.frames import Line, run_in

# Held while a debugger is open: two that read the same terminal would take each other's
# lines. Reentrant, because a program that the user starts in the debugger may stop in
# the same thread. `acquire` waits without the GIL, so the open debugger goes on.
_open = threading.RLock()

# The runs of programs whose debugger was quit. Guarded by `_open`.
_quit_runs: collections.deque[int] = collections.deque(maxlen=64)


def stop(lines: tuple[Line, ...], names: dict[str, Any]) -> None:
    """Opens the debugger of the user in a frame with these lines and names.

    Raises:
        bdb.BdbQuit: the user has quit the debugger, here or on another device of the
            same run of the program: its shards come one after another.
    """
    here = hc.current()
    run = -1 if here is None or here.run is None else here.run
    with _open:
        if run in _quit_runs:
            raise _quit(lines)
        try:
            # `breakpoint`, not the hook behind it: it reads PYTHONBREAKPOINT, and some
            # notebooks replace it.
            run_in(lines, names, _pdb if _quit_ends_all() else builtins.breakpoint)
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


def _quit(lines: tuple[Line, ...]) -> bdb.BdbQuit:
    at = f"{lines[0].file}:{lines[0].line} in {lines[0].function}"
    return bdb.BdbQuit(
        f"the debugger that hostcall opened at {at} was quit, so the program ends here."
        " `continue` lets it go on"
    )
