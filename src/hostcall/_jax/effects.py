"""JAX's effects and the tokens that stand for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import effects as _effects

from hostcall._jax.fast_dispatch import marks, own_effects
from hostcall._jax.types import Device, Effect, Token


def register_effect(effect_type: type, ordered: bool) -> None:
    """Allows an effect in all of JAX's transformations that hostcall supports."""
    _effects.lowerable_effects.add_type(effect_type)
    _effects.control_flow_allowed_effects.add_type(effect_type)
    _effects.custom_derivatives_allowed_effects.add_type(effect_type)
    _effects.remat_allowed_effects.add_type(effect_type)
    # Without this, partial evaluation under grad drops effectful equations of a scan
    # that have no outputs.
    _effects.partial_eval_kept_effects.add_type(effect_type)
    own_effects.add_type(effect_type)
    if ordered:
        _effects.ordered_effects.add_type(effect_type)
        _effects.shardable_ordered_effects.add_type(effect_type)


def is_ordered(effect: Effect) -> bool:
    """Whether programs with this effect run one after another on each device."""
    return bool(_effects.ordered_effects.contains(effect))


def tokens() -> list[Token]:
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


def before_tokens(then: Callable[[Effect], None]) -> None:
    """Calls `then(effect)` before JAX takes the token of an ordered effect, which it
    passes to the program that it dispatches.

    The first token is made by a transfer. JAX makes an implicit one, which a transfer
    guard refuses; here it is explicit.
    """
    plain = _dispatch.RuntimeTokenSet.get_token_input

    @functools.wraps(plain)
    def get_token_input(
        self: _dispatch.RuntimeTokenSet, effect: Effect, devices: Sequence[Device]
    ) -> Token:
        then(effect)
        with _config.explicit_device_put_scope():
            return plain(self, effect, devices)

    _dispatch.RuntimeTokenSet.get_token_input = get_token_input


def token_of(effect: Effect) -> Token | None:
    """The token that this thread's newest program with an ordered effect has left."""
    return _dispatch.runtime_tokens.current_tokens.get(effect)


def is_token_ready(token: object) -> bool:
    """Whether an ordered effect's token is ready; False for other tokens, which JAX
    gives no way to ask.
    """
    return isinstance(token, _core.Token) and bool(token._buf.is_ready())


def forget_tokens(given: Sequence[Token]) -> None:
    """Removes these tokens from those that JAX's next wait for effects waits for."""
    tokens = _dispatch.runtime_tokens
    numbers = set(map(id, given))
    for latest in (tokens.output_runtime_tokens, tokens.current_tokens):
        kept = [(key, t) for key, t in list(latest.items()) if id(t) not in numbers]
        if len(kept) < len(latest):
            latest.clear()
            latest.update(kept)
