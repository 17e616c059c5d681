"""Builds native plans, which tell the engine about calls, from their descriptions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

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
    team_devices = None if team is None else frozenset(placement.devices.values())
    guard = None if team_devices is None else host_device.guard(team_devices)
    guard_on_call = guard
    if placement.inside is Inside.ASKED:
        # A pure call starts outside of a host callback, and its guard finds out whether
        # it has to go inside (_runtime/host_device.py). Threads of layers are none of
        # XLA's, so their guard does not ask.
        guard_on_call = host_device.guard(team_devices, scouts=True)
    arguments = _arguments(equation, operands)
    native = equation.native
    converters = _converters(hooks, arguments.rows)
    functions = _functions(
        hooks, guard, converters, arguments.compressed, native["form"]
    )
    if functions.plain:  # a layer that reads arrays converts them afterwards
        converters = [None] * len(arguments.rows)
    # The settings of JAX that the trace had of its own, on whatever thread it runs.
    traced = callback.traced
    return _native.Plan(
        **{**native, "form": functions.form},
        function=functions.function,
        runner=functions.runner,
        sends=functions.sends,
        args=arguments.leaves(converters, placement.packed),
        results=_results(equation, placement.packed),
        grid=equation.grid,
        mask=arguments.mask,
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
        guard=guard_on_call,
        inside=placement.inside,
        keeps_mesh=equation.is_jaxs_own and not _jax.CALLBACKS_HIDE_MESHES,
        kind=equation.native_kind(placement),
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


class _Arguments(NamedTuple):
    """The operands that the engine gives to the function, or to its layers.

    Attributes:
        rows: for each, (the shape of one row, the dtype).
        batched: for each, whether it has each axis of the grid.
        mask: which axes of the grid the engine's mask has; None if it has no mask.
        compressed: whether the first of them is the mask, by which a layer drops rows
            of the batch that the function gets.
    """

    rows: list[tuple[tuple[int, ...], np.dtype]]
    batched: list[tuple[bool, ...]]
    mask: tuple[bool, ...] | None
    compressed: bool

    def leaves(
        self, converters: Sequence[Converter | None], packed: bool
    ) -> list[_native.Leaf]:
        """The same for the engine, which calls these converters."""
        every = zip(self.rows, self.batched, converters, strict=True)
        return [
            _leaf(shape, dtype, axes, convert, packed)
            for (shape, dtype), axes, convert in every
        ]


def _arguments(equation: Equation, operands: Sequence[Any]) -> _Arguments:
    """Takes the operands of an equation apart.

    An example: in a vmap over 4 rows, `where=` and x have a row each and y is shared,
    so the shapes are (4,), (4, 3) and (2,), the grid is (4,), and `batched` of the
    equation is (True,), (True,), (False,). Then the mask is (True,), and the rows of
    the arguments are (3,) and (2,).
    """
    operands = operands[equation.python_operands]
    if not equation.grid and not equation.masked:  # most eager calls
        rows = [(operand.shape, operand.dtype) for operand in operands]
        return _Arguments(rows, [()] * len(rows), mask=None, compressed=False)
    batched: list[tuple[bool, ...]] = [()] * len(operands)
    if equation.grid:
        batched = list(equation.batched[: len(operands)])
    # By a mask that has an axis of the function's own batch, a layer drops rows of it:
    # the layer gets the mask as an argument. The engine reads any other mask.
    compressed = equation.masked and equation.compresses(operands[0])
    mask = None
    if equation.masked and not compressed:
        mask = batched.pop(0)
        operands = operands[1:]
    rows = [
        (operand.shape[sum(axes) :], operand.dtype)
        for operand, axes in zip(operands, batched, strict=True)
    ]
    return _Arguments(rows, batched, mask, compressed)


def _results(equation: Equation, packed: bool) -> list[_native.Leaf]:
    axes = (True,) * len(equation.grid)
    leaves = []
    for aval, fill in zip(equation.avals, equation.callback.fills, strict=True):
        if fill is None:
            leaves.append(_leaf(aval.shape, aval.dtype, axes, None, packed))
        else:
            tile = _tile(fill, aval, equation.levels)
            # A new one, past the cache of leaves: a fill may be as large as the result.
            leaves.append(_new_leaf(aval.shape, aval.dtype, axes, None, packed, tile))
    return leaves


def _new_leaf(
    shape: tuple[int, ...],
    dtype: np.dtype,
    batched: tuple[bool, ...],
    convert: Converter | None,
    packed: bool,
    fill: bytes | None = None,
) -> _native.Leaf:
    # XLA packs int4 and the like on some platforms; NumPy's arrays never are.
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


# Plans of eager calls are made for each call, and have the same leaves mostly.
_leaf = lru_cache(maxsize=1024)(_new_leaf)


def _functions(
    hooks: CallHooks,
    guard: _jax.ExecutionGuard | None,
    converters: Sequence[Converter | None],
    compressed: bool,
    form: ResultForm,
) -> EngineFunctions:
    """What the engine calls: most often the user's function itself.

    | the call | the engine calls |
    |---|---|
    | another process makes it | nothing |
    | works on XLA's memory | the function with its Buffers: there can be no layers |
    | has a limit, is awaited, drops rows, or runs rows at once | a stack of layers |
    | any other | the function itself, in a closure at most |

    In a program over several processes all of them are refused after a failure.
    """
    equation = hooks.equation
    callback = hooks.callback
    layered = compressed or callback.facts.awaits or callback.policy.layered
    if hooks.placement.called_by_other_process:
        functions = EngineFunctions(_nothing, ResultForm.NOTHING, plain=True)
    elif equation.on_buffers:
        functions = EngineFunctions(equation.bare(), ResultForm.IGNORED)
    elif layered or (equation.grid and equation.method == "parallel"):
        functions = entries(_choices(hooks, guard, converters, compressed, form))
    else:
        functions = EngineFunctions(direct(callback), form)
    job = hooks.placement.job
    if job is not None:
        runner = functions.runner and job.until_failure(functions.runner)
        function = job.until_failure(functions.function)
        functions = functions._replace(function=function, runner=runner)
    return functions


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
    is_of_row = len(fill) != np.dtype(aval.dtype).itemsize
    repeated = aval.shape[:levels] if is_of_row else aval.shape
    return fill * int(np.prod(repeated, dtype=int))


def _converters(
    hooks: CallHooks, rows: Sequence[tuple[tuple[int, ...], np.dtype]]
) -> Sequence[Converter | None]:
    """What makes the kind of array that the function gets of an engine's array; None
    for one that it gets as it is.
    """
    callback = hooks.callback
    device = hooks.placement.host_device
    arrays = callback.options.arrays
    keys = callback.template.keys
    if arrays == "numpy" and not any(keys) and not callback.policy.float64:
        return [None] * len(keys)  # most calls
    wide_dtypes: list[np.dtype | None] = [None] * len(keys)
    if callback.policy.float64:
        # The template knows no mask, which stands in front of the arguments here if a
        # layer reads it, and is not converted.
        of_arguments = rows[len(rows) - len(keys) :]
        wide_dtypes = [widened(dtype) for _, dtype in of_arguments]
    every = zip(keys, wide_dtypes, strict=True)
    return [_converter(arrays, key, device, dtype) for key, dtype in every]


@lru_cache(maxsize=256)  # so that leaves with equal ones are equal, which are kept too
def _converter(
    arrays: str, key: Any, device: Any, wide: np.dtype | None
) -> Converter | None:
    # A typed key reaches the engine as its uint32 block.
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
    function = callback.function
    options = callback.options
    # A collector reads (args, kwargs), so they are made even if they are flat.
    if options.collected is not None or not callback.template.is_flat:
        function = _with_trees(function, unflattened(callback))
    return _with_own_results(function) if options.lend == "out" else function


def _with_trees(fn: Callable[..., Any], unflatten: Callable[..., Any]) -> Any:
    def whole(*leaves: Any, **out: Any) -> Any:
        args, kwargs = unflatten(leaves)
        return fn(*args, **kwargs, **out)

    return whole


def _with_own_results(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copies the results that a function with `out=` returns anyway.

    They may be views of `out`, and then storing one could overwrite another.
    """

    def call(*leaves: Any, out: Any) -> Any:
        value = function(*leaves, out=out)
        if value is None:
            return None
        return jax.tree.map(
            lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, value
        )

    return call
