"""Eager taps of a line that has tapped before: they make no plan.

To make the plan of an eager tap takes longer than all else that it does. The plan can't
be kept, since it holds the function, which may be a fresh closure over a model. But
where a plain function gets arrays, and no option is given, nothing else in the plan is
the function's own. All of it follows from what `_Line` names: the line of the user's
program, the function's code, the kinds of arrays, and the devices.

So one plan for a line is kept, with a stand-in for the function (`keep`). A tap of the
same line gives it the arrays and its own function (`push`), and the queue holds both
until they are delivered.

The second tap of a line makes the plan that is kept. It takes as long as that of a tap,
and many lines come once only: a list that grows has another shape each time.
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
from hostcall._core.array_values import Array
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
        code: the number of the function's code object. The plan that is kept for a
            line holds the object, so that no other one gets its number meanwhile.
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


class _Kept:
    """What is kept of a line.

    Attributes:
        has_tapped: whether a tap of the line was made. It may have been one of a code
            object that is gone, whose number another one has: then the plan is made
            by the first tap of that one.
        plan: for further taps; None before the second one. It holds the code object.
    """

    __slots__ = ("has_tapped", "plan")

    def __init__(self) -> None:
        self.has_tapped = False
        self.plan: _native.Plan | None = None


# In a notebook each run of a cell makes new lines. Beyond this number the one that was
# used longest ago is dropped.
@lru_cache(maxsize=1024)
def _kept(line: _Line) -> _Kept:
    del line  # it is the key
    return _Kept()


def push(fn: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Queues an eager tap without options if its line has tapped so before."""
    if not _is_plain(fn, len(args)) or not _jax.traces_nothing() or _native.forked():
        return False
    on_devices = [x for x in args if type(x) not in _ON_HOST]
    # By their types: of trees, typed keys and the user's own classes nothing is asked
    # twice. A tracer that has left its trace is no array: JAX's `bind` says so.
    if not _jax.are_arrays(on_devices) or _jax.traced_here() is not None:
        return False
    home = _only_device(on_devices)
    if home is None:
        return False
    operands, _ = flatten_arguments(args, {})
    frame = users_frame()
    place = frame.f_code
    caller = (place.co_filename, frame.f_lineno, place.co_qualname)
    plan = _kept(_line(fn.__code__, fn.__qualname__, caller, operands, home)).plan
    if plan is None:
        return False
    # Only where there is a plan: the values of other arrays may be out of reach, on a
    # device of another process, which delivers them.
    plan.push([row_major(operand) for operand in operands], fn)
    return True


def keep(params: TapParams, home: Device, arrays: Sequence[np.ndarray]) -> None:
    """Keeps a plan for further taps of the line of this one, if they can have it and
    the line has tapped before.
    """
    callback = params.callback
    fn = callback.function
    is_plain = _is_plain(fn, len(arrays)) and _has_arrays_only(callback.template)
    if not is_plain or params.options != _NO_OPTIONS or callback.traced is not None:
        return
    place = callback.place
    caller = (place.file, place.line, place.function)
    kept = _kept(_line(fn.__code__, fn.__qualname__, caller, arrays, home))
    if kept.plan is not None or not kept.has_tapped:
        kept.has_tapped = True
        return
    without_function = replace(callback, fn=_STAND_IN, known=callback.facts)
    bare = TapParams(callback=without_function, masked=False)
    # Anything else that a tap can have is not in `_Line`.
    if replace(bare, callback=callback) == params:
        _, kept.plan = plan_here(bare, home, arrays)


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
# The types of arrays and numbers that are on no device.
_NUMBERS = np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"
_ON_HOST = {np.ndarray, bool, int, float, complex}
_ON_HOST |= {np.dtype(number).type for number in _NUMBERS}


def _nothing() -> None:
    """Stands for the function in the plan of a line."""


_STAND_IN = Opaque(_nothing)


def _line(
    code: types.CodeType,
    name: str,
    caller: tuple[str, int, str],
    arrays: Sequence[Array],
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
