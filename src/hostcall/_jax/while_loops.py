"""Refuses while loops that JAX would run twice, if that would be wrong.

When JAX splits a while loop into what it knows and what is linear (jax.linearize), and
only some of the carried values are differentiated, it runs the loop twice: once for the
known values, and once more, whole, for the others (`_while_partial_eval` in
jax/_src/lax/control_flow/loops.py). Equations with effects run both times.

A feed would give the second run other items than the first, so the derivative would not
be that of the value. It can't be mended here: the linear part of a loop must compute
the values again, and has nowhere to keep a number of items that is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax._src import core as _core
from jax._src.interpreters import partial_eval as _pe
from jax._src.lax.control_flow import loops as _loops

_refused: dict[_core.Primitive, Callable[[Any], Exception]] = {}


def refuse_in_split_while_loops(
    primitive: _core.Primitive, error: Callable[[Any], Exception]
) -> None:
    """Loops with this primitive are not split; `error` gets its equation's params."""
    _refused[primitive] = error


def _first_refused(jaxpr: Any) -> Any:
    for eqn in jaxpr.eqns:
        if eqn.primitive in _refused:
            return eqn
        for inner in _core.jaxprs_in_params(eqn.params):
            found = _first_refused(inner)
            if found is not None:
                return found
    return None


_split = _pe.custom_partial_eval_rules[_loops.while_p]


def _while_partial_eval(trace: Any, *tracers: Any, **params: Any) -> Any:
    known = {tracer.pval.is_known() for tracer in tracers}
    if len(known) == 2:
        for body in (params["cond_jaxpr"], params["body_jaxpr"]):
            eqn = _first_refused(body)
            if eqn is not None:
                raise _refused[eqn.primitive](eqn.params)
    return _split(trace, *tracers, **params)


_pe.custom_partial_eval_rules[_loops.while_p] = _while_partial_eval
