"""Builds native plans, which tell the engine about calls, from their descriptions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from hostcall import _jax, _native
from hostcall._core.callback import Callback
from hostcall._core.dlpack import DLPackArray
from hostcall._core.spec import packed_bits, widened
from hostcall._engine.counters import costs
from hostcall._engine.info import CallInfo
from hostcall._native import Inside, ResultForm
from hostcall._policies.layer import Choices
from hostcall._policies.stack import Entries, entries, unflattened
from hostcall._runtime import host_device

Converter: TypeAlias = Callable[[Any], Any]


def make_plan(info: CallInfo, operands: Sequence[Any]) -> _native.Plan:
    """Builds the native plan of a call or tap.

    Args:
        info: describes it, and answers the engine's questions.
        operands: the avals of its operands; the mask first if there is one.
    """
    equation, callback, team = info.params, info.callback, info.team
    together = None if team is None else frozenset(info.devices.values())
    guard = None if together is None else host_device.guard(together)
    scouts = info.inside is Inside.ASKED
    operands = operands[equation.read]
    flags = [list(axes) for axes in equation.batched] if equation.grid else []
    batched = flags[: len(operands)] or [[] for _ in operands]
    # A mask that the function's batch is compressed by is an argument of the plan. Any
    # other one is the engine's: which axes of the grid it has.
    compressed, mask = equation.masked and equation.compresses(operands[0]), None
    if equation.masked and not compressed:
        (mask, *batched), operands = batched, operands[1:]
    shapes = [
        (operand.shape[sum(axes) :], operand.dtype)
        for operand, axes in zip(operands, batched, strict=True)
    ]
    converters, called = _called(info, guard, shapes, compressed)
    traced = callback.traced
    rows = zip(shapes, batched, converters, strict=True)
    return _native.Plan(
        **called,
        args=[_leaf(info, *kind, axes, convert) for kind, axes, convert in rows],
        results=_results(info),
        grid=equation.grid,
        mask=mask,
        info=info,
        device=info.device,
        enter=None if traced is None else traced.enter,
        leave=None if traced is None else traced.leave,
        counters=costs.note(equation, called["lend"]),
        place=info.number,
        tells=info.tells,
        elsewhere=info.elsewhere,
        team=team and team.settings(),
        guard=host_device.guard(together, scouts=True) if scouts else guard,
        inside=info.inside,
        keeps_mesh=equation.is_jaxs_own and not _jax.CALLBACKS_HIDE_MESHES,
        tap=info.tap,
        text=info.text,
    )


def plan_in_program(
    info: CallInfo,
    operands: Sequence[Any],
    client: Any | None,
    platforms: tuple[str, ...],
) -> _native.Plan:
    """Makes the plan of a call or tap in a program.

    Args:
        info: describes it, without what the client says.
        operands: the avals of its operands; for a typed key, that of its uint32 block.
        client: the client that runs the program.
        platforms: those for which the program was lowered.
    """
    info.packed = True
    equation = info.params
    if info.tap is None and platforms == ("cpu",):
        if not equation.runs_where_dispatched:
            info.inside = Inside.ASKED
        elif equation.is_jaxs_own or equation.options.arrays == "free":
            info.inside = Inside.EVERYWHERE
        else:
            info.inside = Inside.XLAS_THREADS
    if equation.is_jaxs_own:
        # JAX's own host functions (Pallas' interpreter) must find the device that JAX
        # would give them. They hand their arrays to threads that run programs on the
        # process's own client, and they rely on each program having run when its
        # dispatch returns, as a program does whose arrays are on that client.
        info.device = jax.local_devices(backend="cpu")[0]
    else:
        info.device = host_device.above(client)
    return make_plan(info, operands)


def _results(info: CallInfo) -> list[_native.Leaf]:
    equation = info.params
    axes, levels = [True] * len(equation.grid), equation.levels
    tiles = [
        fill and _tile(fill, aval, levels)
        for aval, fill in zip(equation.avals, info.callback.fills, strict=True)
    ]
    every = zip(equation.avals, tiles, strict=True)
    return [_leaf(info, a.shape, a.dtype, axes, None, tile) for a, tile in every]


def _leaf(
    info: CallInfo,
    shape: tuple[int, ...],
    dtype: np.dtype,
    batched: list[bool],
    convert: Converter | None,
    fill: bytes | None = None,
) -> _native.Leaf:
    bits, is_signed = packed_bits(dtype) if info.packed else (0, False)
    return _native.Leaf(
        dtype=dtype,
        shape=shape,
        bits=bits,
        is_signed=is_signed,
        batched=batched,
        convert=convert,
        fill=fill,
    )


def _called(
    info: CallInfo,
    guard: _jax.ExecutionGuard | None,
    shapes: Sequence[tuple[tuple[int, ...], np.dtype]],
    compressed: bool,
) -> tuple[Sequence[Converter | None], dict[str, Any]]:
    """(how the engine converts each array, what it calls, with what the equation says
    of that).
    """
    equation, callback = info.params, info.callback
    native, keys = equation.native, callback.template.keys
    converters: Sequence[Converter | None] = [None] * len(keys)
    as_they_are = equation.options.arrays == "numpy" and not any(keys)  # most calls
    if not as_they_are or callback.policy.float64:
        converters = _converters(info, shapes)
    layered = compressed or callback.seen.awaits or callback.policy.layered
    if info.elsewhere:
        called = Entries(_nothing, ResultForm.NOTHING, plain=True)
        native["feed"] = None  # its items are taken there
    elif equation.on_buffers:  # there can be no layers, and nothing is returned
        called = Entries(equation.bare(), ResultForm.IGNORED)
    elif layered or (equation.grid and equation.method == "parallel"):
        how = guard, converters, compressed, native["form"]
        called = entries(_choices(info, *how))
    else:
        called = Entries(direct(callback), native["form"])
    if info.job is not None:  # refused after a failure of a program over processes
        runner = called.runner and info.job.until_failure(called.runner)
        function = info.job.until_failure(called.function)
        called = called._replace(function=function, runner=runner)
    told = called._asdict()
    if told.pop("plain"):  # a layer that reads arrays converts them afterwards
        converters = [None] * len(shapes)
    return converters, {**native, **told}


def _choices(
    info: CallInfo,
    guard: _jax.ExecutionGuard | None,
    converters: Sequence[Converter | None],
    compressed: bool,
    form: ResultForm,
) -> Choices:
    equation, callback = info.params, info.callback
    return Choices(
        callback=callback,
        results=info,
        device=info.device,
        guard=guard,
        converters=converters,
        avals=equation.avals,
        levels=equation.levels,
        grid=bool(equation.grid),
        parallel=equation.method == "parallel",
        once=equation.effect is not None,
        compressed=compressed,
        form=form,
        tap=equation.delivers,
        batch=equation.axes if compressed else (),
    )


def _tile(fill: bytes, aval: Any, levels: int) -> bytes:
    """The fill of one row, repeated for the batch axes that the function sees.

    The fill of one element, as `parse_fill` makes it for a symbolic shape, is repeated
    for all elements.
    """
    whole = len(fill) != np.dtype(aval.dtype).itemsize
    return fill * int(np.prod(aval.shape[:levels] if whole else aval.shape, dtype=int))


def _converters(
    info: CallInfo, shapes: Sequence[tuple[tuple[int, ...], np.dtype]]
) -> Sequence[Converter | None]:
    """What makes the kind of array that the function gets of an engine's array."""
    arrays, keys = info.params.options.arrays, info.callback.template.keys
    wide: list[np.dtype | None] = [None] * len(keys)
    if info.callback.policy.float64:  # the mask, if it is there, is not converted
        wide = [widened(dtype) for _, dtype in shapes[len(shapes) - len(keys) :]]
    every = zip(keys, wide, strict=True)
    return [_converter(arrays, key, info.device, to) for key, to in every]


