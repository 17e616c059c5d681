"""Tells coroutine functions from plain ones."""

from __future__ import annotations

import inspect
import types
from typing import Any

from hostcall._core.host_code import innermost, own

# How many rows and calls of one function wait at the same time without `concurrency=`.
CONCURRENCY = 32

_ROUTINES = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
)


def body_of(fn: Any) -> Any:
    """The code that runs: a function itself, what a functools.partial calls, or the
    `__call__` of an object.
    """
    fn = innermost(fn)
    # By its type, since a Mock with a spec has the `__class__` of a function.
    return fn if issubclass(type(fn), _ROUTINES) else type(fn).__call__


def is_coroutine_function(fn: Any) -> bool:
    """Whether calling this function makes a coroutine."""
    if type(fn) is types.FunctionType and not fn.__dict__:  # without a mark
        return bool(fn.__code__.co_flags & inspect.CO_COROUTINE)
    if own(fn) is fn and own(fn).inside() is None:
        return own(fn).awaits()
    if not callable(fn):
        return False
    inner = innermost(fn)  # inspect follows a partial of itself for ever
    try:
        return any(map(inspect.iscoroutinefunction, (inner, body_of(inner))))
    except Exception:  # a Mock with a spec has the class of a function, and no code
        return False
