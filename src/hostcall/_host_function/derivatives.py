"""Differentiation rules of the three primitives, and dead-code elimination.

The idea of the three primitives is in `primitive`. These are the rules:

    JVP of host_function        the object's own `jvp`, which binds host_jvp if both
                                modes may have rules
    partial eval of host_jvp    known arguments, unknown tangents: the results, and a
                                host_linear on the constants that its transpose needs
    transpose of host_linear    the object's `back`, which runs the backward rule
    JVP of host_jvp             takes it apart into results and host_linear, and
                                differentiates both as JAX code
    JVP of host_linear          binds it again on the tangents of its tangents, since it
                                is linear in those; differentiates the dependence on
                                its constants as JAX code
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hostcall import _jax
from hostcall._core.errors import DerivativeError
from hostcall._host_function.primitive import (
    Arrays,
    Linear,
    Pair,
    Tangents,
    Value,
    bind,
    bind_linear,
    jvp_p,
    linear_p,
    value_p,
)

# --- JVP ---------------------------------------------------------------------------


def _present(tangent: Any) -> Any:
    """The tangent; None if it is zero, or float0 as for an integer array."""
    if type(tangent) is _jax.Zero:
        return None
    if not hasattr(tangent, "dtype"):
        return jnp.asarray(tangent)  # jax.jvp lets Python numbers through
    return None if tangent.dtype == jax.dtypes.float0 else tangent


def _zeros(outs: Arrays, tangents: Tangents) -> Arrays:
    return [
        _jax.zero_tangent(out) if t is None else t
        for out, t in zip(outs, tangents, strict=True)
    ]


def _value_jvp(primals: Any, tangents: Any, *, what: Value) -> tuple[Arrays, Arrays]:
    present = [_present(t) for t in tangents]
    if all(t is None for t in present):
        outs = bind(list(primals), what)
        return outs, _zeros(outs, [None] * len(outs))
    outs, touts = what.jvp(list(primals), present)
    return outs, _zeros(outs, touts)


def _jvp_jvp(
    primals: Any, tangents: Any, *, what: Pair, n: int
) -> tuple[Arrays, Arrays]:
    """Takes f'(x) t apart into constants c(x) and a linear function L(c, t).

    L is linear in t, so the derivative along dt is L(c, dt). The rest, the dependence
    of c on x, is differentiated as JAX code.
    """
    present = [_present(t) for t in tangents]

    def taken_apart(*operands: Any) -> Arrays:
        outs, consts, linear = what.start(list(operands[:n]), False)
        return [*outs, *bind_linear(consts, list(operands[n:]), linear)]

    return _jvp_of(taken_apart, list(primals), present)


def _linear_jvp(
    primals: Any, tangents: Any, *, what: Linear, n: int
) -> tuple[Arrays, Arrays]:
    present = [_present(t) for t in tangents]
    outs = bind_linear(list(primals[:n]), list(primals[n:]), what)
    dots: list[Tangents] = []
    if any(t is not None for t in present[n:]):
        there = _filled(primals[n:], present[n:])
        dots.append(list(bind_linear(list(primals[:n]), there, what)))
    if any(t is not None for t in present[:n]):
        of_consts = [*present[:n], *(None for _ in present[n:])]

        def code(*xs: Any) -> Arrays:
            return what.run(list(xs[:n]), list(xs[n:]))

        dots.append(_jvp_of(code, list(primals), of_consts)[1])
    if not dots:
        return outs, _zeros(outs, [None] * len(outs))
    return outs, [_add(*terms) for terms in zip(*dots, strict=True)]


def _filled(like: Any, tangents: Tangents) -> Arrays:
    return [
        jnp.zeros_like(x) if t is None else t
        for x, t in zip(like, tangents, strict=True)
    ]


def _add(*terms: Any) -> Any:
    there = [t for t in terms if type(t) is not _jax.Zero]
    return sum(there[1:], there[0]) if there else terms[0]


def _jvp_of(code: Any, primals: Arrays, tangents: Tangents) -> tuple[Arrays, Arrays]:
    """`jax.jvp` along the tangents that aren't None; float0 tangents become Zero."""
    at = [i for i, t in enumerate(tangents) if t is not None]
    if not at:
        outs = list(code(*primals))
        return outs, _zeros(outs, [None] * len(outs))

    def moving(*xs: Any) -> Arrays:
        whole = list(primals)
        for i, x in zip(at, xs, strict=True):
            whole[i] = x
        return list(code(*whole))

    outs, touts = jax.jvp(moving, [primals[i] for i in at], [tangents[i] for i in at])
    return list(outs), _zeros(outs, [_present(t) for t in touts])


