"""Writing to the program's output."""

from __future__ import annotations

import sys
from typing import Any


def write(text: str, file: Any = None, *, flush: bool = False) -> None:
    """Writes a text to `file`, or to what `sys.stdout` is now.

    In one piece, so that other threads can't write between a line and its end. As with
    Python's print, a program without `sys.stdout` (of pythonw, or a daemon) writes
    nowhere.
    """
    file = sys.stdout if file is None else file
    if file is None:
        return
    file.write(text)
    if flush:
        file.flush()
