"""Says where equations and values come from, in words."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Sequence

import numpy as np

from hostcall._jax.places import EqnPath, in_library
from hostcall._jax.user_lines import SourceLine
from hostcall.tools._traced_lines import users_lines


def line_of(place: EqnPath) -> str:
    """Such as `train.py:12`, the innermost line of the user's."""
    line = place.users_line
    return at(line) if line else "an unknown line"


def path_of(place: EqnPath) -> str:
    """Such as `train.py:12`, or `optax/transform.py:142, called from train.py:31`."""
    line = place.line
    users = place.users_line
    if line is None or users is None or line is users:
        return line_of(place)
    return f"{at(line)}, called from {at(users)}"


def at(line: SourceLine) -> str:
    return f"{short(line.file)}:{line.line}"


def short(file: str) -> str:
    """A file's name as its user knows it: a notebook's cell, a file in a package."""
    return _cell(file) or in_library(file) or _base(file)


def _base(file: str) -> str:
    return file if file.startswith("<") else os.path.basename(file)


def _cell(file: str) -> str | None:
    """Such as `Cell In[2]`, for a file in which IPython keeps a cell's source."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    names = getattr(getattr(shell, "compile", None), "format_code_name", None)
    name_of_cell = None if names is None else names(file)
    return None if name_of_cell is None else " ".join(name_of_cell)


def text_in(file: str, line: int) -> str:
    """The source text of a line; "" if there is no source."""
    return linecache.getline(file, line).strip()


def text_of(place: EqnPath) -> str:
    """The source text of the innermost line of the user's."""
    line = place.users_line
    return text_in(line.file, line.line) if line else ""


def shown(place: EqnPath) -> list[str]:
    """Lines that show where an equation is."""
    line = place.line
    users = place.users_line
    if line is None or users is None:  # an operation outside of compiled functions
        frames = users_lines()  # the callback may run on the thread that dispatched it
        users_frames = [frame for frame in frames if in_library(frame.file) is None]
        for frame in (*users_frames[:1], *frames[:1]):
            return _frame(frame.file, frame.line, frame.function)
        return ["  in an operation that was run alone, outside of jax.jit"]
    if line is users:
        return _frame(line.file, line.line, line.function)
    inner = f"  {at(line)} in {line.function}, called from"
    return [inner, *_frame(users.file, users.line, users.function)]


def _frame(file: str, line: int, function: str) -> list[str]:
    name = _cell(file) or file
    return [f"  {name}:{line} in {function}", f"    {text_in(file, line)}"]


def steps_of(place: EqnPath, steps: Sequence[np.ndarray | int]) -> str:
    """Such as `step 7 of the scan at train.py:20`, the innermost loop first."""
    texts = [
        f"step {np.asarray(step)} of the {loop.eqn.primitive.name} at {line_of(loop)}"
        for loop, step in zip(place.loops, steps, strict=True)
    ]
    return ", ".join(reversed(texts))
