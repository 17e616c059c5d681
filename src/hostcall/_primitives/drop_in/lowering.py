"""The lowering of a drop-in: a call, with JAX's checks of where it may stand."""

from __future__ import annotations

from typing import Any

from hostcall import _jax
from hostcall._engine.params.drop_in import DropInInfo, DropInParams
from hostcall._primitives.call import lowering as call_lowering
from hostcall._primitives.drop_in import blocks
from hostcall._primitives.drop_in.primitive import PRIMITIVES, bind


def lower(ctx: Any, *operands: Any, params: DropInParams) -> list[Any]:
    """The lowering of our primitives, and on CPUs of JAX's (_compat/lowerings.py)."""
    program, ordered = _jax.program_of(ctx), params.flavour.ordered
    if params.kind == "debug" and program.automatic:
        axes = sorted(program.automatic, key=str)
        return _lower_once_along(ctx, operands, axes, params)
    if not _jax.is_served(ctx):
        # Through JAX's own callback, which refuses what JAX refuses.
        return call_lowering.lower_through_jax(
            ctx,
            *operands,
            params=params,
            info_type=DropInInfo,
            ordered=ordered,
            partitioned=params.partitioned,
        )
    if params.partitioned and program.is_partitioned:
        return blocks.lower(program, operands, params)
    place = _jax.place_of_callback(ctx, params.sharding)
    if program.is_partitioned:
        _jax.mark_place(ctx, place)
    avals = _jax.physical_avals(ctx.avals_in)
    return call_lowering.lower(program, operands, avals, params, DropInInfo, ordered)


def _lower_once_along(
    ctx: Any, operands: Any, automatic: list[Any], params: DropInParams
) -> list[Any]:
    """A debug callback in a shard_map that is manual over some mesh axes only: it runs
    once along the others.
    """

    def call(*values: Any) -> Any:
        return _jax.on_first_of(automatic, lambda: bind(*values, params=params))

    return _jax.lower_by(ctx, call, *operands)


for _primitive in PRIMITIVES.values():
    _jax.register_lowering(_primitive, lower)
