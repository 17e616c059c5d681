"""Host code on each device of a partitioned program, for its own block of the values.

Which block that is, only the compiler knows, and it says so where it partitions: there
`jax.experimental.custom_partitioning` asks for the program of one device. What stands
there has no effect that JAX knows, and would be dropped if nobody used it. So there are
three parts, held together by a number that means nothing:

    before = link(0)           the effect: after what came before
    ran    = parts(before, x)  custom-partitioned: each device does its block
    link(ran)                  the effect: what comes after, comes after this

No part moves data between devices: the number is the same everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core.errors import HostcallError
from hostcall._core.order import Order, effects_of
from hostcall._engine import targets
from hostcall._primitives import emit

NUMBER = _jax.ShapedArray((), np.dtype(np.int32))

# --- A link in the order of effects, as a value --------------------------------------

link_p = _jax.Primitive("host_link")


def _link_abstract_eval(
    number: Any, *, order: Order, mark: int
) -> tuple[Any, set[Any]]:
    del number, mark
    return NUMBER, effects_of(order)


def _lower_link(ctx: Any, number: Any, *, order: Order, mark: int) -> list[Any]:
    return emit.emit(
        ctx,
        targets.LINK_TARGET,
        [number],
        {"mark": np.uint64(mark)},
        order=order,
        has_side_effect=True,
    )


_jax.def_effectful_abstract_eval(link_p, _link_abstract_eval)
_jax.register_lowering(link_p, _lower_link)


# --- The part of one device -----------------------------------------------------------


class Site:
    """What the parts of one equation share. Parameters are compared by its identity."""

    def __init__(self, ctx: Any, params: Any, client: Any) -> None:
        self.params = params
        self.client = client
        self.across = _jax.spans_processes(ctx)
        self.slots: list[Any] = []  # they live as long as the executable


def emit_block(
    ctx: Any,
    target: str,
    operands: Sequence[Any],
    site: Site,
    plan: Any,
    signature: int,
) -> list[Any]:
    """The custom call of one device: the links have its order, the site its slot."""
    slot, attributes = emit.take_slot(plan, signature)
    site.slots.append(slot)
    return emit.emit(
        ctx, target, operands, attributes, order="pure", has_side_effect=True
    )


# --- The whole ------------------------------------------------------------------------


def lower_blocks(
    ctx: Any,
    operands: Sequence[Any],
    site: Site,
    block: Callable[[Any, Sequence[Any], Sequence[Any]], Callable[..., Any]],
    unpartitioned: Callable[..., Any],
) -> list[Any]:
    """Lowers an equation without results to its parts.

    Args:
        ctx: of the equation.
        operands: its values.
        site: of the equation, whose order is "unordered" or "ordered".
        block: (replicated sharding, each operand's sharding, each one's shape) -> the
            function of one device, (number, *blocks) -> number.
        unpartitioned: the same before anything is partitioned.
    """
    _refuse(ctx, site)
    emit.keep(ctx, site, site.params.callback.name)
    order = site.params.order
    # In the program's text. JAX's compilation cache must not know the program from
    # elsewhere: its slots are taken where it is compiled.
    mark = int.from_bytes(os.urandom(7), "little")

    def parts(*arrays: Any) -> list[Any]:
        before = link_p.bind(jnp.int32(0), order=order, mark=mark)
        ran = _partitioned(block, unpartitioned)(before, *arrays)
        link_p.bind(ran, order=order, mark=0)
        return []

    return _jax.lower_by(ctx, parts, *operands)


def _refuse(ctx: Any, site: Site) -> None:
    """Where what is compiled here would run in another process."""
    whole = "Give the whole value (sharding='whole', partitioned=False)"
    if _jax.is_for_export(ctx):
        emit.refuse_export(
            site.params,
            "each device calls it for its own block, and which block that is is settled"
            f" where the program is compiled, by this process. {whole}",
        )
    if _jax.executables_are_shared() and site.across:
        callback = site.params.callback
        raise HostcallError(
            f"hostcall: `{callback.name}` (at {callback.place}) is called"
            " by each device for its own block, in a program over several processes"
            " that one of them compiles for all (jax_share_binary_between_hosts). The"
            f" blocks of the others are not known there. {whole}, or switch that off"
        )


def _partitioned(
    block: Callable[[Any, Sequence[Any], Sequence[Any]], Callable[..., Any]],
    unpartitioned: Callable[..., Any],
) -> Any:
    # Here, since importing it takes 10 ms that most programs need not pay.
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
        """No two dimensions have to do with each other."""
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
    """Its sharding; whole where its blocks differ in size, and the last is padded."""
    try:
        arg.sharding.devices_indices_map(arg.shape)
    except (AssertionError, ValueError):
        return everywhere
    return arg.sharding
