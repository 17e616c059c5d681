"""Host calls in while loops that JAX would run twice.

When JAX splits a while loop into what it knows and what is linear (jax.linearize), and
only some of the carried values are differentiated, it runs the loop twice: once for the
known values, and once more, whole, for the others (`_while_partial_eval` in
jax/_src/lax/control_flow/loops.py). The same happens under remat
(`_while_partial_eval_custom`). Equations with effects would run both times, and the
second loop again for each tangent.

The remedy: the second loop is what JAX's rules for remat make of the loop if it
computes all again but calls with known operands. Then dead code is eliminated, since
the second loop has to compute the known values only as far as the others need them. If
it needs a result of a call, or of one of JAX's own callbacks, the loop is refused: it
has nowhere to keep a number of results that is not known.

Loops without such calls, and drop-ins for JAX's callbacks, keep JAX's own rules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import compress, islice
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
from jax.interpreters import partial_eval as _pe

from hostcall._jax import types as _t
from hostcall._jax.door import core as _core
from hostcall._jax.door import partial_eval as _src_pe
from hostcall._jax.jaxprs import while_loop, within
from hostcall._jax.versions import changed, closed_as, open_jaxpr

_while_p = jax.lax.while_p

T = TypeVar("T")
Flags: TypeAlias = Sequence[bool]
Atoms: TypeAlias = Sequence[_t.Atom]
Error: TypeAlias = Callable[[_t.Params], Exception]

# The primitives whose equations with effects run once in a loop that JAX splits. Each
# has what makes the error, from an equation's parameters, if the second loop needs a
# result of it, or of one of JAX's own equations with effects.
once_in_while_loops: dict[_t.Primitive, Error] = {}
# Those of them whose results are their operands. Their rule for remat leaves
# `passed_on` in the second loop, and equations without effects run once, too.
passing_on_in_while_loops: set[_t.Primitive] = set()


def _runs_once(eqn: _t.JaxprEquation) -> bool:
    if eqn.primitive not in once_in_while_loops:
        return False
    return eqn.primitive in passing_on_in_while_loops or bool(eqn.effects)


def _eqns_in(loop: _t.Params) -> Iterator[_t.JaxprEquation]:
    for key in ("cond_jaxpr", "body_jaxpr"):
        for eqn in loop[key].eqns:
            yield from within(eqn)


# --- A jaxpr without its known calls --------------------------------------------------

# Stands for equations of the first loop whose results may not be needed.
_removed_p = _core.Primitive("host_call_of_the_first_loop")
_removed_p.multiple_results = True


def in_second_loop(*_: object, **__: object) -> bool:
    """What rules for remat get as `saveable` for the second loop: saves nothing."""
    return False


def passed_on(eqn: _t.JaxprEquation, operands: Atoms) -> _t.JaxprEquation:
    """An equation that only passes these operands on as the results of `eqn`."""
    barrier = jax.lax.optimization_barrier_p
    return eqn.replace(
        primitive=barrier, invars=list(operands), params={}, effects=set()
    )


def _parted(
    jaxpr: _t.Jaxpr, unknown: Flags, outs: Flags
) -> tuple[_t.Jaxpr, _t.Jaxpr, list[bool]]:
    """Parts a jaxpr of a loop, the condition or the body, for two loops.

    JAX parts it as under a remat that saves nothing. What is known is computed in both
    parts, so that the second needs nothing but the operands of the whole:

        known(known operands)          -> known results, residuals
        again(residuals, all operands) -> all results

    Residuals are the results of what runs once, in `known` alone: the host calls. A
    loop can't hand them to another, since it keeps what its last step has made, and not
    one value for each step. So in `again` an equation of `_removed_p` stands for each
    of them, with the call. If a result of the second loop needs it, it is still there
    when dead code has been eliminated, and `_split` refuses the loop. Of the body

        a, b -> a + 1, b * x * call(a)        where b and x are not known

    `again` is `r = removed(); (a + 1, b * x * r)`, which is refused, whereas with a
    call whose result is not used the removed equation goes.

    Args:
        jaxpr: the condition or the body.
        unknown: which operands are not known.
        outs: which results the second loop has to have, known or not.

    Returns:
        Both parts, and which results `known` has not: those of `outs`, and those that
        depend on unknown operands.
    """
    known, again, unknown_outs, _, residual_count = _src_pe.partial_eval_jaxpr_custom(
        # By position, as JAX calls it: the table of needs.py compares that.
        open_jaxpr(jaxpr),
        list(unknown),  # in_unknowns
        True,  # in_inst
        list(outs),  # ensure_out_unknowns
        True,  # ensure_out_inst
        in_second_loop,  # saveable
    )
    result_count = len(outs) - sum(unknown_outs)
    residuals = known.outvars[result_count:]
    calls = {v: eqn for eqn in known.eqns for v in eqn.outvars}
    assert calls.keys() >= {*residuals}, "a residual that no equation has made"
    removed: list[_t.JaxprEquation] = []
    for var, residual in zip(again.invars[:residual_count], residuals, strict=True):
        call = {"of": calls[residual]}
        removed.append(_src_pe.new_jaxpr_eqn([], [var], _removed_p, call, set()))
    operands = again.invars[residual_count:]
    again = changed(
        again,
        invars=operands,
        eqns=[*removed, *again.eqns],
        debug_info=_with_names(again.debug_info, len(operands)),
    )
    known = changed(
        known,
        outvars=known.outvars[:result_count],
        debug_info=_with_names(known.debug_info, len(known.invars)),
    )
    return closed_as(jaxpr, known), closed_as(jaxpr, again), unknown_outs


def _with_names(debug_info: Any, count: int) -> Any:
    """Partial evaluation forgets how operands are called. Before 0.10.2 JAX's jvp of a
    loop takes it that they have names, and adds to them.
    """
    return debug_info._replace(arg_names=("",) * count)


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


def _cut(values: Sequence[T], sizes: Sequence[int]) -> tuple[list[T], ...]:
    """The values in parts of these sizes, and the rest."""
    rest = iter(values)
    return *(list(islice(rest, size)) for size in sizes), list(rest)


def _without(flags: Flags, values: Sequence[T]) -> list[T]:
    """The values whose flag is False."""
    return [x for flag, x in zip(flags, values, strict=True) if not flag]


def _either(a: Sequence[bool], b: Sequence[bool]) -> list[bool]:
    return [x or y for x, y in zip(a, b, strict=True)]


def _split(params: _t.Params, unknown: Flags, keeps_all: bool = False) -> _Split | None:
    """How JAX would split the loop; None if it would not.

    Args:
        params: of the loop.
        unknown: for each operand, whether it is not known.
        keeps_all: the second loop has all results, and is not refused: the loop is
            inside of another that is split, and whoever does that knows which are
            needed.
    """
    counts = [params["cond_nconsts"], params["body_nconsts"]]
    of_cond, of_body, carry = _cut(unknown, counts)
    while True:  # each round adds to the unknown values
        known_body, body, unknown_outs = _parted(
            params["body_jaxpr"], of_body + carry, carry
        )
        if unknown_outs == carry:
            break
        carry = _either(carry, unknown_outs)
    known_cond, cond, unknown_test = _parted(
        params["cond_jaxpr"], of_cond + carry, [False]
    )
    # Without the test the first loop can't run, and without a known operand it has
    # nothing to compute.
    if unknown_test != [False] or all(unknown):
        return None
    first = {
        "cond_jaxpr": known_cond,
        "body_jaxpr": known_body,
        "cond_nconsts": len(of_cond) - sum(of_cond),
        "body_nconsts": len(of_body) - sum(of_body),
    }
    again = dict(params, cond_jaxpr=cond, body_jaxpr=body)
    outs = [True] * len(carry) if keeps_all else carry
    second, used_ins, used_outs = _needed(again, outs)
    if not keeps_all:
        _refuse_removed(second, params)
    return _Split(
        ins=[*of_cond, *of_body, *carry],
        outs=carry,
        first=first,
        second=second,
        used_ins=used_ins,
        used_outs=used_outs,
    )


def _refuse_removed(second: _t.Params, params: _t.Params) -> None:
    """Refuses a loop whose second loop needs the result of a call of the first."""
    for eqn in _eqns_in(second):
        if eqn.primitive is not _removed_p:
            continue
        # It may stand for an equation of JAX's own. Then the error names a call of the
        # loop, which would run twice.
        calls = [*within(eqn.params["of"]), *_eqns_in(params)]
        call = next(filter(_runs_once, calls))
        raise once_in_while_loops[call.primitive](call.params)


def _needed(params: _t.Params, outs: Flags) -> tuple[_t.Params, list[bool], list[bool]]:
    """The loop without what its results `outs` do not need.

    Returns its parameters, and which operands and results it has.
    """
    cond = params["cond_jaxpr"]
    body = params["body_jaxpr"]
    n_cond = params["cond_nconsts"]
    n_body = params["body_nconsts"]

    def without_dead_code(
        jaxpr: _t.Jaxpr, outs: Flags, keep: bool | list[bool]
    ) -> tuple[_t.Jaxpr, list[bool]]:
        new, used = _pe.dce_jaxpr(open_jaxpr(jaxpr), outs, instantiate=keep)
        return closed_as(jaxpr, new), used

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


def without_dead_code(plain: None) -> Callable[..., object]:
    del plain
    return _without_dead_calls


def _without_dead_calls(
    used: list[bool], eqn: _t.JaxprEquation
) -> tuple[list[bool], _t.JaxprEquation]:
    """A rule of dead code for loops in such loops. JAX has had its own since 0.12."""
    if all(e.primitive is not _removed_p for e in within(eqn)):
        return [True] * len(eqn.invars), eqn
    params, used_ins, used_outs = _needed(eqn.params, used)
    invars = compress(eqn.invars, used_ins)
    outvars = compress(eqn.outvars, used_outs)
    new = eqn.replace(invars=list(invars), outvars=list(outvars), params=params)
    return used_ins, new


# --- JAX's two rules (patches.py) -----------------------------------------------------

Rule: TypeAlias = Callable[..., Any]


def split_by_trace(plain: Rule) -> Rule:
    return functools.partial(_while_partial_eval, plain)


def split_under_remat(plain: Rule) -> Rule:
    return functools.partial(_while_partial_eval_custom, plain)


def _while_partial_eval(
    plain: Rule, trace: _t.Trace, *tracers: _t.Tracer, **params: object
) -> list[_t.Tracer]:
    """JAX's rule under linearize. A loop with calls that run once is made two."""
    split = None
    unknown = [not tracer.pval.is_known() for tracer in tracers]
    if any(unknown) and any(map(_runs_once, _eqns_in(params))):
        split = _split(params, unknown)
    if split is None:
        return plain(trace, *tracers, **params)  # type: ignore[no-any-return]
    known = [t.pval.get_known() for t in _without(split.ins, tracers)]
    first = _while_p.bind(*known, **split.first)
    operands = list(compress(tracers, split.used_ins))
    second = trace.default_process_primitive(_while_p, operands, split.second)
    # The second loop may compute known values too, which it needs itself. As results
    # those of the first are taken.
    second_results = iter(compress(second, compress(split.outs, split.used_outs)))
    known_results = iter(first)
    return [
        next(second_results if is_other else known_results) for is_other in split.outs
    ]


