"""Checks of the arguments that several faces share: the function, where=, sharding=."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import numpy as np

from hostcall._core.errors import SpecError
from hostcall._core.source import name_of


def check_function(fn: Any, usage: str) -> str:
    """Returns the function's name; refuses what is not a plain function.

    Calling a coroutine or generator function runs none of its code.
    """
    if not callable(fn):
        raise SpecError(
            f"hostcall: the first argument should be a function, got {fn!r}. Write"
            f" {usage}"
        )
    name = name_of(fn)
    # The code that runs: a function itself, what a functools.partial calls, or the
    # `__call__` of an object.
    body = fn if inspect.isroutine(fn) else getattr(fn, "func", type(fn).__call__)
    if inspect.iscoroutinefunction(body):
        raise SpecError(
            f"hostcall: `{name}` is a coroutine function: calling it only makes a"
            " coroutine. Give a function that runs it:"
            f" lambda *args: asyncio.run({name}(*args))"
        )
    if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        raise SpecError(
            f"hostcall: `{name}` is a generator function: calling it only makes a"
            " generator. Make the generator outside, and give a function that takes"
            " its next value: lambda: next(generator), with"
            ' order="ordered"'
        )
    return name


def parse_mask(where: Any, name: str) -> Any:
    mask = where if isinstance(where, jax.Array) else np.asarray(where)
    if mask.dtype != np.bool_ or mask.shape != ():
        raise SpecError(
            f"hostcall: where= of `{name}` should be one bool, got"
            f" {mask.dtype}{list(mask.shape)}. For one bool per row, vmap the function"
            " that makes the call"
        )
    return mask


def check_sharding(sharding: Any, name: str) -> Any:
    if sharding is None or (isinstance(sharding, str) and sharding == "auto"):
        return None
    devices = getattr(sharding, "device_set", None)
    if devices is None or len(devices) != 1:
        raise SpecError(
            f"hostcall: sharding= of `{name}` should be the sharding of one device,"
            " such as jax.sharding.SingleDeviceSharding(device), or 'auto', got"
            f" {sharding!r}"
        )
    return sharding
