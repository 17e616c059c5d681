"""Calls and taps in a shard_map that is manual over some mesh axes only.

Along the other axes the compiler splits the values, and only it knows how. So the
values are gathered along them, as for JAX's debug callbacks. Of the devices that differ
only there, the first makes the call: the others have a mask that is False. All of them
come to the call, so that a failure reaches all of them. Then the first device's results
go to the others, bit for bit.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp

from hostcall import _jax
from hostcall._core import errors
from hostcall._engine.params.equation import Equation
from hostcall._jax.types import Primitive, Value
from hostcall._primitives.outcome import bits, from_bits


def refuse_some_axes(program: _jax.Program, name: str, remedy: str = "") -> None:
    """Refuses a shard_map that is manual over some mesh axes only."""
    if program.automatic:
        axes = sorted(map(str, program.automatic))
        text = (
            f"hostcall: `{name}` is called inside a shard_map that is manual over some"
            f" mesh axes only. Make it manual over {axes} too{remedy}"
        )
        raise NotImplementedError(errors.with_code(text, "hc-device"))


def lower_once(
    program: _jax.Program,
    operands: Sequence[Value],
    params: Equation,
    primitive: Primitive,
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
        # All devices come to the call, so that it is one team's. One makes it.
        is_first = jax.lax.axis_index(tuple(axes)) == 0
        mask, *rest = values if params.masked else (True, *values)
        lets = jnp.logical_and(mask, is_first)
        results: list[jax.Array] = primitive.bind(lets, *rest, params=masked)
        if params.through:  # each device has its arguments, which are equal
            return results
        return [_firsts(value, is_first, axes) for value in results]

    def over_all_axes(*values: jax.Array) -> Sequence[jax.Array]:
        return _jax.manual_over(once, values)

    return _jax.lower_by(program.ctx, over_all_axes, *operands)


def _firsts(
    value: jax.Array, is_first: jax.Array, axes: Sequence[Hashable]
) -> jax.Array:
    """The value of the first device along these axes, on all of them."""
    with jax.enable_x64(True):  # without it JAX has no 64-bit integers
        # As in outcome.py: the maximum of one device's bits and zeros is its bits.
        masked = [jnp.where(is_first, array, 0) for array in bits(value)]
        maxima = [jax.lax.pmax(array, tuple(axes)) for array in masked]
        return from_bits(value.dtype, iter(maxima))
