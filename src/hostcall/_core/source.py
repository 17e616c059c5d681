"""Finds places in the user's source code, and names functions, for messages."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from hostcall._core.host_code import (
    USERS,
    HostCode,
    as_host_code,
    asked,
    is_partial,
    layers,
    own_dictionary,
    text_of,
)

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
    place_of_code = as_host_code(fn).place()
    if place_of_code is not None:
        file, line, function = place_of_code
        return Place(file, line, function)
    frame = users_frame()
    code = frame.f_code
    return Place(code.co_filename, frame.f_lineno, code.co_qualname)


def users_frame() -> types.FrameType:
    """The innermost frame of the calling thread outside hostcall and JAX.

    JAX's frames are skipped too, since JAX may call hostcall's functions for the user:
    `jax.jit(env.step)(x)`. So are contextlib's: some of JAX's functions are decorated
    with a context manager.
    """
    frame = sys._getframe(1)
    skipped = (PACKAGE, _JAX, contextlib.__file__)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    # The outermost one, if there is none of the user's: `python -m hostcall`.
    return frame


class CallableFacts(NamedTuple):
    """What hostcall knows of a callable without running any of it.

    Attributes:
        name: by which messages call it.
        code: what Python runs; None if that is not Python's.
        awaits: whether a call makes a coroutine.
        yields: whether a call makes a generator, asynchronous or not.
        source: its name and place, which all closures over one `def` share.
        host_code: what answers for it: itself, if hostcall made it.
    """

    name: str
    code: types.CodeType | None
    awaits: bool
    yields: bool
    source: str
    host_code: HostCode = USERS

    @property
    def place(self) -> Place:
        """Where it is defined."""
        if self.code is None:
            return Place("(built in)", 0, self.name)
        return Place(self.code.co_filename, self.code.co_firstlineno, self.name)


_YIELDS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_OF_PYTHON = (types.FunctionType, types.MethodType)
_ROUTINES = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
)


def inspect_callable(fn: Any) -> CallableFacts:
    """What a callable is. Other objects have a name, and nothing else."""
    code: types.CodeType | None
    if type(fn) is types.FunctionType:  # most are; eager calls look each time
        name = fn.__qualname__
        code = fn.__code__
        host_code = USERS
        source = ""
        awaits = bool(code.co_flags & inspect.CO_COROUTINE)
        if fn.__dict__:  # perhaps the mark of inspect.markcoroutinefunction
            awaits = inspect.iscoroutinefunction(fn)
        yields = bool(code.co_flags & _YIELDS)
    elif type(fn) is np.ufunc:  # C answers, and nothing is inside
        name = text_of(fn, "__qualname__") or fn.__name__
        code = None
        host_code = USERS
        source = ""
        awaits = yields = False
    else:
        name, code, awaits, yields = _look_inside(fn)
        host_code = as_host_code(fn)
        source = host_code.source()
    if not source and code is not None:
        source = f"{name} ({code.co_filename}:{code.co_firstlineno})"
    # By position: keywords take a third of a microsecond more, of each eager call.
    return CallableFacts(name, code, awaits, yields, source or name, host_code)


def _look_inside(fn: Any) -> tuple[str, types.CodeType | None, bool, bool]:
    """(name, code, awaits, yields) of what is no plain function."""
    # The name is the outermost that a layer has; all else is the innermost's.
    name = ""
    inner = fn
    in_partial = False
    for inner in layers(fn):
        if not name:  # functools.update_wrapper may have named a partial
            name = text_of(inner, "__qualname__")
            in_partial = in_partial or (is_partial(inner) and not name)
    name = name or text_of(inner, "__name__") or type(inner).__qualname__  # a ufunc
    if in_partial:  # what hostcall's own code wraps is called by its name alone
        name = f"partial({name})"
    code = asked(inner, "__code__", types.CodeType)
    host_code = as_host_code(inner)
    if host_code is inner:
        return name, code, host_code.awaits(), False
    try:
        if _is_written_in_c(inner):
            return name, code, False, False
        # By its type, since a Mock with a spec has the `__class__` of a function.
        is_routine = issubclass(type(inner), _ROUTINES)
        body = inner if is_routine else type(inner).__call__
        awaits = any(map(inspect.iscoroutinefunction, (inner, body)))
        yields = inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body)
    except Exception:  # it can't be called, or is such a Mock, without code
        awaits = False
        yields = False
    return name, code, awaits, yields


# What inspect.markcoroutinefunction sets begins so in all versions of Python.
_MARK = "_is_coroutine"
# Their calls are neither coroutines nor generators.
_OF_C = tuple(kind for kind in _ROUTINES if kind not in _OF_PYTHON)


def _is_written_in_c(fn: Any) -> bool:
    """Whether C answers a call, as for a ufunc, and no mark says that it awaits.

    `inspect` takes 10 us to say so, in each eager call.
    """
    if type(fn) in _OF_C:
        return True
    # A class may have a constructor of Python's. Python's own functions and methods are
    # called by C, which then runs their code.
    if issubclass(type(fn), (type, *_OF_PYTHON)):
        return False
    of_c = type(type(fn).__call__) is types.WrapperDescriptorType
    marked = any(name.startswith(_MARK) for name in own_dictionary(fn) or ())
    return of_c and not marked


def name_of(fn: Any) -> str:
    """The name by which messages call it."""
    return inspect_callable(fn).name


def closed_over(fn: types.FunctionType) -> dict[str, Any]:
    """The variables of the functions around it that a function uses, without those that
    are not assigned yet.
    """
    variables = {}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            variables[name] = cell.cell_contents
    return variables


def is_anonymous(fn: Function) -> bool:
    """Whether other functions may have the same name.

    True for a lambda, for a function that is defined inside another, and for a
    `functools.partial`.
    """
    name = text_of(fn, "__qualname__")  # hostcall's own callables have one too
    if not name:
        return is_partial(fn)
    return "<" in name or name.startswith("partial(")


def is_jaxs(fn: Function) -> bool:
    """Whether this function is JAX's own code."""
    return inspect_callable(fn).place.file.startswith(_JAX)
