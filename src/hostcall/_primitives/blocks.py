"""Host code on each device of a partitioned program, for its own block of the values.

Only the compiler knows which block a device gets, and it tells only when it partitions
the program: through `jax.experimental.custom_partitioning` it then asks for the code of
one device, given the shardings that it chose. But such code can't have a JAX effect, so
it would be dropped if nothing used its result. Hence three parts, chained by a number
that carries no information:

    before = link(0)           has the effect, so it runs after what came before
    ran    = parts(before, x)  custom-partitioned: each device does its own block
    link(ran)                  has the effect, so what comes later waits for the blocks

No part moves data between devices, since the number is the same on all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from hostcall import _jax, _native
from hostcall._core.errors import HostcallError
from hostcall._core.order import Order, effects_of
from hostcall._engine import targets
from hostcall._engine.info import CallInfo
from hostcall._primitives import slots
from hostcall._primitives.emit import emit

NUMBER = _jax.ShapedArray((), np.dtype(np.int32))

# --- A link: it turns the order of effects into a data dependency --------------------

link_p = _jax.Primitive("host_link")


def _link_abstract_eval(
    number: Any, *, order: Order, mark: int
) -> tuple[Any, set[Any]]:
    del number, mark
    return NUMBER, effects_of(order)


def _lower_link(ctx: Any, number: Any, *, order: Order, mark: int) -> list[Any]:
    return emit(
        _jax.program_of(ctx),
        targets.LINK_TARGET,
        [number],
        {"mark": np.uint64(mark)},
        order=order,
        has_side_effect=True,
    )


_jax.def_effectful_abstract_eval(link_p, _link_abstract_eval)
_jax.register_lowering(link_p, _lower_link)


# --- The part of one device -----------------------------------------------------------


class Equation:
    """What the parts of one equation share.

    It is a parameter of their equations, and is compared by identity.
    """

    def __init__(self, program: _jax.Program, params: Any) -> None:
        self.params = params
        self.client = program.client
        self.by_ordinal = program.by_ordinal
        self.across = program.across
        self.slots: list[Any] = []  # the executable keeps the equation, and so these


def emit_block(
    ctx: Any,
    target: str,
    operands: Sequence[Any],
    equation: Equation,
    info: CallInfo,
    avals: Sequence[Any],
    tap: _native.TapSettings | None = None,
) -> list[Any]:
    """Emits the custom call of one device.

    It is "pure", since the links carry its order; the equation keeps its slot alive.
    """
    program = _jax.program_of(ctx)
    slot, attributes = slots.take(program, equation.client, info, avals, tap=tap)
    equation.slots.append(slot)
    return emit(
        program, target, operands, attributes, order="pure", has_side_effect=True
    )


# --- The whole equation ---------------------------------------------------------------


def lower_blocks(
    program: _jax.Program,
    operands: Sequence[Any],
    equation: Equation,
    block: Callable[[Any, Sequence[Any], Sequence[Any]], Callable[..., Any]],
    unpartitioned: Callable[..., Any],
) -> list[Any]:
    """Lowers an equation without results to its three parts.

    Args:
        program: the program.
        operands: the values.
        equation: what its parts share; its order is "unordered" or "ordered".
        block: (replicated sharding, the sharding of each operand, the shape of each) ->
            the function of one device, (number, *blocks) -> number.
        unpartitioned: the function that stands in the program until it is partitioned.
    """
    _refuse(program, equation)
    slots.keep(program, equation, equation.params.callback.name)
    order = equation.params.order
    # A random number in the program's text, so that JAX's compilation cache never finds
    # the program: its slots are taken while it is partitioned, and a program from the
    # cache would skip that.
    mark = int.from_bytes(os.urandom(7), "little")

    def parts(*arrays: Any) -> list[Any]:
        before = link_p.bind(jnp.int32(0), order=order, mark=mark)
        ran = _partitioned(block, unpartitioned)(before, *arrays)
        link_p.bind(ran, order=order, mark=0)
        return []

    return _jax.lower_by(program.ctx, parts, *operands)


def _refuse(program: _jax.Program, equation: Equation) -> None:
    """Refuses a program that would be compiled here and run in another process."""
    whole = "Give the whole value (on='once', partitioned=False)"
    if program.is_exported:
        slots.refuse_export(
            equation.params.callback,
            "each device calls it for its own block, and this process chooses the"
            f" blocks when it compiles the program. {whole}",
        )
    if _jax.executables_are_shared() and equation.across:
        callback = equation.params.callback
        raise HostcallError(
            f"hostcall: each device calls `{callback.name}` (at {callback.place})"
            " for its own block, but one process compiles this program for all"
            " processes (jax_share_binary_between_hosts), and that process does not"
            f" know the blocks of the others. {whole}, or switch that option off"
        )


def _partitioned(
    block: Callable[[Any, Sequence[Any], Sequence[Any]], Callable[..., Any]],
    unpartitioned: Callable[..., Any],
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
        shardings = [_even(arg, everywhere) for arg in args[1:]]
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
