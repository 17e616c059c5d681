"""The feed primitive: the next item of a feed, and whether there was one.

Its operands are the mask of `where=`, if there is one, and then what `rows=` gave. The
latter have no elements: they only tell vmap that each row wants an item of its own.

It has no rule for derivatives. Its operands are bools, whose tangents are always zero,
so JAX never asks for one: an item is a constant. Where a derivative would take items
twice, it is refused.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hostcall import _jax
from hostcall._core.errors import DerivativeError
from hostcall._engine.params.equation import CallParams
from hostcall._engine.params.feed import FeedParams
from hostcall._primitives.batching import Batched, Dims, Operands, batch, size_of
from hostcall._primitives.call import define, lower, lower_through_jax
from hostcall._primitives.eager import bind_or_call, call_now
from hostcall._primitives.lowering import register


def _would_run_twice(equation: dict[str, CallParams]) -> DerivativeError:
    name = equation["params"].callback.name
    return DerivativeError(
        f"hostcall: jax.linearize or jax.grad of a while_loop that takes items of the"
        f" feed `{name}`, on which its derivative depends. JAX would run the loop"
        " twice, with other items the second time, so the derivative would not be that"
        " of the value. Use lax.scan, with where= for steps that take no item, or"
        " jax.jvp, which runs the loop once. If the loop has no derivative, put"
        " jax.lax.stop_gradient around what it starts with"
    )


feed_p = define("host_feed", call_now, _would_run_twice)


def bind(*operands: jax.Array, params: FeedParams) -> list[jax.Array]:
    return bind_or_call(feed_p, operands, params=params)


# --- batching ----------------------------------------------------------------------


def _batch(operands: Operands, dims: Dims, *, params: FeedParams) -> Batched:
    """One item for each row if `rows=` depends on the row; else one for all rows.

    In the second case only the mask depends on the row. An item is then taken if some
    row wants one, and the other rows see zeros.
    """
    has_item_for_each = any(dim is not None for dim in dims[1:])
    if has_item_for_each or not params.masked:
        return batch(feed_p, operands, dims, params=params)
    # From here on the mask alone has the axis of this vmap.
    mask, *of_rows = operands
    size = size_of(operands, dims)
    mask = _jax.moveaxis(mask, dims[0], 0)
    outs = bind(mask.any(axis=0), *of_rows, params=params)
    # Of the grid, which inner vmaps have made, each result has all axes and the mask
    # some, in the same order. Size 1 stands for those that it lacks.
    has_axes = params.batched[0] if params.grid else ()
    sizes = [n if has else 1 for n, has in zip(params.grid, has_axes, strict=True)]
    mask = mask.reshape(size, *sizes)
    shown = []
    for out, aval in zip(outs, params.avals, strict=True):
        item_axes = (1,) * len(aval.shape)
        taken = mask.reshape(*mask.shape, *item_axes)
        with _jax.able_to_hold(out.dtype):
            shown.append(jnp.where(taken, out[None], jnp.zeros((), out.dtype)))
    return shown, (0,) * len(shown)


_jax.batchers[feed_p] = _batch


# --- lowering ----------------------------------------------------------------------


# In place of the engine, JAX's own callback asks the ring for items.
register(feed_p, lower, lower_through_jax)
