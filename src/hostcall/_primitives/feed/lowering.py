"""The lowering of a feed: the custom call of a call, with a plan that has a ring."""

from __future__ import annotations

from typing import Any

from hostcall import _jax
from hostcall._engine.params.feed import FeedParams
from hostcall._primitives.call.lowering import lower, lower_through_jax
from hostcall._primitives.emit import check_place, check_platform, refuse_some_axes
from hostcall._primitives.feed.primitive import feed_p


def _lower(ctx: Any, *operands: Any, params: FeedParams) -> list[Any]:
    program = _jax.program_of(ctx)
    refuse_some_axes(program, params.callback.name)
    check_place(program, params.sharding, params.callback.name)
    return lower(program, operands, ctx.avals_in, params)


def _lower_elsewhere(ctx: Any, *operands: Any, params: FeedParams) -> list[Any]:
    """Lowers the feed through JAX's own callback, which asks the engine for items."""
    check_platform(ctx, f"`{params.callback.name}`")
    return lower_through_jax(ctx, *operands, params=params)


_jax.register_lowering(feed_p, _lower, _lower_elsewhere)
