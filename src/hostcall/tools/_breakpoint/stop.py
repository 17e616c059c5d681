"""Opens the debugger in a callback, for one thread at a time."""

from __future__ import annotations

import bdb
import builtins
import collections
import threading
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
            run_in(lines, names, builtins.breakpoint)
        except bdb.BdbQuit:
            if run != -1:
                _quit_runs.append(run)
            raise _quit(lines) from None


def _quit(lines: tuple[Line, ...]) -> bdb.BdbQuit:
    at = f"{lines[0].file}:{lines[0].line} in {lines[0].function}"
    return bdb.BdbQuit(
        f"the debugger that hostcall opened at {at} was quit, so the program ends here."
        " `continue` lets it go on"
    )