def _converter(
    arrays: str, key: Any, device: Any, wide: np.dtype | None
) -> Converter | None:
    if key is not None:
        return lambda block: _jax.wrap_key(_jax.put_on_device(block, device), key)
    if arrays in ("jax", "free"):
        committed = arrays == "jax"
        return lambda array: _jax.put_on_device(array, device, committed)
    if wide is None:
        return DLPackArray if arrays == "dlpack" else None
    if arrays == "dlpack":
        return lambda array: DLPackArray(array.astype(wide))
    return operator.methodcaller("astype", wide)


def _nothing() -> None:
    """Stands for the function if another process calls it."""


# --- Without a layer ------------------------------------------------------------------
#
# A stack costs 2.8 us a call, one closure 1.4, the function itself 0.13.


def direct(callback: Callback) -> Callable[..., Any]:
    """The user's function itself, if it gets each array as an argument."""
    whole, options = callback.function, callback.options
    if options.collected is not None or not callback.template.is_flat:
        whole = _with_trees(whole, unflattened(callback))
    return _with_own_results(whole) if options.lend == "out" else whole


def _with_trees(fn: Callable[..., Any], unflatten: Callable[..., Any]) -> Any:
    def whole(*leaves: Any, **out: Any) -> Any:
        args, kwargs = unflatten(leaves)
        return fn(*args, **kwargs, **out)

    return whole


def _with_own_results(whole: Callable[..., Any]) -> Callable[..., Any]:
    """Copies the results that a function with `out=` returns anyway.

    They may be views of `out`, and then storing one could overwrite another.
    """

    def call(*leaves: Any, out: Any) -> Any:
        value = whole(*leaves, out=out)
        if value is None:
            return None
        return jax.tree.map(
            lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, value
        )

    return call
