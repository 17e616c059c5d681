"""Places in the user's source, for messages."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

# The package: frames of all its wings are passed over.
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep


@dataclass(frozen=True)
class Place:
    """A line of the user's program.

    Attributes:
        file: its path as Python knows it.
        line: counted from 1.
        function: the function whose body the line is in.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def users_place() -> Place:
    """The innermost frame of the calling thread that isn't hostcall's.

    Nor JAX's, which calls functions of ours for the user: `jax.jit(env.step)(x)`.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(
        (_HERE, _JAX)
    ):
        frame = frame.f_back
    code = frame.f_code
    return Place(code.co_filename, frame.f_lineno, code.co_qualname)


def name_of(fn: Callable[..., Any]) -> str:
    """What a reader would call this function."""
    inner = fn
    while not hasattr(inner, "__qualname__") and hasattr(inner, "func"):
        inner = inner.func  # functools.partial
    name = (
        getattr(inner, "__qualname__", None)
        or getattr(inner, "__name__", None)  # a ufunc
        or type(inner).__qualname__
    )
    return f"partial({name})" if inner is not fn else str(name)


def is_anonymous(fn: Callable[..., Any]) -> bool:
    """Whether its name does not tell it from others: a lambda, a function that is made
    inside another, or a `functools.partial`.
    """
    name = getattr(fn, "__qualname__", None)  # what hostcall itself calls has one too
    if name is None:
        return hasattr(fn, "func")
    return "<" in name or name.startswith("partial(")


def place_of(fn: Callable[..., Any]) -> Place:
    """Where a function is defined."""
    inner = fn
    while hasattr(inner, "func") and not hasattr(inner, "__code__"):
        inner = inner.func
    code = getattr(inner, "__code__", None)
    if code is None:
        return Place("(built in)", 0, name_of(fn))
    return Place(code.co_filename, code.co_firstlineno, name_of(fn))


def is_jaxs(fn: Callable[..., Any]) -> bool:
    """Whether this function is JAX's own code."""
    return place_of(fn).file.startswith(_JAX)


def source_of(fn: Callable[..., Any]) -> str:
    """Name and place of a function: the same for all closures over one `def`."""
    own = getattr(fn, "hostcall_source", None)  # of what hostcall itself calls
    if isinstance(own, str):
        return own
    place = place_of(fn)
    return f"{name_of(fn)} ({place.file}:{place.line})" if place.line else name_of(fn)
