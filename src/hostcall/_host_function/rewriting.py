"""Rules that replace finished equations: under remat, and where results are unused.

Both can leave the derivative out of a program: what remains of a host_jvp whose
tangents nobody needs is the function itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hostcall import _jax
from hostcall._host_function.primitive import Pair, jvp_p, value_p


def _split_under_remat(saveable: Any, unknown: Any, inst: Any, eqn: Any) -> Any:
    """The forward pass computes only the results, by the function itself.

    The backward pass computes the whole equation again, and is split then.
    """
    del saveable
    n = eqn.params["n"]
    what: Pair = eqn.params["what"]
    n_outs = len(what.value.avals)
    residuals = [
        v
        for v, here in zip(eqn.invars, inst, strict=True)
        if not here and not _jax.is_literal(v)
    ]
    everything = [True] * len(eqn.outvars)
    if any(unknown[:n]):
        return None, eqn, everything, everything, residuals
    if not any(unknown):
        return eqn, eqn, [False] * len(everything), everything, residuals
    known = _value_of(eqn)
    outs_unknown = [i >= n_outs for i in range(len(everything))]
    return known, eqn, outs_unknown, everything, residuals


_jax.partial_eval_rules[jvp_p] = _split_under_remat


# --- Dead code ---------------------------------------------------------------------


def _drop_residuals(used: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    if not any(used):
        return [False] * len(eqn.invars), None
    smaller = eqn.params["what"].narrowed(used)
    if smaller is not None:
        outvars = eqn.outvars[: len(smaller.avals)]
        eqn = eqn.replace(params={"what": smaller}, outvars=outvars)
    return [True] * len(eqn.invars), eqn


def _drop_tangents(used: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    if not any(used):
        return [False] * len(eqn.invars), None
    n, value = eqn.params["n"], eqn.params["what"].value
    if any(used[len(value.avals) :]):
        return [True] * len(eqn.invars), eqn
    return [i < n for i in range(len(eqn.invars))], _value_of(eqn)


def _value_of(eqn: Any) -> Any:
    """The equation of the function itself, in place of its host_jvp."""
    n, value = eqn.params["n"], eqn.params["what"].value
    return eqn.replace(
        primitive=value_p,
        params={"what": value},
        invars=eqn.invars[:n],
        outvars=eqn.outvars[: len(value.avals)],
    )


_jax.register_dce(value_p, _drop_residuals)
_jax.register_dce(jvp_p, _drop_tangents)
