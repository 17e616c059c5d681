"""JAX's effects and the tokens that stand for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import effects as _effects
from jax._src.interpreters import mlir as _mlir

from hostcall._jax.lowering import lower_by

# --- Effects (_order) --------------------------------------------------------------

Effect = _effects.Effect


def register_effect(effect_type: type, ordered: bool) -> None:
    """Allows an effect in everything that hostcall supports."""
    _effects.lowerable_effects.add_type(effect_type)
    _effects.control_flow_allowed_effects.add_type(effect_type)
    _effects.custom_derivatives_allowed_effects.add_type(effect_type)
    _effects.remat_allowed_effects.add_type(effect_type)
    # Else a scan under grad, whose effects have no result, drops them.
    _effects.partial_eval_kept_effects.add_type(effect_type)
    if ordered:
        _effects.ordered_effects.add_type(effect_type)
        _effects.shardable_ordered_effects.add_type(effect_type)


def lower_batched_conditions(effect_type: type) -> None:
    """Lowers `while_loop`s whose condition is batched and has this ordered effect.

    JAX's rule for ordered effects in a condition (0.10.2, 0.12.0.1) forgets there that
    rows stop one by one, and lets all of them run on. Every other loop stays JAX's.
    """
    table = _mlir._lowerings
    entry = table[jax.lax.while_p]

    def rule(ctx: Any, *operands: Any, cond_jaxpr: Any, **params: Any) -> Any:
        batched = bool(cond_jaxpr.out_avals[0].shape)
        ours = any(isinstance(effect, effect_type) for effect in cond_jaxpr.effects)
        if not (batched and ours):
            return entry.rule(ctx, *operands, cond_jaxpr=cond_jaxpr, **params)
        loop = _batched_while(cond_jaxpr=cond_jaxpr, **params)
        # Inside shard_map: what stopped rows keep varies as the condition does, which
        # the carry's types do not say. The program has been checked before.
        fixed = _core.ManualAxisType()
        plain = [
            aval.update(manual_axis_type=fixed) if hasattr(aval, "mat") else aval
            for aval in ctx.avals_in
        ]
        inner = ctx.replace(avals_in=plain)
        with _config._check_vma(False):
            outs = lower_by(inner, loop, *operands)
        ctx.set_tokens_out(inner.tokens_out)
        return outs

    table[jax.lax.while_p] = type(entry)(rule, entry.inline)


def _batched_while(
    *, cond_jaxpr: Any, body_jaxpr: Any, cond_nconsts: int, body_nconsts: int
) -> Callable[..., list[Any]]:
    """The loop with its condition moved into its body, and rows that stop."""
    condition, body = _core.jaxpr_as_fun(cond_jaxpr), _core.jaxpr_as_fun(body_jaxpr)

    def chosen(goes_on: Any, new: Any, old: Any) -> Any:
        rows = jax.lax.broadcast_in_dim(goes_on, new.shape, range(goes_on.ndim))
        return jax.lax.select(rows, new, old)

    def loop(*operands: Any) -> list[Any]:
        cond_consts = operands[:cond_nconsts]
        body_consts = operands[cond_nconsts : cond_nconsts + body_nconsts]
        start = operands[cond_nconsts + body_nconsts :]

        def again(state: Any) -> Any:
            goes_on, carry = state
            new = body(*body_consts, *carry)
            carry = [chosen(goes_on, n, c) for n, c in zip(new, carry, strict=True)]
            (still,) = condition(*cond_consts, *carry)
            return goes_on & still, carry

        (first,) = condition(*cond_consts, *start)
        _, carry = jax.lax.while_loop(
            lambda state: state[0].any(), again, (first, list(start))
        )
        return list(carry)

    return loop


def tokens() -> list[Any]:
    """Of the programs with effects that this thread has dispatched last."""
    held = _dispatch.runtime_tokens
    return [*held.current_tokens.values(), *held.output_runtime_tokens.values()]


def wait_for_effects(
    is_failure: Callable[[BaseException], bool] = lambda error: False,
) -> list[BaseException]:
    """Waits for what this thread has dispatched, as far as effects tell.

    Gives what programs failed with, each once: JaxRuntimeErrors, and what `is_failure`
    knows. JAX's own wait stops at the first that failed (0.10.2), and there fails again
    the next time.
    """
    found: dict[str, BaseException] = {}
    for token in tokens():
        try:
            token.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            found.setdefault(str(error), error)
        except (KeyboardInterrupt, SystemExit) as error:
            if not is_failure(error):
                raise
            found.setdefault(str(error), error)
    _dispatch.runtime_tokens.clear()
    return list(found.values())


def drop_failed_token(effect: Any) -> str | None:
    """Forgets this thread's token of `effect` if it is that of a program that failed.

    Gives what the program failed with. Does not wait for one that is under way.
    """
    tokens = _dispatch.runtime_tokens.current_tokens
    # Not by look-up: that would ask for the effect's hash, which asks for this.
    token = next((t for e, t in list(tokens.items()) if _is_same(e, effect)), None)
    buffer = getattr(token, "_buf", None)
    if buffer is None or not buffer.is_ready():
        return None
    try:
        buffer.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        # In place, since JAX is about to look into this dictionary; and what is put
        # back has hashes of its own.
        kept = [(e, t) for e, t in tokens.items() if not _is_same(e, effect)]
        tokens.clear()
        tokens.update(kept)
        return str(error)
    return None


def _is_same(effect: Any, other: Any) -> bool:
    """Without asking for a hash."""
    return effect is other or effect is getattr(other, "stands_for", other)


def is_token_ready(token: Any) -> bool:
    """Of the token of an ordered effect; of others that is not known."""
    array = getattr(token, "_buf", None)
    return array is not None and bool(array.is_ready())


def forget_tokens(given: Sequence[Any]) -> None:
    """JAX's next wait for effects passes these tokens over."""
    tokens = _dispatch.runtime_tokens
    numbers = set(map(id, given))
    for latest in (tokens.output_runtime_tokens, tokens.current_tokens):
        kept = [(key, t) for key, t in list(latest.items()) if id(t) not in numbers]
        if len(kept) < len(latest):
            latest.clear()
            latest.update(kept)