_jax.jvps[value_p] = _value_jvp
_jax.jvps[jvp_p] = _jvp_jvp
_jax.jvps[linear_p] = _linear_jvp


# --- Transpose ---------------------------------------------------------------------


def _known(operands: Any) -> Arrays:
    return [None if _jax.is_undefined_primal(x) else x for x in operands]


def _all_zero(cotangents: Any) -> bool:
    return all(type(ct) is _jax.Zero for ct in cotangents)


def _value_transpose(cotangents: Any, *args: Any, what: Value) -> list[Any]:
    if _all_zero(cotangents):
        return [None] * len(args)
    whole = list(map(_jax.instantiate_zeros, cotangents))
    return _wanted(args, what.transposed(_known(args), whole))


def _jvp_transpose(cotangents: Any, *operands: Any, what: Pair, n: int) -> list[Any]:
    """For a jvp that is transposed as it stands: only its tangents are linear."""
    cts = cotangents[len(what.value.avals) :]
    if _all_zero(cts):
        return [None] * len(operands)
    args = _checked(operands[:n], what.value.name)
    _, consts, linear = what.start(args, True)
    back = linear.back(consts, list(map(_jax.instantiate_zeros, cts)))
    return [*(None for _ in args), *_wanted(operands[n:], back)]


def _linear_transpose(
    cotangents: Any, *operands: Any, what: Linear, n: int
) -> list[Any]:
    if _all_zero(cotangents):
        return [None] * len(operands)
    consts = _checked(operands[:n], "a derivative")
    back = what.back(consts, list(map(_jax.instantiate_zeros, cotangents)))
    return [*(None for _ in consts), *_wanted(operands[n:], back)]


def _wanted(operands: Any, back: Tangents) -> list[Any]:
    return [
        _jax.shard_alike(ct, x.aval) if _jax.is_undefined_primal(x) else None
        for x, ct in zip(operands, back, strict=True)
    ]


def _checked(args: Any, name: str) -> Arrays:
    if any(map(_jax.is_undefined_primal, args)):
        raise DerivativeError(
            f"hostcall: `{name}` is transposed with respect to an argument in which"
            " it isn't linear"
        )
    return list(args)


_jax.transposes[value_p] = _value_transpose
_jax.transposes[jvp_p] = _jvp_transpose
_jax.transposes[linear_p] = _linear_transpose


# --- Partial evaluation --------------------------------------------------------------


def _split(trace: Any, *tracers: Any, what: Pair, n: int) -> Any:
    """Where reverse mode begins: the arguments are known and the tangents unknown.

    Computes the results now, and leaves the linear part to be transposed.
    """
    args, tangents = tracers[:n], tracers[n:]
    if not all(map(_jax.is_known, args)) or all(map(_jax.is_known, tangents)):
        return trace.default_process_primitive(jvp_p, tracers, {"what": what, "n": n})
    known = [arg.pval.get_known() for arg in args]
    outs, consts, linear = what.start(known, True)
    operands = [*map(trace.new_const, consts), *tangents]
    params = {"what": linear, "n": len(consts)}
    return [*outs, *trace.default_process_primitive(linear_p, operands, params)]


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
    known = eqn.replace(
        primitive=value_p,
        params={"what": what.value},
        invars=eqn.invars[:n],
        outvars=eqn.outvars[:n_outs],
    )
    outs_unknown = [i >= n_outs for i in range(len(everything))]
    return known, eqn, outs_unknown, everything, residuals


_jax.partial_eval_by_trace[jvp_p] = _split
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
    smaller = eqn.replace(
        primitive=value_p,
        params={"what": value},
        invars=eqn.invars[:n],
        outvars=eqn.outvars[: len(value.avals)],
    )
    return [i < n for i in range(len(eqn.invars))], smaller


_jax.register_dce(value_p, _drop_residuals)
_jax.register_dce(jvp_p, _drop_tangents)
