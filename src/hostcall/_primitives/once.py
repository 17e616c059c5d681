"""Calls and taps in a shard_map that is manual over some mesh axes only.

Along the other axes the compiler splits the values, and only it knows how. So the
values are gathered along them, as for JAX's debug callbacks, and of the devices that
differ only there the first makes the call: the others have a mask that is False. All of
them come to the call, so that a failure reaches all of them. Then the first device's
results go to the others, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from hostcall import _jax
from hostcall._engine.params.equation import Equation
from hostcall._jax.types import LoweringContext, Primitive, Value
from hostcall._primitives.across import bits, from_bits
from hostcall._primitives.emit import check_place, check_platform, refuse_some_axes

Lowering = Callable[..., list[Value]]  # (program, *operands, params=) -> results


def register(primitive: Primitive, here: Lowering, elsewhere: Lowering) -> None:
    """Registers the lowerings of a kind of equation, with what they begin with.

    Args:
        primitive: the primitive.
        here: for the platforms that the engine serves.
        elsewhere: through JAX's own callback, with its cost: it brings the arrays to
            the host, and the engine runs on them, so rows, masks, dtypes and errors are
            the same. Where JAX has no callback, the equation is refused.
    """

    def lowered(
        rule: Lowering, ctx: LoweringContext, *operands: Value, params: Equation
    ) -> list[Value]:
        if rule is elsewhere:
            check_platform(ctx, params.shown)
        program = _jax.program_of(ctx)
        check_place(program, params)
        if program.automatic:
            return _lower(program, operands, params, primitive.bind)
        return rule(program, *operands, params=params)

    given = partial(lowered, here), partial(lowered, elsewhere)
    _jax.register_lowering(primitive, *given)


def _lower(
    program: _jax.Program,
    operands: Sequence[Value],
    params: Equation,
    bind: Callable[..., list[jax.Array]],
) -> list[Value]:
    """Lowers the equation to itself, inside a region that is manual over all axes."""
    if not params.runs_along_axes:
        refuse_some_axes(program, params.callback.name)
    if params.options.order == "ordered" and not _jax.SHARDS_TOKENS_OVER_SOME_AXES:
        remedy = ", or leave out order='ordered', or use jaxlib 0.11.2 or later"
        refuse_some_axes(program, params.callback.name, remedy)
    axes = sorted(program.automatic, key=str)
    masked = params if params.masked else params.with_mask()

    def once(*values: jax.Array) -> list[jax.Array]:
        first = jax.lax.axis_index(tuple(axes)) == 0
        mask, *rest = values if params.masked else (True, *values)
        results = bind(jnp.logical_and(mask, first), *rest, params=masked)
        return results if params.through else [_firsts(x, first, axes) for x in results]

    return _jax.lower_by(
        program.ctx, lambda *values: _jax.manual_over(once, values), *operands
    )


def _firsts(value: jax.Array, first: jax.Array, axes: Sequence[Hashable]) -> jax.Array:
    """The value of the first device along these axes, on all of them."""
    with jax.enable_x64(True):  # without it JAX has no 64-bit integers
        parts = [jnp.where(first, part, 0) for part in bits(value)]
        parts = [jax.lax.pmax(part, tuple(axes)) for part in parts]
        return from_bits(value.dtype, iter(parts))
