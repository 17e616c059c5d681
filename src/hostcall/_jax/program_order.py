"""One order for all host calls of a program.

JAX keeps equations in order by tokens, one for each ordered effect, which it hands
through loops, branches and inner functions. Equations of two ordered effects have two
tokens, and those of unordered effects have none. So three things depend on nothing but
XLA's schedule: what an ordered drop-in and an ordered `hc.call` do in the body of one
loop (they have different effects), what an ordered and an unordered call do there, and
whether a loop with unordered calls comes before or after the calls around it.

The remedy: where a program is lowered, all host calls in it get one and the same
ordered effect, IN_ORDER, whose token is made where the program begins. JAX then hands
this token through everything that the calls are in. A call is put into an equation of
another primitive for it (`host_call_in_order`), which has its effects as a parameter:
whoever traces a part of the program once more, as JAX's lowering of loops and of remat
does, gets the same effects again.

    effects of the program   as before: JAX passes the same tokens in and out
    where it begins          IN_ORDER's token comes after all tokens that are passed in
    a host call              takes the token, and leaves another
    where it ends            a token that is passed out comes after all

Equations of others with ordered effects (JAX's own callbacks) keep their tokens. Host
calls take and leave these too, so they are in order with them. Nothing but data orders
other equations with unordered effects.

Most programs need none of this, and are left as they are: those whose calls all have
one ordered effect, and those whose unordered calls are in one jaxpr, where each takes
the token of the one before it (`in_order` in lowering_api.py). But of a shard_map that
has only arrays without elements to return, XLA keeps nothing, unless it hands on a
token: such a region always gets one.

So are programs whose calls all call back JAX's own code, which the patch serves, if
only unordered ones would be put in order. JAX promises no order there, and leans on
that: Pallas' interpreter of TPU kernels has callbacks that must run after another one
has failed, or a device waits for ever for what they send.

Not entered are loops over Refs, kernels, custom calls, and the small functions inside
reductions, sorts and scatters; and before jaxlib 0.11.2, where XLA ends the process for
a token there, shard_maps that are manual over some mesh axes only. If such a thing has
ordered effects, host calls outside of it are in order with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.interpreters import mlir as _mlir
from jax.interpreters import partial_eval as _pe
from jaxlib.mlir.dialects import stablehlo as _hlo

from hostcall._jax import types as _t
from hostcall._jax.door import core as _core
from hostcall._jax.door import effects as _effects
from hostcall._jax.jaxprs import LOOPS, Inner, inners, within
from hostcall._jax.program import SHARDS_TOKENS_OVER_SOME_AXES, record_of
from hostcall._jax.tracing import (
    ENGINE_CALLS,
    JAXS_CALLS,
    hold_weakly_in_caches,
    register_effect,
)
from hostcall._jax.versions import changed, lower_jaxpr, newly_manual_axes, open_jaxpr


class ProgramOrder(_effects.Effect):  # type: ignore[misc]
    """The effect of all host calls of a program whose order needs a token of its own.

    Programs have it only while they are lowered.
    """

    def __str__(self) -> str:
        return "HostCallsInOrder"


IN_ORDER = ProgramOrder()
register_effect(ProgramOrder, ordered=True)

Effects: TypeAlias = frozenset[_t.Effect]
# The primitives of host calls, and how each is lowered.
Rules: TypeAlias = Mapping[_t.Primitive, _t.LoweringRule]


# --- Which programs -------------------------------------------------------------------


class _ToOrder(NamedTuple):
    """What an equation, or a jaxpr, does that has to be in order.

    Attributes:
        call_effects: the ordered effects of its host calls; None stands for all
            unordered ones.
        other_effects: the ordered effects that something else in it has.
        is_call: it is one host call itself.
        crosses: whether neither JAX's tokens nor the chain of the unordered calls in
            each jaxpr put all of it in order.
    """

    call_effects: frozenset[_t.Effect | None] = frozenset()
    other_effects: Effects = frozenset()
    is_call: bool = False
    crosses: bool = False


def _entered(eqn: _t.JaxprEquation) -> list[Inner]:
    """The jaxprs of an equation that are in the order of the program."""
    # XLA before jaxlib 0.11.2 ends the process for a token in such a shard_map.
    if eqn.primitive.name == "shard_map" and not SHARDS_TOKENS_OVER_SOME_AXES:
        params = eqn.params
        if newly_manual_axes(params) != set(params["mesh"].axis_names):
            return []
    return inners(eqn)


def _is_dropped_without_token(eqn: _t.JaxprEquation) -> bool:
    """Whether XLA drops a region, with the calls in it, that hands on no token.

    Its partitioner puts constants in place of arrays without elements
    (ZeroSizedHloElimination). Then nothing uses what such a region returns, and the
    side effects inside are not looked for. Regions that return nothing at all are kept,
    but not if they get such an array.
    """
    if eqn.primitive.name != "shard_map" or eqn.params["mesh"].size == 1:
        return False
    if any(_has_elements(var) for var in eqn.outvars):
        return False
    return not all(_has_elements(atom) for atom in [*eqn.invars, *eqn.outvars])


def _has_elements(atom: _t.Atom) -> bool:
    return getattr(atom.aval, "size", 1) != 0


def _ordered(effects: Iterable[_t.Effect]) -> Effects:
    return frozenset(_effects.ordered_effects.filter_in(effects))


class _OrderFinder:
    """Looks through a program whose host calls these rules lower.

    Attributes:
        has_users_call: whether it has come by a call of a function that is not JAX's
            own code.
    """

    def __init__(self, rules: Rules, ordered_alone: bool = False) -> None:
        """`ordered_alone`: calls without an ordered effect count as no calls."""
        self.has_users_call = False
        self._rules = rules
        self._ordered_alone = ordered_alone
        # By identity: a program may have a jaxpr several times.
        self._by_identity: dict[int, _ToOrder] = {}

    def jaxpr(self, jaxpr: _t.Jaxpr) -> _ToOrder:
        opened = open_jaxpr(jaxpr)
        if not opened.effects:
            return _ToOrder()
        if id(opened) not in self._by_identity:
            members = [self._eqn(eqn) for eqn in opened.eqns if eqn.effects]
            self._by_identity[id(opened)] = _one_after_another(members)
        return self._by_identity[id(opened)]

    def _eqn(self, eqn: _t.JaxprEquation) -> _ToOrder:
        ordered = _ordered(eqn.effects)
        if eqn.primitive in self._rules:
            call = eqn.params.get("params")
            self.has_users_call |= not getattr(call, "is_jaxs_own", False)
            if self._ordered_alone and not ordered:
                return _ToOrder()
            return _ToOrder(call_effects=ordered or frozenset([None]), is_call=True)
        entered = _entered(eqn)
        if not entered:
            return _ToOrder(other_effects=ordered)
        members = [self.jaxpr(inner.jaxpr) for inner in entered]
        # One branch of a conditional runs, so branches need no order among themselves.
        if eqn.primitive.name == "cond":
            return _union(members)
        in_turn = _one_after_another(members)
        if None in in_turn.call_effects and _is_dropped_without_token(eqn):
            return in_turn._replace(crosses=True)
        return in_turn


def _union(members: Sequence[_ToOrder]) -> _ToOrder:
    of_calls = frozenset[_t.Effect | None]()
    of_others = Effects()
    return _ToOrder(
        call_effects=of_calls.union(*(member.call_effects for member in members)),
        other_effects=of_others.union(*(member.other_effects for member in members)),
        crosses=any(member.crosses for member in members),
    )


def _one_after_another(candidates: Sequence[_ToOrder]) -> _ToOrder:
    """What is to be ordered of equations that run in turn. They cross unless one thing
    puts them all in order:

        one ordered effect               JAX hands its token on, through inner jaxprs
        unordered calls of this jaxpr    each takes the token of the one before it

    So a loop with an unordered call in it crosses an unordered call beside it: JAX
    hands no token into the loop.
    """
    members = [
        candidate
        for candidate in candidates
        if candidate.call_effects or candidate.other_effects
    ]
    union = _union(members)
    if len(members) < 2 or not union.call_effects:
        return union
    effects = union.call_effects | union.other_effects
    if len(effects) == 1 and None not in effects:
        return union
    if effects == {None} and all(member.is_call for member in members):
        return union
    return union._replace(crosses=True)


# --- The same program in one order ----------------------------------------------------


class _OrderedCall:
    """A host call that is in the order of its program.

    Attributes:
        eqn: the equation of the call.
        rule: how it is lowered.
        effects: those that it has in place of its own.
    """

    def __init__(
        self, eqn: _t.JaxprEquation, rule: _t.LoweringRule, effects: Effects
    ) -> None:
        self.eqn = eqn
        self.rule = rule
        self.effects = effects


hold_weakly_in_caches(_OrderedCall)  # it leads to the user's function

_call_p = _core.Primitive("host_call_in_order")
_call_p.multiple_results = True


@_call_p.def_effectful_abstract_eval
def _(*operands: _t.Aval, call: _OrderedCall) -> tuple[list[_t.Aval], Effects]:
    del operands
    return [var.aval for var in call.eqn.outvars], call.effects


def _lower_call(
    ctx: _t.LoweringContext, *operands: _t.Value, call: _OrderedCall
) -> object:
    inner = ctx.replace(primitive=call.eqn.primitive)
    results = call.rule(inner, *operands, **call.eqn.params)
    ctx.set_tokens_out(inner.tokens_out or ctx.tokens_in)
    return results


_mlir.register_lowering(_call_p, _lower_call, cacheable=False)


class InOrder:
    """Puts all host calls of a program into one order.

    They are the equations that these rules lower, and get these effects.
    """

    def __init__(self, rules: Rules, effects: Effects) -> None:
        self._rules = rules
        self.effects = effects
        # By the identity of the old one, which stands beside the new one so that no
        # other gets its address. An old one has one new one, since JAX lowers a jaxpr
        # that is in a program several times as one function.
        self._new: dict[int, tuple[_t.Jaxpr, _t.Jaxpr]] = {}

    def jaxpr(self, old: _t.Jaxpr) -> _t.Jaxpr:
        if not open_jaxpr(old).effects:
            return old
        if id(old) not in self._new:
            eqns = [self._eqn(eqn) for eqn in open_jaxpr(old).eqns]
            self._new[id(old)] = old, changed(old, eqns=eqns)
        return self._new[id(old)][1]

    def _eqn(self, eqn: _t.JaxprEquation) -> _t.JaxprEquation:
        if not eqn.effects:
            return eqn
        if (rule := self._rules.get(eqn.primitive)) is not None:
            params = {"call": _OrderedCall(eqn, rule, self.effects)}
            return eqn.replace(primitive=_call_p, params=params, effects=self.effects)
        entered = _entered(eqn)
        if not entered:
            return eqn
        new_jaxprs = [self.jaxpr(inner.jaxpr) for inner in entered]
        old_effects = _effects_of(inner.jaxpr for inner in entered)
        new_effects = _effects_of(new_jaxprs)
        # The equation may have effects of its own, beside those of its jaxprs.
        effects = frozenset(eqn.effects) - (old_effects - new_effects)
        return eqn.replace(
            params={**eqn.params, **_jaxpr_params(entered, new_jaxprs)},
            effects=effects | (new_effects - old_effects),
        )


def _jaxpr_params(entered: Sequence[Inner], new: Sequence[_t.Jaxpr]) -> dict[str, Any]:
    """The parameters of an equation that have new jaxprs in place of these."""
    if entered[0].key == "branches":
        return {"branches": tuple(new)}
    return {inner.key: jaxpr for inner, jaxpr in zip(entered, new, strict=True)}


def _effects_of(jaxprs: Iterable[_t.Jaxpr]) -> Effects:
    return Effects().union(*(open_jaxpr(jaxpr).effects for jaxpr in jaxprs))


# --- What XLA can't compile -----------------------------------------------------------
#
# A shard_map that stands in a branch of a conditional, gets a token and uses no array
# that has elements: XLA (of jaxlib 0.12) ends the process while it compiles one. A loop
# between the two is no such conditional. Those of 0.9.0 and 0.10.2 compiled some: all
# are refused there too, so that what works under one works under the next.

# (the parameters of the host call in there) -> the error.
_refusal: list[Callable[[_t.Params], Exception]] = []


def refuse_tokens_alone(refusal: Callable[[_t.Params], Exception]) -> None:
    """Such programs raise the error that `refusal` makes of a host call in there."""
    _refusal.append(refusal)


def check_tokens_alone(jaxpr: _t.Jaxpr, in_branch: bool = False) -> None:
    """Refuses such programs, as they will be lowered."""
    for eqn in open_jaxpr(jaxpr).eqns:
        if not eqn.effects:
            continue
        name = eqn.primitive.name
        inner_jaxprs = inners(eqn)
        if name == "shard_map" and in_branch and eqn.params["mesh"].size > 1:
            _check_region(eqn, open_jaxpr(inner_jaxprs[0].jaxpr))
        is_in_branch = name == "cond" or (in_branch and name not in LOOPS)
        for inner in inner_jaxprs:
            check_tokens_alone(inner.jaxpr, is_in_branch)


def _check_region(eqn: _t.JaxprEquation, region: _t.Jaxpr) -> None:
    if not _ordered(eqn.effects):
        return
    _, used_operands = _pe.dce_jaxpr(region, [True] * len(region.outvars))
    if any(map(_has_elements, itertools.compress(region.invars, used_operands))):
        return
    for outer in region.eqns:
        for call in within(outer):
            if params := _call_params(call):
                raise _refusal[0](params)


def _call_params(eqn: _t.JaxprEquation) -> _t.Params | None:
    """The parameters of a host call of our own; None of anything else."""
    if eqn.primitive is _call_p:
        eqn = eqn.params["call"].eqn
    is_ours = eqn.primitive in ENGINE_CALLS and eqn.primitive not in JAXS_CALLS
    return eqn.params if is_ours else None


# --- A program as one equation --------------------------------------------------------

_program_p = _core.Primitive("host_calls")
_program_p.multiple_results = True

_RECORD = "the order of host calls"


def _order_of(ctx: _t.LoweringContext) -> InOrder | None:
    """How the host calls of the program are in order that is being lowered; None if
    each has its own effect.
    """
    return record_of(ctx, _RECORD).get("")


def effects_in(ctx: _t.LoweringContext) -> Effects:
    """The effects that all host calls have of the program that is being lowered; none
    if each has its own, as in the parts of the program that are left as they are.
    """
    order = _order_of(ctx)
    if order is None or not order.effects <= ctx.tokens_in.effects():
        return Effects()
    return order.effects


def in_order_of_program(ctx: _t.LoweringContext, jaxpr: _t.Jaxpr) -> _t.Jaxpr:
    """A jaxpr that is made while a program is lowered, in the order of that program."""
    order = _order_of(ctx)
    return order.jaxpr(jaxpr) if order is not None and effects_in(ctx) else jaxpr


def joined(tokens: Sequence[_t.Value]) -> _t.Value:
    """A token that comes after all of these."""
    first, *further = dict.fromkeys(tokens)
    return _hlo.after_all([first, *further]) if further else first


def _lower(
    ctx: _t.LoweringContext,
    *operands: _t.Value,
    jaxpr: _t.Jaxpr,
    order: InOrder | None,
    keepalives: tuple[object, ...],
) -> list[_t.Value]:
    for keepalive in keepalives:
        ctx.module_context.add_keepalive(keepalive)
    record_of(ctx, _RECORD)[""] = order
    opened = open_jaxpr(jaxpr)
    passed_in = dict(ctx.tokens_in.items())
    tokens = {}
    # By name: the text of a program must not depend on the order of a set.
    for effect in sorted(_ordered(opened.effects), key=str):
        if effect in passed_in:
            tokens[effect] = passed_in[effect]
        elif effect is IN_ORDER and passed_in:
            tokens[effect] = joined([*passed_in.values()])
        else:
            tokens[effect] = _hlo.create_token()
    results, tokens_after = lower_jaxpr(
        ctx,
        opened,
        _mlir.TokenSet(tokens),
        [_mlir.ir_constant(const) for const in jaxpr.consts],
        *operands,
    )
    # One of the tokens that are passed out comes after everything, and the others are
    # given back as they came: XLA ends the process if two results turn out to be one
    # value. All results of a program are ready when it has ended.
    passed_out = dict(passed_in)
    for effect in sorted(passed_in, key=str)[:1]:
        passed_out[effect] = joined([token for _, token in tokens_after.items()])
    ctx.set_tokens_out(_mlir.TokenSet(passed_out))
    return list(results)


_mlir.register_lowering(_program_p, _lower, cacheable=False)


def as_one_equation(
    jaxpr: _t.Jaxpr,
    effects: Iterable[_t.Effect],
    order: InOrder | None,
    keepalives: tuple[object, ...] = (),
) -> _t.Jaxpr:
    """A program whose one equation is the whole of `jaxpr`, and has these effects: JAX
    passes tokens in and out for these. Tokens of others are made inside.

    `order` puts all host calls into one order, unless they are in it. `keepalives`
    live as long as the executable.
    """
    if order is not None:
        jaxpr = order.jaxpr(jaxpr)
    invars = [_core.Var(aval) for aval in jaxpr.in_avals]
    outvars = [_core.Var(aval) for aval in jaxpr.out_avals]
    params = {"jaxpr": jaxpr, "order": order, "keepalives": keepalives}
    eqn = _core.new_jaxpr_eqn(invars, outvars, _program_p, params, set(effects))
    # The constants are those of the jaxpr in the equation.
    return changed(
        jaxpr, consts=[], constvars=[], invars=invars, outvars=outvars, eqns=[eqn]
    )


def order_of_calls(jaxpr: _t.Jaxpr, rules: Rules) -> InOrder | None:
    """What puts all host calls of a program into one order; None if they are in one, or
    if JAX leaves their order open and all of them are JAX's own.
    """
    finder = _OrderFinder(rules)
    to_order = finder.jaxpr(jaxpr)
    if to_order.crosses and not finder.has_users_call:
        # Pallas leans on it that unordered callbacks are in no order (see above).
        to_order = _OrderFinder(rules, ordered_alone=True).jaxpr(jaxpr)
    if not to_order.crosses:
        return None
    return InOrder(rules, to_order.other_effects | {IN_ORDER})
