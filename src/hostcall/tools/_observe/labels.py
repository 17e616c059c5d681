"""Says where equations and values come from, in words."""

from __future__ import annotations

import linecache
import os
from collections.abc import Sequence

import numpy as np

from hostcall._jax import JaxprEquation, jaxprs, user_lines
from hostcall.tools._debugger import users_lines


def place_of(eqn: JaxprEquation) -> tuple[str, str, int] | None:
    """(file, function, line) of the innermost line of the user's."""
    lines = user_lines.lines_of(eqn)
    return lines[0][:3] if lines else None


def line_of(eqn: JaxprEquation) -> str:
    """Such as `train.py:12`."""
    place = place_of(eqn)
    return f"{short(place[0])}:{place[2]}" if place else "an unknown line"


def short(file: str) -> str:
    return file if file.startswith("<") else os.path.basename(file)


def text_in(file: str, line: int) -> str:
    """The source text of a line; "" if there is no source."""
    return linecache.getline(file, line).strip()


def text_of(eqn: JaxprEquation) -> str:
    place = place_of(eqn)
    return text_in(place[0], place[2]) if place else ""


def shown(eqn: JaxprEquation) -> list[str]:
    """Lines that show where an equation is."""
    place = place_of(eqn)
    if place is None:  # an operation outside of compiled functions
        lines = users_lines()  # the callback may run on the thread that dispatched it
        if not lines:
            return ["  in an operation that was run alone, outside of jax.jit"]
        place = lines[0].file, lines[0].function, lines[0].line
    file, function, line = place
    return [f"  {file}:{line} in {function}", f"    {text_in(file, line)}"]


def transforms(*eqns: JaxprEquation) -> list[str]:
    """Under which transformations JAX has made the last of these, inside the others."""
    return [name for eqn in eqns for name in user_lines.transforms_of(eqn)]


def is_backward(*eqns: JaxprEquation) -> bool:
    """Whether the last of these, inside the others, belongs to a backward pass."""
    return "transpose" in transforms(*eqns)


def vmaps_of(*eqns: JaxprEquation) -> int:
    """How many vmaps the last of these, inside the others, is under."""
    return transforms(*eqns).count("vmap")


def steps_of(around: Sequence[JaxprEquation], steps: Sequence[np.ndarray | int]) -> str:
    """Such as `step 7 of the scan at train.py:20`, the innermost loop first."""
    loops = [eqn for eqn in around if eqn.primitive.name in jaxprs.LOOPS]
    told = [
        f"step {np.asarray(step)} of the {eqn.primitive.name} at {line_of(eqn)}"
        for eqn, step in zip(loops, steps, strict=True)
    ]
    return ", ".join(reversed(told))
