"""Host calls in while loops: what JAX would run twice, and what it would leave out.

When JAX splits a while loop into what it knows and what is linear (jax.linearize), and
only some of the carried values are differentiated, it runs the loop twice: once for the
known values, and once more, whole, for the others (`_while_partial_eval` in
jax/_src/lax/control_flow/loops.py). The same happens under remat
(`_while_partial_eval_custom`). Equations with effects would run both times, and the
second loop again for each tangent.

The remedy: the second loop is put together from the known part of the loop, without its
calls, and the rest. Then dead code is eliminated, since the second loop has to compute
the known values only as far as the others need them. If it needs a result of a call,
the loop is refused: it has nowhere to keep a number of results that is not known.

Loops without such calls, and drop-ins for JAX's callbacks, keep JAX's own rules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import compress
from typing import Any, NamedTuple, TypeAlias

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import util as _util
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _pe
from jax._src.lax.control_flow import loops as _loops

from hostcall._jax import types as _t
from hostcall._jax.lowering_api import lower_by
from hostcall._jax.versions import JAXPRS, changed, open_jaxpr

_while_p = _loops.while_p

Flags: TypeAlias = Sequence[bool]
Atoms: TypeAlias = Sequence[_t.Atom]
# Both work on an equation's parameters.
Error: TypeAlias = Callable[[_t.Params], Exception]
Passes: TypeAlias = Callable[[Atoms, _t.Params], Atoms]


class _Once(NamedTuple):
    """How equations of a primitive leave the second loop; see
    `run_once_in_while_loops`.
    """

    error: Error | None
    passes: Passes | None


_once: dict[_t.Primitive, _Once] = {}


def run_once_in_while_loops(
    primitive: _t.Primitive, error: Error | None = None, passes: Passes | None = None
) -> None:
    """Equations of this primitive with effects run once in a loop that JAX splits.

    Args:
        primitive: the primitive.
        error: makes the error if the second loop needs a result, from the equation's
            parameters.
        passes: (operands, parameters) -> those operands that are the results. Then
            equations without effects run once, too.
    """
    _once[primitive] = _Once(error, passes)


def _runs_once(eqn: _t.JaxprEquation) -> bool:
    rule = _once.get(eqn.primitive)
    return rule is not None and (rule.passes is not None or bool(eqn.effects))


def _all_eqns(jaxpr: _t.Jaxpr) -> Iterator[_t.JaxprEquation]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in _core.jaxprs_in_params(eqn.params):
            yield from _all_eqns(inner)


# --- A jaxpr without its calls --------------------------------------------------------

# Stands for a call whose results may not be needed.
_removed_p = _core.Primitive("host_call_of_the_first_loop")
_removed_p.multiple_results = True


@_removed_p.def_abstract_eval
def _removed_avals(*, hidden: _t.JaxprEquation) -> list[_t.Aval]:
    return [v.aval for v in hidden.outvars]


def _with(jaxpr: _t.Jaxpr, eqns: list[_t.JaxprEquation], **changes: Any) -> _t.Jaxpr:
    """The same with these equations, which give it its effects, and other changes."""
    new = changed(jaxpr, eqns=eqns, **changes)
    inner = open_jaxpr(new)
    parts = inner.constvars, inner.invars, inner.outvars, eqns
    return changed(new, effects=_pe.make_jaxpr_effects(*parts))


class _Renamed(dict[_t.Atom, _t.Atom]):
    """Variables and what stands in their place."""

    def __call__(self, atom: _t.Atom) -> _t.Atom:
        return atom if isinstance(atom, _core.Literal) else self.get(atom, atom)


class _Remover:
    """Removes the calls from jaxprs, at any depth."""

    def __init__(self) -> None:
        self._gone: set[_t.Effect] = set()  # the effects of what was removed

    def __call__(self, jaxpr: _t.Jaxpr) -> _t.Jaxpr:
        renamed, eqns = _Renamed(), []
        for eqn in jaxpr.eqns:
            invars = [renamed(x) for x in eqn.invars]
            if not _runs_once(eqn):
                eqns.append(self._inside(eqn.replace(invars=invars)))
                continue
            rule = _once[eqn.primitive]
            self._gone |= set(eqn.effects)
            if rule.passes is not None:
                renamed.update(
                    zip(eqn.outvars, rule.passes(invars, eqn.params), strict=True)
                )
            elif any(type(v) is not _core.DropVar for v in eqn.outvars):
                new = {"primitive": _removed_p, "params": {"hidden": eqn}}
                eqns.append(eqn.replace(invars=[], effects=set(), **new))
        outvars = [renamed(x) for x in open_jaxpr(jaxpr).outvars]
        return _with(jaxpr, eqns, outvars=outvars)

    def _inside(self, eqn: _t.JaxprEquation) -> _t.JaxprEquation:
        """The equation with its jaxprs changed."""
        inner = list(_core.jaxprs_in_params(eqn.params))
        if not any(_runs_once(each) for jaxpr in inner for each in _all_eqns(jaxpr)):
            return eqn
        params = {key: self._param(value) for key, value in eqn.params.items()}
        left = [e for jaxpr in _core.jaxprs_in_params(params) for e in jaxpr.effects]
        effects = {e for e in eqn.effects if e not in self._gone or e in left}
        return eqn.replace(params=params, effects=effects)

    def _param(self, value: object) -> object:
        if isinstance(value, JAXPRS):
            return self(value)
        if isinstance(value, tuple) and any(isinstance(v, JAXPRS) for v in value):
            return tuple(map(self._param, value))
        return value


def _joined(
    whole: _t.Jaxpr, known: _t.Jaxpr, unknown: _t.Jaxpr, ins: Flags, outs: Flags
) -> _t.Jaxpr:
    """One jaxpr of the known and the unknown part of `whole`.

    `ins` and `outs` say which inputs and outputs are unknown. The known part has its
    outputs and then what the other part needs, which has this as its first inputs.
    """
    a, b = open_jaxpr(known), open_jaxpr(unknown)
    own, passed = _util.split_list(a.outvars, [len(outs) - sum(outs)])
    takes, others = _util.split_list(b.invars, [len(passed)])
    renamed = _Renamed(zip(takes, passed, strict=True))
    eqns = [
        *a.eqns,
        *(eqn.replace(invars=list(map(renamed, eqn.invars))) for eqn in b.eqns),
    ]
    return _with(
        known,
        eqns,
        consts=[*known.consts, *unknown.consts],
        constvars=[*a.constvars, *b.constvars],
        invars=_util.merge_lists(ins, a.invars, others),
        outvars=_util.merge_lists(outs, own, list(map(renamed, b.outvars))),
        debug_info=open_jaxpr(whole).debug_info,
    )


# --- The two loops --------------------------------------------------------------------


class _Split(NamedTuple):
    """What becomes of a loop.

    Attributes:
        ins, outs: which operands and results are not known.
        first: the parameters of the loop that computes the known results.
        second: the parameters of the one that computes the others.
        used_ins, used_outs: which operands and results of the whole the second has.
    """

    ins: list[bool]
    outs: list[bool]
    first: _t.Params
    second: _t.Params
    used_ins: list[bool]
    used_outs: list[bool]


def _either(a: Sequence[bool], b: Sequence[bool]) -> list[bool]:
    return [x or y for x, y in zip(a, b, strict=True)]


def _split(params: _t.Params, unknown: Sequence[bool]) -> _Split | None:
    """How JAX would split the loop; None if it would not."""
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    counts = [params["cond_nconsts"], params["body_nconsts"]]
    of_cond, of_body, carry = _util.split_list(list(unknown), counts)
    while True:  # each round adds to the unknown values
        parts = _pe.partial_eval_jaxpr_nounits(body, of_body + carry, instantiate=carry)
        if parts[2] == carry:
            break
        carry = _either(carry, parts[2])
    tests = _pe.partial_eval_jaxpr_nounits(cond, of_cond + carry, instantiate=False)
    if tests[2] != [False] or all(unknown) or not any(unknown):
        return None

    def known_outputs(jaxpr: _t.Jaxpr, number: int) -> _t.Jaxpr:
        return changed(jaxpr, outvars=open_jaxpr(jaxpr).outvars[:number])

    first = {
        "cond_jaxpr": known_outputs(tests[0], 1),
        "body_jaxpr": known_outputs(parts[0], len(carry) - sum(carry)),
        "cond_nconsts": len(of_cond) - sum(of_cond),
        "body_nconsts": len(of_body) - sum(of_body),
    }
    remove = _Remover()
    whole = dict(
        params,
        cond_jaxpr=_joined(cond, remove(tests[0]), tests[1], of_cond + carry, [False]),
        body_jaxpr=_joined(body, remove(parts[0]), parts[1], of_body + carry, carry),
    )
    second, used_ins, used_outs = _needed(whole, carry)
    for jaxpr in (second["cond_jaxpr"], second["body_jaxpr"]):
        for eqn in _all_eqns(jaxpr):
            if eqn.primitive is _removed_p:
                call = eqn.params["hidden"]
                error = _once[call.primitive].error
                assert error is not None  # those that pass their operands on leave none
                raise error(call.params)
    ins = [*of_cond, *of_body, *carry]
    return _Split(ins, carry, first, second, used_ins, used_outs)


def _needed(params: _t.Params, outs: Flags) -> tuple[_t.Params, list[bool], list[bool]]:
    """The loop without what its results `outs` do not need.

    Returns its parameters, and which operands and results it has.
    """
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]

    def without_dead_code(
        jaxpr: _t.Jaxpr, outs: Flags, keep: bool | list[bool]
    ) -> tuple[_t.Jaxpr, list[bool]]:
        inner = open_jaxpr(jaxpr)
        new, used = _pe.dce_jaxpr(inner, outs, instantiate=keep)
        return (new if inner is jaxpr else jaxpr.replace(jaxpr=new)), used

    _, used = without_dead_code(cond, [True], False)
    carry = _either(outs, used[n_cond:])
    while True:  # each round adds to the carried values that are needed
        keep = [False] * n_body + carry
        new_body, of_body = without_dead_code(body, carry, keep)
        if of_body[n_body:] == carry:
            break
        carry = _either(carry, of_body[n_body:])
    keep = [False] * n_cond + carry
    new_cond, of_cond = without_dead_code(cond, [True], keep)
    needed = {
        "cond_jaxpr": new_cond,
        "body_jaxpr": new_body,
        "cond_nconsts": sum(of_cond[:n_cond]),
        "body_nconsts": sum(of_body[:n_body]),
    }
    return needed, [*of_cond[:n_cond], *of_body[:n_body], *carry], carry


def _without_dead_calls(
    used: list[bool], eqn: _t.JaxprEquation
) -> tuple[list[bool], _t.JaxprEquation]:
    """A rule of dead code for loops in such loops. JAX has had its own since 0.12."""
    loops = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    if all(e.primitive is not _removed_p for loop in loops for e in _all_eqns(loop)):
        return [True] * len(eqn.invars), eqn
    params, used_ins, used_outs = _needed(eqn.params, used)
    invars, outvars = compress(eqn.invars, used_ins), compress(eqn.outvars, used_outs)
    new = eqn.replace(invars=list(invars), outvars=list(outvars), params=params)
    return used_ins, new


_pe.dce_rules.setdefault(_while_p, _without_dead_calls)


def _has_calls(params: _t.Params) -> bool:
    loops = params["cond_jaxpr"], params["body_jaxpr"]
    return any(_runs_once(eqn) for jaxpr in loops for eqn in _all_eqns(jaxpr))


# --- JAX's two rules ------------------------------------------------------------------

_by_trace = _pe.custom_partial_eval_rules[_while_p]
_under_remat = _pe.partial_eval_jaxpr_custom_rules[_while_p]


def _while_partial_eval(
    trace: _t.Trace, *tracers: _t.Tracer, **params: object
) -> list[_t.Tracer]:
    split = None
    if _has_calls(params):
        split = _split(params, [not tracer.pval.is_known() for tracer in tracers])
    if split is None:
        return _by_trace(trace, *tracers, **params)  # type: ignore[no-any-return]
    known = [t.pval.get_known() for t in _util.partition_list(split.ins, tracers)[0]]
    first = _while_p.bind(*known, **split.first)
    operands = list(compress(tracers, split.used_ins))
    second = trace.default_process_primitive(_while_p, operands, split.second)
    unknown = compress(second, compress(split.outs, split.used_outs))
    return _util.merge_lists(split.outs, first, list(unknown))  # type: ignore[no-any-return]


def _while_partial_eval_custom(
    saveable: object, unknown: Flags, inst: Flags, eqn: _t.JaxprEquation
) -> object:
    if not _has_calls(eqn.params):
        return _under_remat(saveable, unknown, inst, eqn)
    if not any(unknown):  # it runs once, and its results are kept, as those of a call
        none = [False] * len(eqn.outvars)
        return eqn, None, none, none, []
    split = _split(eqn.params, unknown)
    if split is None:
        return _under_remat(saveable, unknown, inst, eqn)
    known, _ = _util.partition_list(split.ins, eqn.invars)
    results, _ = _util.partition_list(split.outs, eqn.outvars)
    # The known values that the second loop computes again have names from the first.
    again = [
        v if uk else _core.DropVar(v.aval)
        for v, uk in zip(eqn.outvars, split.outs, strict=True)
    ]
    operands = list(compress(eqn.invars, split.used_ins))
    first = _loop(eqn, known, results, split.first)
    left = list(compress(again, split.used_outs))
    second = _loop(eqn, operands, left, split.second)
    residuals = [
        x
        for x, used, has in zip(eqn.invars, split.used_ins, inst, strict=True)
        if used and not has and isinstance(x, _core.Var)
    ]
    return first, second, split.outs, split.outs, residuals


def _loop(
    eqn: _t.JaxprEquation, operands: Atoms, results: Atoms, params: _t.Params
) -> _t.JaxprEquation:
    """A while loop in the place of this one."""
    _, effects = _while_p.abstract_eval(*(x.aval for x in operands), **params)
    where = eqn.source_info, eqn.ctx
    return _pe.new_jaxpr_eqn(operands, results, _while_p, params, effects, *where)


_pe.custom_partial_eval_rules[_while_p] = _while_partial_eval
_pe.partial_eval_jaxpr_custom_rules[_while_p] = _while_partial_eval_custom


# --- Conditions with effects ----------------------------------------------------------
#
# XLA does not run the condition of a loop whose number of steps it knows, so unordered
# effects in it would be lost. Under vmap, rows of a loop stop one by one. JAX's
# lowering of a condition with an ordered effect (0.10.2, 0.12.0.1) ignores that, and
# lets every row run on until the last one stops. All other loops keep JAX's lowering.


def lower_effectful_conditions(chosen: Callable[[Collection[_t.Effect]], bool]) -> None:
    """Lowers loops as `_with_condition_inside` whose conditions have chosen effects."""
    table = _mlir._lowerings
    entry = table[_while_p]

    def rule(
        ctx: _t.LoweringContext, *xs: _t.Value, cond_jaxpr: _t.Jaxpr, **params: Any
    ) -> object:
        if not chosen(cond_jaxpr.effects):
            return entry.rule(ctx, *xs, cond_jaxpr=cond_jaxpr, **params)
        # Inside shard_map, a carry in which some rows have stopped varies over the mesh
        # axes of the condition, and the carry's type may not say so. Lower with the
        # varying-axes check off: JAX checked the program when it was traced.
        fixed = _core.ManualAxisType()
        avals = [
            aval
            if aval is _core.abstract_token
            else aval.update(manual_axis_type=fixed)
            for aval in ctx.avals_in
        ]
        inner = ctx.replace(avals_in=avals)
        loop = functools.partial(_with_condition_inside, cond_jaxpr, **params)
        with _config._check_vma(False):
            outs = lower_by(inner, loop, *xs)
        ctx.set_tokens_out(inner.tokens_out)
        return outs

    table[_while_p] = type(entry)(rule, entry.inline)


State: TypeAlias = tuple[jax.Array, list[jax.Array]]


def _with_condition_inside(
    cond_jaxpr: _t.Jaxpr,
    *operands: jax.Array,
    body_jaxpr: _t.Jaxpr,
    cond_nconsts: int,
    body_nconsts: int,
) -> list[jax.Array]:
    """The same loop with the condition computed in the body, so that rows can stop.

    The carry gets one more value: for each row, whether it goes on.
    """
    condition, body = map(_core.jaxpr_as_fun, (cond_jaxpr, body_jaxpr))
    cond_consts, body_consts, start = _util.split_list(
        list(operands), [cond_nconsts, body_nconsts]
    )

    def chosen(goes_on: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
        if goes_on.ndim == 0:  # the body runs only if the loop goes on
            return new
        rows = jax.lax.broadcast_in_dim(goes_on, new.shape, range(goes_on.ndim))
        return jax.lax.select(rows, new, old)

    def again(state: State) -> State:
        goes_on, carry = state
        new = body(*body_consts, *carry)
        carry = [chosen(goes_on, n, c) for n, c in zip(new, carry, strict=True)]
        (still,) = condition(*cond_consts, *carry)
        return goes_on & still, carry

    (first,) = condition(*cond_consts, *start)
    _, carry = jax.lax.while_loop(lambda state: state[0].any(), again, (first, start))
    return list(carry)