def _while_partial_eval_custom(
    plain: Rule, saveable: object, unknown: Flags, inst: Flags, eqn: _t.JaxprEquation
) -> object:
    """JAX's rule under remat, and for loops inside of one that is split."""
    split = None
    inside = saveable is in_second_loop
    if any(map(_runs_once, _eqns_in(eqn.params))):
        if not (inside or any(unknown)):  # its results are kept, as those of a call
            none = [False] * len(eqn.outvars)
            return eqn, None, none, none, []
        split = _split(eqn.params, unknown, keeps_all=inside)
    if split is None:
        return plain(saveable, unknown, inst, eqn)
    known = _without(split.ins, eqn.invars)
    results = _without(split.outs, eqn.outvars)
    # The known values that the second loop computes again have names from the first,
    # unless the first is another part of the program around.
    is_inside = [inside] * len(split.outs)
    again = [
        v if uk or inside else _core.DropVar(v.aval)
        for v, uk in zip(eqn.outvars, split.outs, strict=True)
    ]
    operands = list(compress(eqn.invars, split.used_ins))
    first = while_loop(eqn, known, results, split.first)
    second_outvars = list(compress(again, split.used_outs))
    second = while_loop(eqn, operands, second_outvars, split.second)
    residuals = [
        x
        for x, used, has in zip(eqn.invars, split.used_ins, inst, strict=True)
        if used and not has and isinstance(x, _core.Var)
    ]
    return first, second, split.outs, _either(split.outs, is_inside), residuals
