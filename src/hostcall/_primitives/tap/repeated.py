"""Eager taps of a line that has tapped before: they make no plan.

To make the plan of an eager tap takes longer than all else that it does. The plan can't
be kept, since it holds the function, which may be a fresh closure over a model. But
where a plain function gets arrays, and no option is given, nothing else in the plan is
the function's own. All of it follows from what `_Line` names: the line of the user's
program, the function's code, the kinds of arrays, and the devices.

So one plan for a line is kept, with a stand-in for the function (`keep`). A tap of the
same line gives it the arrays and its own function (`push`), and the queue holds both
until they are delivered.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from hostcall import _jax, _native
from hostcall._core.options import TapOptions
from hostcall._core.source import users_frame
from hostcall._core.spec import Opaque, Template, flatten_arguments
from hostcall._engine.params.tap import TapParams
from hostcall._jax.types import Device
from hostcall._primitives.eager import first_device, plan_here, row_major
from hostcall._runtime import host_device

# (shape, dtype) of each.
Kinds: TypeAlias = tuple[tuple[tuple[int, ...], np.dtype], ...]


class _Line(NamedTuple):
    """All that the plan of such a tap follows from.

    Attributes:
        code: the number of the function's code object. What is kept for a line holds
            the object, so that no other one gets its number meanwhile.
        name: the function's.
        caller: the file, the line and the function in which the tap is written.
        kinds: what the arrays are.
        home: the device that the tap stands for.
        host: JAX's default device inside the function.
    """

    code: int
    name: str
    caller: tuple[str, int, str]
    kinds: Kinds
    home: Device
    host: Device


# In a notebook each run of a cell makes new lines. Beyond this number the one that was
# used longest ago is dropped.
@lru_cache(maxsize=1024)
def _plans(line: _Line) -> list[_native.Plan]:
    """The plan of a line, once there is one."""
    return []


def push(fn: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Queues an eager tap without options if its line has tapped so before."""
    if not _is_plain(fn, len(args)) or not _jax.traces_nothing() or _native.forked():
        return False
    operands, template = flatten_arguments(args, {})
    if not _has_arrays_only(template) or _jax.traced_here() is not None:
        return False
    on_devices = [x for x in operands if not isinstance(x, np.ndarray)]
    # A tracer that has left its trace is none: JAX's `bind` says so.
    home = _only_device(on_devices) if _jax.are_arrays(on_devices) else None
    if home is None:
        return False
    arrays = [row_major(operand) for operand in operands]
    frame = users_frame()
    place = frame.f_code
    caller = (place.co_filename, frame.f_lineno, place.co_qualname)
    plans = _plans(_line(fn.__code__, fn.__qualname__, caller, arrays, home))
    if not plans:
        return False
    plans[0].push(arrays, fn)
    return True


def keep(params: TapParams, home: Device, arrays: Sequence[np.ndarray]) -> None:
    """Keeps a plan for further taps of the line of this one, if they can have it."""
    callback = params.callback
    fn = callback.function
    is_plain = _is_plain(fn, len(arrays)) and _has_arrays_only(callback.template)
    if not is_plain or params.options != _NO_OPTIONS or callback.traced is not None:
        return
    without_function = replace(callback, fn=_STAND_IN, known=callback.facts)
    bare = TapParams(callback=without_function, masked=False)
    # Anything else that a tap can have is not in `_Line`.
    if replace(bare, callback=callback) != params:
        return
    place = callback.place
    caller = (place.file, place.line, place.function)
    plans = _plans(_line(fn.__code__, fn.__qualname__, caller, arrays, home))
    if not plans:
        _, plan = plan_here(bare, home, arrays)
        plans.append(plan)


def _has_arrays_only(template: Template) -> bool:
    """Whether each argument is an array, and none of them a typed key."""
    return not any(template.leaves) and template.is_flat


def _is_plain(fn: Callable[..., Any], count: int) -> bool:
    """Whether a function's code and name say all about it, and it takes so many arrays
    by position. What it has as attributes may say more (inspect.markcoroutinefunction).
    """
    if type(fn) is not types.FunctionType or fn.__dict__:
        return False
    code = fn.__code__
    if code.co_argcount != count or code.co_kwonlyargcount:
        return False
    return not code.co_flags & _NOT_PLAIN


_NOT_PLAIN = (
    inspect.CO_COROUTINE
    | inspect.CO_GENERATOR
    | inspect.CO_ASYNC_GENERATOR
    | inspect.CO_ITERABLE_COROUTINE
)
_NO_OPTIONS = TapOptions()


def _nothing() -> None:
    """Stands for the function in the plan of a line."""


_STAND_IN = Opaque(_nothing)


def _line(
    code: types.CodeType,
    name: str,
    caller: tuple[str, int, str],
    arrays: Sequence[np.ndarray],
    home: Device,
) -> _Line:
    kinds = tuple([(array.shape, array.dtype) for array in arrays])
    host = host_device.host_device_here()
    # By position: each eager tap makes one, and keywords take longer.
    return _Line(id(code), name, caller, kinds, home, host)


def _only_device(arrays: Sequence[jax.Array]) -> Device | None:
    """The device of an eager tap of these; None if one of them has several."""
    homes: list[Device] = []
    for array in arrays:
        devices = array.sharding.device_set
        if len(devices) != 1:
            return None
        homes += devices
    return homes[0] if homes else first_device(())
