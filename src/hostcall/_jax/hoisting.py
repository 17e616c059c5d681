"""Keeps JAX from moving calls with effects out of a scan under grad.

When JAX splits a scan into what it knows and what is linear, it evaluates equations
once, before the loop, if all their operands are loop-invariant. It does so with
equations that have effects, too: a call with constant operands would run once, not once
a step. This happens in two places of jax/_src/lax/control_flow/loops.py, under
linearize (`_scan_known_hoisting`) and under remat (`_scan_partial_eval_custom`).

The remedy: both places get the loop's body with its effectful equations in disguise. A
disguised equation tells partial evaluation that its results are not known, whatever its
operands are, and takes the disguise off as it is put into the loop. Everything else is
hoisted as before. JAX's own callbacks are left as they are.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

from jax.interpreters import partial_eval as _pe

from hostcall._jax.door import core as _core
from hostcall._jax.door import effects as _effects
from hostcall._jax.door import partial_eval as _src_pe
from hostcall._jax.tracing import own_effects
from hostcall._jax.types import Jaxpr, JaxprEquation, Trace, Tracer
from hostcall._jax.versions import changed

_disguised_p = _core.Primitive("host_call_in_a_loop")
_disguised_p.multiple_results = True


def _disguise(jaxpr: Jaxpr) -> Jaxpr:
    """The body of a loop with its effectful equations disguised."""
    if not own_effects.filter_in(jaxpr.effects):
        return jaxpr
    eqns: list[JaxprEquation] = []
    for eqn in jaxpr.eqns:
        if own_effects.filter_in(eqn.effects):
            # Its operands, results and effects stay as they are.
            eqn = eqn.replace(primitive=_disguised_p, params={"eqn": eqn})
        eqns.append(eqn)
    return changed(jaxpr, eqns=eqns)


def _stage(trace: Trace, *tracers: Tracer, eqn: JaxprEquation) -> list[Tracer]:
    """Puts the equation into the loop; its results are not known."""
    operands = [trace.instantiate_const(tracer) for tracer in tracers]
    outs = [
        _pe.JaxprTracer(trace, _pe.PartialVal.unknown(v.aval), None)
        for v in eqn.outvars
    ]
    recipe = _src_pe.new_eqn_recipe(
        trace, operands, outs, eqn.primitive, eqn.params, eqn.effects, eqn.source_info
    )
    # As JAX's own staging: by its handle it stays, whether or not its results are used.
    if _effects.partial_eval_kept_effects.filter_in(eqn.effects):
        trace.effect_handles.append(_src_pe.EffectHandle(operands, recipe))
    for out in outs:
        out.recipe = recipe
    return outs


_pe.custom_partial_eval_rules[_disguised_p] = _stage


# --- The two places ------------------------------------------------------------------


# Whether the rule for remat is about to hoist.
_hoists = contextvars.ContextVar("hostcall.hoists", default=False)


@contextlib.contextmanager
def _hoisting(yes: bool) -> Iterator[None]:
    token = _hoists.set(yes)
    try:
        yield
    finally:
        _hoists.reset(token)


class _PartialEval:
    """JAX's module partial_eval as loops.py sees it, with one function replaced."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __getattr__(self, name: str) -> object:
        return getattr(self._plain, name)

    def partial_eval_jaxpr_nounits(
        self, jaxpr: Jaxpr, *args: object, **kwargs: object
    ) -> object:
        # loops.py also splits the bodies of while loops by this function. There,
        # nothing is hoisted, and a known call must stay known.
        if _hoists.get():
            jaxpr = _disguise(jaxpr)
        with _hoisting(False):
            return self._plain.partial_eval_jaxpr_nounits(jaxpr, *args, **kwargs)


# What is replaced (patches.py).


def hoisting_no_calls(plain: Callable[..., object]) -> Callable[..., object]:
    return lambda jaxpr, *args: plain(_disguise(jaxpr), *args)


def partial_eval_in_loops(plain: Any) -> _PartialEval:
    return _PartialEval(plain)


def scan_under_remat(plain: Callable[..., object]) -> Callable[..., object]:
    def rule(*args: object, **kwargs: object) -> object:
        with _hoisting(True):
            return plain(*args, **kwargs)

    return rule
