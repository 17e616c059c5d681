"""Checks of the arguments that several faces share: where=, tag=, on=."""

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


def check_tag(tag: Any, name: str) -> None:
    if tag is not None and not (isinstance(tag, str) and tag):
        raise SpecError(
            f"hostcall: tag= of `{name}` should be a string that is not empty, got"
            f" {tag!r}"
        )


def parse_on(on: Any, name: str) -> Any:
    """The sharding of the device that makes a call; None for the program's first."""
    if isinstance(on, jax.Device):
        return jax.sharding.SingleDeviceSharding(on)
    if isinstance(on, str) and on == "once":
        return None
    if isinstance(on, str) and on == "shards":
        raise SpecError(
            f"hostcall: on='shards' of `{name}`: a call that returns results is made"
            " once, with the whole value. For a call by each device with its block,"
            " make it inside jax.shard_map; to hand blocks out without results write"
            f" hc.tap({name}, ..., on='shards')"
        )
    raise SpecError(
        f"hostcall: on= of `{name}` should be 'once' or a device, such as"
        f" jax.devices()[0], got {on!r}"
    )


def check_on_of_tap(on: Any, name: str) -> None:
    if isinstance(on, jax.Device):
        raise SpecError(
            f"hostcall: on= of the tap `{name}` is the device {on}: which device hands"
            " out the whole value makes no difference. Write on='once'; or, for one"
            " device's own block, on='shards' with a function that looks at"
            " hc.current().device"
        )
    if not isinstance(on, str) or on not in ("once", "shards"):
        raise SpecError(
            f"hostcall: on= of the tap `{name}` should be 'once' or 'shards', got"
            f" {on!r}"
        )
