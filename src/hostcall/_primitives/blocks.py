"""Host code on each device of a partitioned program, for its own block of the values.

Only the compiler knows which block a device gets, and it tells only when it partitions
the program: through `jax.experimental.custom_partitioning` it then asks for the code of
one device, given the shardings that it chose. But such code can't have a JAX effect, so
it would be dropped if nothing used its result. Hence three parts, chained by a number
that carries no information:

    before = link(0)           has the effect, so it runs after what came before
    ran    = parts(before, x)  custom-partitioned: each device does its own block
    link(ran)                  has the effect, so what comes later waits for the blocks

No part moves data between devices, since the number is the same on all of them, unless
`regroup` asks for other blocks than the compiler chose.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from hostcall import _jax, _native
from hostcall._core.order import Order, effects_of
from hostcall._engine import targets
from hostcall._engine.info import CallInfo
from hostcall._engine.plans import Entrance
from hostcall._primitives import planning, slots
from hostcall._primitives.emit import NUMBER, emit

# --- A link: it turns the order of effects into a data dependency --------------------

link_p = _jax.Primitive("host_link")


def _link_abstract_eval(
    number: Any, *, order: Order, name: str
) -> tuple[Any, set[Any]]:
    del number, name
    return NUMBER, effects_of(order)


def _lower_link(ctx: Any, number: Any, *, order: Order, name: str) -> list[Any]:
    if name:
        _jax.name_partitioning(number, name)
    return emit(
        _jax.program_of(ctx),
        targets.LINK_TARGET,
        [number],
        attributes={},
        order=order,
        has_side_effect=True,
    )


_jax.def_effectful_abstract_eval(link_p, _link_abstract_eval)
_jax.register_lowering(link_p, _lower_link)


# --- The part of one device -----------------------------------------------------------


class Partitioned(abc.ABC):
    """What the parts of one equation share.

    It is a parameter of their equations, and is compared by identity. The name of the
    whole call is put into the program when that is lowered. The compiler then adds to
    each part a text that says which block it is, and the engine asks `plan_of_block`
    for its plan when it loads the program. So a program from the compilation cache,
    for which no compiler asks again, finds its plans too.
    """

    def __init__(
        self,
        program: _jax.Program,
        info: CallInfo,
        tap: _native.TapSettings | None = None,
    ) -> None:
        self.params = info.params
        self.client = program.client
        self._platforms = program.platforms
        self.by_ordinal = program.by_ordinal
        self.across = program.across
        self.of_program = _jax.all_devices(program)
        info.plan_of_block = self.plan_of_block  # type: ignore[attr-defined]
        self._avals = _jax.physical_avals(program.ctx.avals_in)
        self.attributes = slots.put(
            program, info, self._avals, whole=False, entry=Entrance(tap=tap)
        )

    @abc.abstractmethod
    def plan_of_block(self, block: str) -> _native.Plan:
        """The plan of the part that this text describes."""

    def avals(self, shapes: Sequence[Sequence[int]]) -> list[Any]:
        """The avals of the operands' blocks, of these shapes."""
        # New ones: those of the whole may have a sharding, which a block has not.
        return [
            _jax.ShapedArray(tuple(shape), aval.dtype)
            for aval, shape in zip(self._avals, shapes, strict=True)
        ]

    def make_plan(
        self,
        info: CallInfo,
        avals: Sequence[Any],
        tap: _native.TapSettings | None = None,
    ) -> _native.Plan:
        return planning.make_plan(
            self.client, self._platforms, info, avals, Entrance(tap=tap)
        )


def emit_block(
    ctx: Any, target: str, operands: Sequence[Any], equation: Partitioned, **more: Any
) -> list[Any]:
    """Emits the custom call of one device. It is "pure": the links carry its order.

    `plan_of_block` gets the shapes of the operands after the first, and `more`.
    """
    shapes = [aval.shape for aval in _jax.physical_avals(ctx.avals_in[1:])]
    block = json.dumps({"shapes": shapes, **more}, separators=(",", ":"))
    return emit(
        _jax.program_of(ctx),
        target,
        operands,
        attributes={**equation.attributes, "block": block},
        order="pure",
        has_side_effect=True,
    )


# --- The whole equation ---------------------------------------------------------------

# (the sharding of an operand, its shape, its number) -> the sharding that it gets.
Regroup = Callable[[Any, Sequence[int], int], Any]


def _as_they_are(sharding: Any, shape: Sequence[int], number: int) -> Any:
    del shape, number
    return sharding


def lower_blocks(
    program: _jax.Program,
    operands: Sequence[Any],
    equation: Partitioned,
    block: Callable[[Any, Sequence[Any], Sequence[Any]], Callable[..., Any]],
    unpartitioned: Callable[..., Any],
    regroup: Regroup = _as_they_are,
) -> list[Any]:
    """Lowers an equation without results to its three parts.

    Args:
        program: the program.
        operands: the values.
        equation: what its parts share; its order is "unordered" or "ordered".
        block: (replicated sharding, the sharding of each operand, the shape of each) ->
            the function of one device, (number, *blocks) -> number.
        unpartitioned: the function that stands in the program until it is partitioned.
        regroup: chooses the sharding of each operand, given the compiler's choice and
            the operand's shape. If it chooses another one, the compiler moves the data.
    """
    order = equation.params.order

    # As unique as the equation's own name, and the same in each process.
    name = "hostcall {key} {count}".format(**equation.attributes)

    def parts(*arrays: Any) -> list[Any]:
        before = link_p.bind(jnp.int32(0), order=order, name="")
        ran = _partitioned(block, unpartitioned, regroup)(before, *arrays)
        link_p.bind(ran, order=order, name=name)
        return []

    return _jax.lower_by(program.ctx, parts, *operands)


def _partitioned(
    block: Callable[[Any, Sequence[Any], Sequence[Any]], Callable[..., Any]],
    unpartitioned: Callable[..., Any],
    regroup: Regroup,
) -> Any:
    # Imported here because it takes 10 ms, which most programs need not pay.
    from jax.experimental.custom_partitioning import (
        SdyShardingRule,
        custom_partitioning,
    )

    @custom_partitioning
    def parts(number: Any, *arrays: Any) -> Any:
        return unpartitioned(number, *arrays)

    def partition(mesh: Any, args: Any, result: Any) -> Any:
        everywhere = args[0].sharding
        shardings = [
            regroup(_even(arg, everywhere), arg.shape, i)
            for i, arg in enumerate(args[1:])
        ]
        one = block(everywhere, shardings, [arg.shape for arg in args[1:]])
        return mesh, one, result.sharding, (everywhere, *shardings)

    def rule(mesh: Any, values: Any, results: Any) -> Any:
        """Says that no dimension of a value is tied to another one's sharding."""
        del mesh, results
        names = (f"d{i}" for i in range(10_000))
        return SdyShardingRule(
            tuple(tuple(next(names) for _ in value.shape) for value in values), ((),)
        )

    parts.def_partition(
        partition,
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        decode_shardings=False,
        sharding_rule=rule,
    )
    return parts


def _even(arg: Any, everywhere: Any) -> Any:
    """The sharding of `arg`; replicated if its blocks would differ in size.

    XLA pads the last block then, and host code must not see the padding.
    """
    try:
        arg.sharding.devices_indices_map(arg.shape)
    except (AssertionError, ValueError):
        return everywhere
    return arg.sharding
