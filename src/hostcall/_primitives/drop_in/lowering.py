"""The lowering of a drop-in: a call, with JAX's checks of where it may stand."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from hostcall import _jax
from hostcall._core.spec import Results, Static, Template
from hostcall._engine import targets
from hostcall._engine.info import CallInfo
from hostcall._engine.params.drop_in import DropInParams
from hostcall._jax.types import Aval, LoweringContext, Value
from hostcall._primitives.blocks import Partitioned, Places, lower_blocks
from hostcall._primitives.call import lowering as call_lowering
from hostcall._primitives.drop_in.primitive import PRIMITIVES, bind
from hostcall._primitives.emit import NUMBER


def lower(ctx: LoweringContext, *operands: Value, params: DropInParams) -> list[Value]:
    """The lowering of our primitives, and on CPUs of JAX's (_compat/lowerings.py)."""
    program = _jax.program_of(ctx)
    if params.kind == "debug" and program.automatic:
        axes = sorted(program.automatic, key=str)
        return _lower_once_along(ctx, operands, axes, params)
    if not _jax.is_served(ctx):
        # Through JAX's own callback, which refuses what JAX refuses.
        return call_lowering.lower_through_jax(
            program, *operands, params=params, partitioned=params.partitioned
        )
    if params.partitioned and program.is_partitioned:
        targets.start_lowering(program)
        equation = CallBlocks(program, params)
        _jax.run_where_dispatched(program)
        return lower_blocks(program, operands, equation)
    place = _jax.place_of_callback(ctx, params.options.sharding)
    if program.is_partitioned:
        _jax.mark_place(ctx, place)
    avals = _jax.physical_avals(ctx.avals_in)
    return call_lowering.lower(program, operands, avals, params)


def _lower_once_along(
    ctx: LoweringContext,
    operands: Sequence[Value],
    automatic: list[Hashable],
    params: DropInParams,
) -> list[Value]:
    """A debug callback in a shard_map that is manual over some mesh axes only: it runs
    once along the others.
    """

    def call(*values: jax.Array) -> list[jax.Array]:
        return list(_jax.on_first_of(automatic, lambda: bind(*values, params=params)))

    return _jax.lower_by(ctx, call, *operands)


# --- partitioned=True: each device calls for its own block ----------------------------


class CallBlocks(Partitioned):
    """What the parts of a call share."""

    target = targets.TARGET

    def __init__(self, program: _jax.Program, params: DropInParams) -> None:
        super().__init__(program, self._info(params, program))

    @staticmethod
    def _info(params: DropInParams, program: _jax.Program | CallBlocks) -> CallInfo:
        info = params.info(program.by_ordinal, None)
        info.job = targets.failures_over(program.across)
        return info

    def of_block(
        self, avals: list[Aval], places: Places
    ) -> tuple[CallInfo, list[Aval], None]:
        del places
        return self._info(_with_number(self.params), self), [NUMBER, *avals], None


def _with_number(params: DropInParams) -> DropInParams:
    """The same call, with the number as its first argument and as its result."""
    callback = params.callback
    fn, template = callback.function, callback.template

    def call(number: Any, *leaves: Any) -> np.ndarray:
        args, kwargs = template.fill(leaves)
        fn(*args, **kwargs)
        return np.zeros((), np.int32)

    call.__qualname__ = callback.name
    return replace(
        params,
        callback=replace(
            callback,
            fn=Static(call),
            template=Template.flat(None, *template.keys),
            results=Results(jax.tree.structure(0), (NUMBER,), (None,)),
            fills=(None,),
        ),
        avals=(NUMBER,),
        results_as="leaves",
    )


for _primitive in PRIMITIVES.values():
    _jax.register_lowering(_primitive, lower)
