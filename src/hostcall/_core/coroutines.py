"""Tells coroutine functions from plain ones."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

# How many rows and calls of one function wait at the same time without `concurrency=`.
CONCURRENCY = 32


def body_of(fn: Any) -> Any:
    """The code that runs: a function itself, what a functools.partial calls, or the
    `__call__` of an object.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn if inspect.isroutine(fn) else getattr(fn, "func", type(fn).__call__)


def is_coroutine_function(fn: Any) -> bool:
    """Whether calling this function makes a coroutine.

    A wrapper of hostcall's own answers by a method `hostcall_awaits()`. It is looked
    for in the class: an object of the user's may have every attribute (a Mock).
    """
    if type(fn) is types.FunctionType and not fn.__dict__:  # without a mark
        return bool(fn.__code__.co_flags & inspect.CO_COROUTINE)
    own = getattr(type(fn), "hostcall_awaits", None)
    if own is not None:
        return bool(own(fn))
    if not callable(fn):
        return False
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(body_of(fn))
