"""The lines of the user's program that run while JAX traces it."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from typing import TypeAlias

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
        line: the line that was running.
    """

    file: str
    function: str
    line: int


Lines: TypeAlias = tuple[UserLine, ...]


def users_lines() -> Lines:
    """The frames of the calling thread outside of hostcall and JAX, innermost first."""
    lines: list[UserLine] = []
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        code = frame.f_code
        if code.co_filename.startswith(_SKIPPED):
            continue
        lines.append(UserLine(code.co_filename, code.co_qualname, line))
        if len(lines) == _LINES_AT_MOST:
            break
    return tuple(lines)
