"""Loops whose conditions have host calls, which XLA would lose or run too often.

XLA does not run the condition of a loop whose number of steps it knows, so unordered
effects in it would be lost. Under vmap, rows of a loop stop one by one. JAX's lowering
of a condition with an ordered effect (0.10.2, 0.12.0.1) ignores that, and lets every
row run on until the last one stops. So these loops are lowered here, with the condition
at the end of the body. All other loops keep JAX's lowering.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import jax

from hostcall._jax import types as _t
from hostcall._jax.door import config as _config
from hostcall._jax.door import core as _core
from hostcall._jax.door import effects as _effects
from hostcall._jax.lowering_api import lower_by
from hostcall._jax.tracing import own_effects
from hostcall._jax.versions import varying_over


def _is_lowered_here(effects: Collection[_t.Effect]) -> bool:
    """Whether a loop whose condition has these effects is lowered by hostcall."""
    engines = own_effects.filter_in(effects)
    if not engines:
        return False
    # An ordered drop-in has JAX's effect. With one, the loop runs as JAX's does.
    ordered = _effects.ordered_effects.filter_in(effects)
    return not ordered or any(effect in engines for effect in ordered)


def lowering_of_while(plain: Any) -> Any:
    """JAX's entry of its table of lowerings, with this rule (patches.py)."""
    return type(plain)(functools.partial(_lower, plain.rule), plain.inline)


def _lower(
    plain: Callable[..., object],
    ctx: _t.LoweringContext,
    *xs: _t.Value,
    cond_jaxpr: _t.Jaxpr,
    **params: Any,
) -> object:
    """Lowers a while loop, by `plain` if its condition has no call that must run."""
    if not _is_lowered_here(cond_jaxpr.effects):
        return plain(ctx, *xs, cond_jaxpr=cond_jaxpr, **params)
    # Inside shard_map, a carry in which some rows have stopped varies over the mesh
    # axes of the condition, and the carry's type may not say so. Lower with the
    # varying-axes check off: JAX checked the program when it was traced.
    avals = [
        aval if aval is _core.abstract_token else varying_over(aval)
        for aval in ctx.avals_in
    ]
    inner = ctx.replace(avals_in=avals)
    loop = functools.partial(_with_condition_inside, cond_jaxpr, **params)
    with _config._check_vma(False):
        outs = lower_by(inner, loop, *xs)
    ctx.set_tokens_out(inner.tokens_out)
    return outs


# Whether the loop goes on, of each row; and what it carries.
State: TypeAlias = tuple[jax.Array, list[jax.Array]]


def _with_condition_inside(
    cond_jaxpr: _t.Jaxpr,
    *operands: jax.Array,
    body_jaxpr: _t.Jaxpr,
    cond_nconsts: int,
    body_nconsts: int,
) -> list[jax.Array]:
    """The same loop with the condition computed in the body, so that rows can stop.

    That is: goes_on = condition(start), and as long as any row goes on

        carry = body(carry), in the rows that go on
        goes_on = goes_on & condition(carry)
    """
    first_start = cond_nconsts + body_nconsts
    body_consts = operands[cond_nconsts:first_start]
    start = list(operands[first_start:])
    condition = functools.partial(
        _core.jaxpr_as_fun(cond_jaxpr), *operands[:cond_nconsts]
    )
    body = functools.partial(_core.jaxpr_as_fun(body_jaxpr), *body_consts)

    def step(state: State) -> State:
        goes_on, carry = state
        next_carry = [
            _chosen(goes_on, new, old)
            for new, old in zip(body(*carry), carry, strict=True)
        ]
        (holds,) = condition(*next_carry)
        return goes_on & holds, next_carry

    def any_row_goes_on(state: State) -> jax.Array:
        goes_on, _ = state
        return goes_on.any()

    (holds_at_first,) = condition(*start)
    first_state = (holds_at_first, start)
    _, carry = jax.lax.while_loop(any_row_goes_on, step, first_state)
    return list(carry)


def _chosen(goes_on: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """The new value in the rows that go on, the old one in the others."""
    if goes_on.ndim == 0:  # the body runs only if the loop goes on
        return new
    rows = jax.lax.broadcast_in_dim(goes_on, new.shape, range(goes_on.ndim))
    return jax.lax.select(rows, new, old)
