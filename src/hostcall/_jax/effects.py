"""JAX's effects and the tokens that stand for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import dispatch as _dispatch
from jax._src import effects as _effects

from hostcall._jax.fast_dispatch import marks
from hostcall._jax.hoisting import keep_in_loops

Effect = _effects.Effect


class StandIn:
    """A base of effects that take the place of one of JAX's, and are equal to it."""


def register_effect(effect_type: type, ordered: bool) -> None:
    """Allows an effect in all of JAX's transformations that hostcall supports."""
    _effects.lowerable_effects.add_type(effect_type)
    _effects.control_flow_allowed_effects.add_type(effect_type)
    _effects.custom_derivatives_allowed_effects.add_type(effect_type)
    _effects.remat_allowed_effects.add_type(effect_type)
    # Without this, partial evaluation under grad drops effectful equations of a scan
    # that have no outputs.
    _effects.partial_eval_kept_effects.add_type(effect_type)
    keep_in_loops(effect_type)
    if ordered:
        _effects.ordered_effects.add_type(effect_type)
        _effects.shardable_ordered_effects.add_type(effect_type)


def tokens() -> list[Any]:
    """The tokens of the newest programs with effects that this thread dispatched."""
    held = _dispatch.runtime_tokens
    latest = [*held.current_tokens.values(), *held.output_runtime_tokens.values()]
    return [*marks(), *latest]


def wait_for_effects(
    is_failure: Callable[[BaseException], bool] = lambda error: False,
) -> list[BaseException]:
    """Waits for the programs with effects that this thread has dispatched.

    Unlike `jax.effects_barrier`, which in 0.10.2 stops at the first failed program and
    fails on the same one at the next wait, this waits for all of them.

    Args:
        is_failure: whether a KeyboardInterrupt or SystemExit raised by the wait is a
            callback's own exception. Any other one is raised.

    Returns:
        The exceptions that the programs failed with, each once.
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
    """Forgets this thread's token of `effect` if the program that left it has failed.

    Returns the text of that failure, else None. Does not wait for a program that is
    still running.
    """
    tokens = _dispatch.runtime_tokens.current_tokens
    # A scan, not a look-up: the effect's `__hash__` calls this function. It is compared
    # by value: a program that was exported has another object for the same effect.
    token = next((t for e, t in list(tokens.items()) if e == effect), None)
    buffer = getattr(token, "_buf", None)
    if buffer is None or not buffer.is_ready():
        return None
    try:
        buffer.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        # JAX asked for the effect's hash to look into this very dictionary, so change
        # it in place. Rebuild it instead of deleting one key: deletion would ask for
        # this effect's hash again.
        kept = [(e, t) for e, t in tokens.items() if e != effect]
        tokens.clear()
        tokens.update(kept)
        return str(error)
    return None


def is_token_ready(token: Any) -> bool:
    """Whether an ordered effect's token is ready; False for other tokens, which JAX
    gives no way to ask.
    """
    array = getattr(token, "_buf", None)
    return array is not None and bool(array.is_ready())


def forget_tokens(given: Sequence[Any]) -> None:
    """Removes these tokens from those that JAX's next wait for effects waits for."""
    tokens = _dispatch.runtime_tokens
    numbers = set(map(id, given))
    for latest in (tokens.output_runtime_tokens, tokens.current_tokens):
        kept = [(key, t) for key, t in list(latest.items()) if id(t) not in numbers]
        if len(kept) < len(latest):
            latest.clear()
            latest.update(kept)
