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

import abc
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp

from hostcall import _jax, _native
from hostcall._core.order import effects_with
from hostcall._engine import targets
from hostcall._engine.params.equation import Equation
from hostcall._engine.placement import Placement
from hostcall._engine.plans import plan_in_program
from hostcall._jax.types import (
    Aval,
    Effect,
    IrType,
    LoweringContext,
    Mesh,
    Sharding,
    Value,
)
from hostcall._primitives.lowering import NUMBER, EngineCall, make_slot

if TYPE_CHECKING:
    from hostcall._job.after_failure import Failures

# --- A link: it turns the order of effects into a data dependency --------------------

# With the sharding that the compiler chose.
Shaped: TypeAlias = jax.ShapeDtypeStruct

link_p = _jax.Primitive("host_link")


def _link_abstract_eval(
    number: Aval, *, partitioned: Partitioned, name: str
) -> tuple[Aval, frozenset[Effect]]:
    del number, name
    return NUMBER, effects_with(partitioned.params.effect)


def _lower_link(
    ctx: LoweringContext, number: Value, *, partitioned: Partitioned, name: str
) -> list[Value]:
    # The link behind the parts carries the name of the whole (see `Partitioned`).
    if name:
        _jax.name_partitioning(number, name)
    program = _jax.program_of(ctx)
    call = EngineCall(program, targets.LINK_TARGET, {}, has_side_effect=True)
    return call.emit([number], partitioned.params.effect)


link_p.def_effectful_abstract_eval(_link_abstract_eval)
_jax.register_lowering(link_p, _lower_link)


# --- The part of one device -----------------------------------------------------------

# What a part says of the devices of its program, as JSON. The compiler's choice makes
# it (`Partitioned.places`), the text of the block has it, and the plan is made of it.
Places = Sequence[Any]


class Partitioned(abc.ABC):
    """The whole equation, without results, as its parts have it.

    It is a parameter of their equations, and is compared by identity. The name of the
    whole call is put into the program when that is lowered. The compiler then adds to
    each part a text that says which block it is, and the engine asks `plan_of_block`
    for its plan when it loads the program. So a program from the compilation cache,
    for which no compiler asks again, finds its plans too.

    The order of the equation is "unordered" or "ordered".
    """

    target: ClassVar[str]  # the handler of one device's custom call

    def __init__(
        self,
        program: _jax.Program,
        params: Equation,
        *,
        job: Failures | None = None,
        nested: bool = False,
    ) -> None:
        """Puts the plan of the whole into a slot.

        Args:
            program: the program.
            params: the parameters of the whole equation.
            job: as in `Placement`.
            nested: as in `Placement`.
        """
        self.params = params
        self.placement = Placement(
            devices=program.by_ordinal,
            program_devices=program.devices,
            job=job,
            nested=nested,
        )
        self._client = program.client
        self._platforms = program.platforms
        self._avals = _jax.physical_avals(program.ctx.avals_in)
        # No device calls by this plan. It only leads to those of the blocks.
        placement = replace(self.placement, plan_of_block=self.plan_of_block)
        self.attributes = make_slot(program, params, placement, self._avals)

    def plan_of_block(self, block: str) -> _native.Plan:
        """The plan of the part that this text describes."""
        description = json.loads(block)
        # New ones: those of the whole may have a sharding, which a block has not.
        avals = [
            _jax.ShapedArray(tuple(shape), aval.dtype)
            for aval, shape in zip(self._avals, description["shapes"], strict=True)
        ]
        equation, placement, avals = self.of_block(avals, description["places"])
        return plan_in_program(
            equation, placement, avals, self._client, self._platforms
        )

    @abc.abstractmethod
    def of_block(
        self, avals: list[Aval], places: Places
    ) -> tuple[Equation, Placement, list[Aval]]:
        """What the plan of a part is made of, given the avals of its blocks."""

    def places(
        self,
        everywhere: Sharding,
        shardings: Sequence[Sharding],
        shapes: Sequence[tuple[int, ...]],
    ) -> Places:
        """What the text of a part says, given the compiler's choice of shardings.

        `everywhere` is the replicated sharding.
        """
        return ()


block_p = _jax.Primitive("host_block")


def _block_abstract_eval(
    *operands: Aval, partitioned: Partitioned, places: Places
) -> Aval:
    del operands, partitioned, places
    return NUMBER


def _lower_block(
    ctx: LoweringContext, *operands: Value, partitioned: Partitioned, places: Places
) -> list[Value]:
    """Emits the custom call of one device, which takes and returns the number.

    It is "pure": the links carry its order.
    """
    shapes = [aval.shape for aval in _jax.physical_avals(ctx.avals_in[1:])]
    block = json.dumps({"shapes": shapes, "places": places}, separators=(",", ":"))
    # The slot is that of the whole; the engine keeps a plan for each text beside it.
    attributes = {**partitioned.attributes, "block": block}
    program = _jax.program_of(ctx)
    call = EngineCall(program, partitioned.target, attributes, has_side_effect=True)
    return call.emit(operands, None)


block_p.def_abstract_eval(_block_abstract_eval)
_jax.register_lowering(block_p, _lower_block)


# --- The whole equation ---------------------------------------------------------------


def lower_blocks(
    program: _jax.Program, operands: Sequence[Value], partitioned: Partitioned
) -> list[Value]:
    """Lowers an equation without results to its three parts."""
    # As unique as the equation's own name, and the same in each process.
    name = "hostcall {key} {count}".format(**partitioned.attributes)

    def parts(*arrays: jax.Array) -> list[jax.Array]:
        start = link_p.bind(jnp.int32(0), partitioned=partitioned, name="")
        ran = _by_compiler(partitioned)(start, *arrays)
        link_p.bind(ran, partitioned=partitioned, name=name)
        return []

    return _jax.lower_by(program.ctx, parts, *operands)


def _by_compiler(partitioned: Partitioned) -> Callable[..., jax.Array]:
    """The middle part: a function of the number and the whole values, which the
    compiler replaces on each device by `block_p` on the blocks that it chose.
    """
    # Imported here because it takes 10 ms, which most programs need not pay.
    from jax.experimental.custom_partitioning import (
        SdyShardingRule,
        custom_partitioning,
    )

    @custom_partitioning
    def parts(number: jax.Array, *arrays: jax.Array) -> jax.Array:
        """What stands in the program until it is partitioned."""
        return block_p.bind(number, *arrays, partitioned=partitioned, places=())

    def partition(
        mesh: Mesh, args: Sequence[Shaped], result: Shaped
    ) -> tuple[Mesh, Callable[..., jax.Array], Sharding, tuple[Sharding, ...]]:
        everywhere = args[0].sharding  # of the number, which all devices have
        shapes = [arg.shape for arg in args[1:]]
        shardings = [_even(arg, everywhere) for arg in args[1:]]
        places = partitioned.places(everywhere, shardings, shapes)
        on_device = partial(block_p.bind, partitioned=partitioned, places=places)
        return mesh, on_device, result.sharding, (everywhere, *shardings)

    def rule(
        mesh: Mesh, values: Sequence[IrType], results: Sequence[IrType]
    ) -> SdyShardingRule:
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
    return parts  # type: ignore[no-any-return]


def _even(arg: Shaped, everywhere: Sharding) -> Sharding:
    """The sharding of `arg`; replicated if its blocks would differ in size.

    XLA pads the last block then, and host code must not see the padding.
    """
    try:
        arg.sharding.devices_indices_map(arg.shape)
    except (AssertionError, ValueError):
        return everywhere
    return arg.sharding
