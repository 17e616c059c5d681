"""Runs a function as if it were called by lines of the user's program.

A debugger shows frames: a file, a line, and the names in it. When a callback runs, the
frames in which the user wrote it are long gone. So they are noted while JAX traces, and
built again on the host: for each there is a code object with the file, the function's
name and the line, and it calls the next one. They call through C (`exec` in a
`functools.partial`), so no frame of hostcall lies between them.
"""

from __future__ import annotations

import builtins
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import jax

import hostcall

_SKIPPED = tuple(
    os.path.dirname(os.path.abspath(str(package.__file__))) + os.sep
    for package in (hostcall, jax)
)
_LINES_AT_MOST = 32  # of a test runner or a server, the innermost are enough


@dataclass(frozen=True)
class Line:
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


def users_lines() -> tuple[Line, ...]:
    """The frames of the calling thread outside of hostcall and JAX, innermost first."""
    found: list[Line] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < _LINES_AT_MOST:
        code = frame.f_code
        if not code.co_filename.startswith(_SKIPPED):
            first = min(code.co_firstlineno, frame.f_lineno)
            name = code.co_qualname
            found.append(
                Line(code.co_filename, name, first, frame.f_lineno, frame.f_globals)
            )
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


def run_in(
    lines: tuple[Line, ...], names: dict[str, Any], open_debugger: Callable[[], Any]
) -> None:
    """Calls `open_debugger` in the innermost of these frames, with these locals."""
    # Debuggers up to Python 3.12 stop at the next line that begins, not in the call
    # that opens them. So there is a loop on the line: it opens the debugger, goes back
    # to the line's beginning, where the debugger stops, and does nothing more.
    hidden: dict[str, Any] = {
        "__more__": iter((True, True, False)).__next__,
        "__call__": iter((open_debugger, int)).__next__,
    }
    step = _step(lines[0], "while __more__(): __call__()()", names, hidden)
    for line in lines[1:]:
        step = _step(line, "__inner__()", {}, {"__inner__": step})
    step()


def _step(
    line: Line, source: str, names: dict[str, Any], hidden: dict[str, Any]
) -> Callable[[], Any]:
    # The hidden names are builtins of this frame, so that no list of names shows them.
    around = {**line.names, "__builtins__": {**vars(builtins), **hidden}}
    return functools.partial(exec, _code(line, source), around, names)


def _code(line: Line, source: str) -> CodeType:
    code = compile("\n" * (line.line - line.first) + source, line.file, "exec")
    name = line.function.rpartition(".")[2]
    return code.replace(
        co_firstlineno=line.first, co_name=name, co_qualname=line.function
    )
