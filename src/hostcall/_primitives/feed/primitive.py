"""The feed primitive itself: impl, abstract eval, batching.

It has no rule for derivatives. Its operands are bools, whose tangents are always zero,
so JAX never asks for one: an item is a constant. Where a derivative would take items
twice, it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from hostcall import _jax
from hostcall._core import failures
from hostcall._core.errors import DerivativeError
from hostcall._core.order import effects_of
from hostcall._engine.params.feed import FeedParams
from hostcall._primitives.axes import size_of
from hostcall._primitives.call.batching import batch
from hostcall._primitives.eager import run_now

feed_p = _jax.Primitive("host_feed")
feed_p.multiple_results = True
_jax.hold_weakly_in_caches(FeedParams)


def bind(*operands: Any, params: FeedParams) -> list[Any]:
    return feed_p.bind(*operands, params=params)  # type: ignore[no-any-return]


# --- impl --------------------------------------------------------------------------


def _impl(*operands: Any, params: FeedParams) -> list[Any]:
    try:
        results = run_now(operands, params)
    except BaseException as error:
        failures.keep(error, handed_over=True)
        raise
    return results


feed_p.def_impl(_impl)


# --- abstract eval -----------------------------------------------------------------


def _abstract_eval(*operands: Any, params: FeedParams) -> tuple[list[Any], set[Any]]:
    avals = _jax.result_avals(params.out_avals, operands, pure=False)
    return avals, effects_of(params.order)


_jax.def_effectful_abstract_eval(feed_p, _abstract_eval)


def _would_run_twice(params: dict[str, Any]) -> DerivativeError:
    name = params["params"].callback.name
    return DerivativeError(
        f"hostcall: jax.linearize or jax.grad of a while_loop that takes items of the"
        f" feed `{name}`, on which its derivative depends. JAX would run the loop"
        " twice, with other items the second time, so the derivative would not be that"
        " of the value. Use lax.scan, with where= for steps that take no item, or"
        " jax.jvp, which runs the loop once. If the loop has no derivative, put"
        " jax.lax.stop_gradient around what it starts with"
    )


_jax.run_once_in_while_loops(feed_p, _would_run_twice)


# --- batching ----------------------------------------------------------------------


def _batch(
    operands: Sequence[Any], dims: Sequence[int | None], *, params: FeedParams
) -> tuple[list[Any], tuple[int, ...]]:
    """One item for each row if `rows=` depends on the row; else one for all rows.

    In the second case only the mask depends on the row. An item is then taken if some
    row wants one, and the other rows see zeros.
    """
    if any(dim is not None for dim in dims[1:]) or not params.masked:
        return batch(operands, dims, params=params, primitive=feed_p)
    mask, size = _jax.moveaxis(operands[0], dims[0], 0), size_of(operands, dims)
    outs = bind(mask.any(axis=0), *operands[1:], params=params)
    flags = params.batched[0] if params.grid else ()
    # The mask has some of the grid's axes, each result all of them, in the same order.
    wide = [n if has else 1 for n, has in zip(params.grid, flags, strict=True)]
    mask = mask.reshape(size, *wide)
    shown = []
    for out, aval in zip(outs, params.avals, strict=True):
        here = mask.reshape(*mask.shape, *(1,) * len(aval.shape))
        shown.append(jnp.where(here, out[None], jnp.zeros((), out.dtype)))
    return shown, (0,) * len(shown)


_jax.batchers[feed_p] = _batch
