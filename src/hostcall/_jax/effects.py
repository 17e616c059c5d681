"""Which of JAX's effects are hostcall's, and what JAX may do with them."""

from __future__ import annotations

from jax._src import effects as _effects

from hostcall._jax.types import Effect

# The effects that nothing but an engine's call has.
own_effects = _effects.EffectTypeSet()


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
