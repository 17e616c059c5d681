"""Finds places in the user's source code, and names functions, for messages."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from hostcall._core.host_code import asked, innermost, is_partial, layers, own, text_of

Function: TypeAlias = Callable[..., Any]

# The folder of the package. Frames of its code are skipped.
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep


@dataclass(frozen=True)
class Place:
    """A line of the user's program.

    Attributes:
        file: the path, as in the code object.
        line: the line number, from 1.
        function: the qualified name of the function that the line is in.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def users_place(fn: Any = None) -> Place:
    """The place of `users_frame`, or the one that a function of hostcall tells."""
    told = own(fn).place()
    if told is not None:
        return Place(*told)
    frame = users_frame()
    code = frame.f_code
    return Place(code.co_filename, frame.f_lineno, code.co_qualname)


def users_frame() -> types.FrameType:
    """The innermost frame of the calling thread outside hostcall and JAX.

    JAX's frames are skipped too, since JAX may call hostcall's functions for the user:
    `jax.jit(env.step)(x)`. So are contextlib's: some of JAX's functions are decorated
    with a context manager.
    """
    frame, inner = sys._getframe(1), (PACKAGE, _JAX, contextlib.__file__)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inner):
        frame = frame.f_back
    return frame


def name_of(fn: Function) -> str:
    """The name by which messages call this function."""
    if type(fn) is types.FunctionType:  # eager calls ask each time
        return fn.__qualname__
    name, inner = "", fn
    for inner in layers(fn):  # functools.update_wrapper may have named a partial
        name = text_of(inner, "__qualname__")
        if name:
            break
    name = name or text_of(inner, "__name__") or type(inner).__qualname__  # a ufunc
    return f"partial({name})" if inner is not fn else name


def is_anonymous(fn: Function) -> bool:
    """Whether other functions may have the same name.

    True for a lambda, for a function that is defined inside another, and for a
    `functools.partial`.
    """
    name = text_of(fn, "__qualname__")  # hostcall's own callables have one too
    if not name:
        return is_partial(fn)
    return "<" in name or name.startswith("partial(")


def place_of(fn: Function) -> Place:
    """The place where a function is defined."""
    code = asked(innermost(fn), "__code__", types.CodeType)
    if code is None:
        return Place("(built in)", 0, name_of(fn))
    return Place(code.co_filename, code.co_firstlineno, name_of(fn))


def is_jaxs(fn: Function) -> bool:
    """Whether this function is JAX's own code."""
    return place_of(fn).file.startswith(_JAX)


def source_of(fn: Function) -> str:
    """A function's name and place, which all closures over one `def` share."""
    if said := own(fn).source():
        return said
    place = place_of(fn)
    name = place.function
    return f"{name} ({place.file}:{place.line})" if place.line else name
