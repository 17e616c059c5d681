"""Builds native plans, which tell the engine about calls, from their descriptions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from hostcall import _jax, _native
from hostcall._core.callback import CallSpec
from hostcall._core.dlpack import DLPackArray
from hostcall._core.spec import packed_bits, widened
from hostcall._engine.counters import costs
from hostcall._engine.hooks import CallHooks
from hostcall._engine.params.equation import Equation
from hostcall._engine.place_numbers import places
from hostcall._engine.placement import Placement
from hostcall._engine.placing import hosted
from hostcall._native import Inside, ResultForm
from hostcall._policies.layer import Choices
from hostcall._policies.stack import EngineFunctions, entries, unflattened
from hostcall._runtime import host_device

Converter: TypeAlias = Callable[[Any], Any]


def make_plan(hooks: CallHooks, operands: Sequence[Any]) -> _native.Plan:
    """Builds the native plan of a call or tap.

    Args:
        hooks: what the engine calls back. They have the equation, and its placement
            with a host device.
        operands: the avals of its operands; the mask first if there is one.
    """
    equation = hooks.equation
    placement = hooks.placement
    callback = equation.callback
    team = placement.team
    together = None if team is None else frozenset(placement.devices.values())
    guard = None if together is None else host_device.guard(together)
    scouts = placement.inside is Inside.ASKED
    operands = operands[equation.python_operands]
    flags = [list(axes) for axes in equation.batched] if equation.grid else []
    batched = flags[: len(operands)] or [[] for _ in operands]
    # A mask that the function's batch is compressed by is an argument of the plan. Any
    # other one is the engine's: which axes of the grid it has.
    compressed = equation.masked and equation.compresses(operands[0])
    mask = None
    if equation.masked and not compressed:
        mask, *batched = batched
        operands = operands[1:]
    shapes = [
        (operand.shape[sum(axes) :], operand.dtype)
        for operand, axes in zip(operands, batched, strict=True)
    ]
    converters, called = _called(hooks, guard, shapes, compressed)
    traced = callback.traced
    rows = zip(shapes, batched, converters, strict=True)
    packed = placement.packed
    return _native.Plan(
        **called,
        args=[_leaf(*kind, axes, convert, packed) for kind, axes, convert in rows],
        results=_results(equation, packed),
        grid=equation.grid,
        mask=mask,
        hooks=hooks,
        plan_of_block=placement.plan_of_block,
        device=placement.host_device,
        enter=None if traced is None else traced.enter,
        leave=None if traced is None else traced.leave,
        counters=costs.note(equation),
        place=places.number_of(callback),
        returns_outcome=placement.returns_outcome,
        called_by_other_process=placement.called_by_other_process,
        team=team and team.settings(),
        guard=host_device.guard(together, scouts=True) if scouts else guard,
        inside=placement.inside,
        keeps_mesh=equation.is_jaxs_own and not _jax.CALLBACKS_HIDE_MESHES,
        kind=equation.kind(placement),
        text=placement.text,
    )


def plan_in_program(
    equation: Equation,
    placement: Placement,
    operands: Sequence[Any],
    client: Any | None,
    platforms: tuple[str, ...],
) -> _native.Plan:
    """Makes the plan of a call or tap in a program.

    Args:
        equation: what is called.
        placement: where, without what the client says.
        operands: the avals of its operands; for a typed key, that of its uint32 block.
        client: the client that runs the program.
        platforms: those for which the program was lowered.
    """
    placement = hosted(placement, equation, client, platforms)
    return make_plan(equation.hooks(equation, placement), operands)


def _results(equation: Equation, packed: bool) -> list[_native.Leaf]:
    axes = [True] * len(equation.grid)
    levels = equation.levels
    tiles = [
        fill and _tile(fill, aval, levels)
        for aval, fill in zip(equation.avals, equation.callback.fills, strict=True)
    ]
    every = zip(equation.avals, tiles, strict=True)
    return [_leaf(a.shape, a.dtype, axes, None, packed, tile) for a, tile in every]


def _leaf(
    shape: tuple[int, ...],
    dtype: np.dtype,
    batched: list[bool],
    convert: Converter | None,
    packed: bool,
    fill: bytes | None = None,
) -> _native.Leaf:
    bits, is_signed = packed_bits(dtype) if packed else (0, False)
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
    hooks: CallHooks,
    guard: _jax.ExecutionGuard | None,
    shapes: Sequence[tuple[tuple[int, ...], np.dtype]],
    compressed: bool,
) -> tuple[Sequence[Converter | None], dict[str, Any]]:
    """(how the engine converts each array, what it calls, with what the equation says
    of that).
    """
    equation = hooks.equation
    callback = hooks.callback
    native = equation.native
    keys = callback.template.keys
    converters: Sequence[Converter | None] = [None] * len(keys)
    as_they_are = equation.options.arrays == "numpy" and not any(keys)  # most calls
    if not as_they_are or callback.policy.float64:
        converters = _converters(hooks, shapes)
    layered = compressed or callback.seen.awaits or callback.policy.layered
    if hooks.placement.called_by_other_process:
        called = EngineFunctions(_nothing, ResultForm.NOTHING, plain=True)
    elif equation.on_buffers:  # there can be no layers, and nothing is returned
        called = EngineFunctions(equation.bare(), ResultForm.IGNORED)
    elif layered or (equation.grid and equation.method == "parallel"):
        called = entries(_choices(hooks, guard, converters, compressed, native["form"]))
    else:
        called = EngineFunctions(direct(callback), native["form"])
    job = hooks.placement.job
    if job is not None:  # refused after a failure of a program over processes
        runner = called.runner and job.until_failure(called.runner)
        function = job.until_failure(called.function)
        called = called._replace(function=function, runner=runner)
    told = called._asdict()
    if told.pop("plain"):  # a layer that reads arrays converts them afterwards
        converters = [None] * len(shapes)
    return converters, {**native, **told}


def _choices(
    hooks: CallHooks,
    guard: _jax.ExecutionGuard | None,
    converters: Sequence[Converter | None],
    compressed: bool,
    form: ResultForm,
) -> Choices:
    equation = hooks.equation
    callback = hooks.callback
    return Choices(
        callback=callback,
        results=hooks,
        device=hooks.placement.host_device,
        guard=guard,
        converters=converters,
        avals=equation.avals,
        levels=equation.levels,
        grid=bool(equation.grid),
        parallel=equation.method == "parallel",
        once=equation.effect is not None,
        compressed=compressed,
        form=form,
        tap=equation.ignores_results,
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
    hooks: CallHooks, shapes: Sequence[tuple[tuple[int, ...], np.dtype]]
) -> Sequence[Converter | None]:
    """What makes the kind of array that the function gets of an engine's array."""
    callback = hooks.callback
    device = hooks.placement.host_device
    arrays = callback.options.arrays
    keys = callback.template.keys
    wide: list[np.dtype | None] = [None] * len(keys)
    if callback.policy.float64:  # the mask, if it is there, is not converted
        wide = [widened(dtype) for _, dtype in shapes[len(shapes) - len(keys) :]]
    every = zip(keys, wide, strict=True)
    return [_converter(arrays, key, device, to) for key, to in every]


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


def direct(callback: CallSpec) -> Callable[..., Any]:
    """The user's function itself, if it gets each array as an argument."""
    whole = callback.function
    options = callback.options
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
