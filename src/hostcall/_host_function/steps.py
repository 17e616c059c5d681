"""Host code of a HostFunction: the function itself, or one of its rules.

In a program it is a `RuleCall`, a `Value` that lowers to a call. The engine calls the
same `RuleCall` when the program runs: it puts the trees together, calls the user's
function, takes apart what that returned, and checks it. The call in the middle may run
on another thread, in another process or on another machine (`executor=`); see
`sendable`. A residual that it computes comes back here, since the next call may go to
another worker.

Rules in JAX code take the same steps while a program is traced: `TracedRuleCall`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from typing import ClassVar, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core import failures
from hostcall._core.callback import CallSpec
from hostcall._core.host_code import HostCode, TakesMask
from hostcall._core.options import LOCAL_ONLY, WHOLE, CallOptions, Policy
from hostcall._core.source import CallableFacts, inspect_callable
from hostcall._core.spec import (
    Opaque,
    Results,
    Template,
    flatten_arguments,
    wrap_keys,
)
from hostcall._host_function import sendable
from hostcall._host_function.primitives import (
    Arrays,
    Flags,
    Moved,
    Tangents,
    Value,
    bind,
    there,
)
from hostcall._host_function.residuals import store
from hostcall._host_function.result_specs import aligned, says_items
from hostcall._host_function.rules import (
    RULES,
    Function,
    Kind,
    Rule,
    Tree,
    Trees,
    forward_pair,
)
from hostcall._host_function.sendable import Sendable, to_send
from hostcall._host_function.trees import ArgumentLayout, Positions, pick, spread
from hostcall._jax.types import Aval
from hostcall._policies.layer import same
from hostcall._primitives.make import bind_call

T = TypeVar("T")
# (function to run, its arguments, function that makes arrays of its value).
Parts: TypeAlias = tuple[Function, Sequence[Tree], Callable[[Tree], Iterable[Tree]]]

# An array of host code may be nested lists of numbers.
_add = partial(jax.tree.map, operator.add)


# Which shape a result of a rule has, in messages about another one.
_LIKE_BOTH = "A Jacobian has the axes of the result, then those of the argument"
_LIKE_RESULT = "A tangent has the shape of the result whose tangent it is"
_LIKE_ARGUMENT = (
    "A cotangent has the shape of its argument, and the rule returns one for each, in"
    " the order of the arguments"
)


@dataclass(frozen=True, repr=False)
class RuleCall(HostCode, Value):
    """One piece of host code. It is compared by what it is made of, so that JAX's
    caches hit.

    The function itself gets its arguments as trees. A rule gets all arrays flat, which
    spares the engine the trees; here they are NumPy's, or as `arrays=` says.

    Attributes:
        site: the call of the HostFunction that it belongs to.
        kind: which of the function's codes is called.
        avals: of its results.
        nz: for each array of the arguments, whether it has a tangent here; for a
            transposition, whether the function is linear in it.
        take: whether a backward rule may take its residual out of the store, because
            this looks like the last use.
        rule: the rule that it belongs to. If that keeps objects, it leaves its residual
            in the store, or looks there for it.
        code: the user's function that names it in messages.
        seen: what hostcall knows of it and of all that it calls.
        sent: `code` in a form that the executor can send.
        n: how many of the first operands are arrays of the function's arguments.
    """

    travels_as: ClassVar[str] = "host"
    traced: ClassVar[bool] = False  # whether JAX traces the rule

    site: ArgumentLayout = field(metadata=LOCAL_ONLY)
    kind: Kind
    avals: tuple[Aval, ...] = field(compare=False)
    nz: tuple[bool, ...] = ()
    take: bool = True
    rule: Rule = field(init=False, compare=False, metadata=LOCAL_ONLY)
    code: Function = field(init=False, compare=False, metadata=LOCAL_ONLY)
    seen: CallableFacts = field(init=False, compare=False, metadata=LOCAL_ONLY)
    sent: Function = field(init=False, compare=False, metadata=LOCAL_ONLY)
    n: int = field(init=False, compare=False, metadata=LOCAL_ONLY)

    def __post_init__(self) -> None:
        function = self.site.function
        kind = self.kind
        rule, code = function.rules.of(kind)
        sent = code
        if function.policy.pool is not None:
            sent = Sendable(function, kind)
        called: list[Function] = [code]
        if kind in ("jvp", "both"):
            called += [function.fn, *there(rule.each)]
        elif kind == "backward":  # runs it if its residual was dropped
            called.append(rule.fn)
        looks = list(map(inspect_callable, called))
        awaits = rule.where == "host" and True in [each.awaits for each in looks]
        seen = CallableFacts(looks[0].name, None, awaits, False, looks[0].source)
        first = kind not in ("transpose", "backward") or rule.keeps_objects
        n = self.site.n if first else 0
        vars(self).update(rule=rule, code=code, seen=seen, sent=sent, n=n)
        vars(self).update(__qualname__=seen.name)

    def __repr__(self) -> str:
        return f"{'' if self.kind == 'value' else self.kind + ' of '}{self.site.name}"

    # --- In a program ----------------------------------------------------------------

    def called(self, operands: Arrays, template: Template | None = None) -> Arrays:
        """The results of a rule; for `template` see `TracedRuleCall`."""
        if self.rule.where == "host":
            return bind(operands, self)
        return TracedRuleCall(
            self.site, self.kind, self.avals, self.nz, template=template
        ).trace(operands)

    def run(self, operands: Arrays, by_rule: Function | None = None) -> Arrays:
        """The results of the call.

        `by_rule` is the user's rule for batches, if the call has effects. Without them
        the primitive of the HostFunction has the rule.
        """
        site = self.site
        mask = None
        how, policy = self.how()
        if site.masked:
            operands, mask = self.unmasked(operands)
        method = by_rule or how.vmap_method
        if method in WHOLE and says_items(site.function.result):
            operands, method = aligned(operands, site, self.kind, method)
        trees = (site.template, site.results)
        fills = self._of_results(site.fills)
        if self.kind != "value":  # a rule gets flat arrays
            keys = self._of_results(site.results.keys)
            marks = site.template.keys[: self.n]
            template = Template.flat(*marks, *(None,) * (len(operands) - len(marks)))
            trees = template, Results.flat(self.avals, keys)
        if method is not how.vmap_method:
            how = replace(how, vmap_method=method)
        given = Opaque(self), *trees, fills, how, site.place, policy
        looked = self.seen._replace(host_code=self)
        return bind_call(CallSpec(*given, known=looked), operands, mask)

    def _of_results(self, own: Sequence[T] | None) -> tuple[T | None, ...]:
        """One entry for each result of the call: from those for the function's results
        if these come first, else None.
        """
        own = (self.kind in ("value", "both", "forward") and own) or ()
        return *own, *(None,) * (len(self.avals) - len(own))

    def how(self) -> tuple[CallOptions, Policy]:
        """The options of its calls, and how they are run."""
        function = self.site.function
        how = function.options
        policy = function.policy
        if self.kind != "value":
            lend = bool(how.lend)
            method = how.vmap_method
            if self.rule.keeps_objects:
                # A residual that is kept may be an argument.
                lend = lend and function.rules_copy
                method = "parallel" if method == "parallel" else "sequential"
            how = replace(how, lend=lend, vmap_method=method)
        return how, replace(policy, owner=function)

    def jvp(self, operands: Arrays, tangents: Tangents) -> Moved:
        del operands, tangents
        rule = f"`{self.seen.name}`, a rule of `{self.site.name}` in host code,"
        if self.site.function.advice:  # the rule is not the user's
            rule = f"a derivative of `{self.site.name}`"
        raise self.site.missing("second", rule=rule)

    def shared(self, dims: Sequence[int | None]) -> Value:
        """A backward rule does not take out a residual that the rows share."""
        handle = len(self.site.in_avals)
        keeps = self.kind == "backward" and self.rule.keeps_objects
        if keeps and dims[handle] is None:
            return replace(self, take=False)
        return self

    def narrowed(self, used: Flags) -> Value | None:
        """The function itself, if nothing uses the forward rule's residuals."""
        unused = self.kind == "forward" and not any(used[len(self.site.avals) :])
        return self.site if unused else None

    # --- What it is made of ----------------------------------------------------------

    @cached_property
    def linear(self) -> slice:
        """Which of its operands, without the mask, are tangents or cotangents."""
        if self.kind in ("jvp", "both"):
            return slice(self.n, self.n + sum(self.nz))
        back = self.kind in ("backward", "transpose")
        return slice(-len(self.site.out_avals), None) if back else slice(0)

    def unmasked(self, operands: Arrays) -> tuple[Arrays, jax.Array]:
        """(the operands without the mask, the mask), if there is one."""
        at = self.nz.count(False) - 1 if self.kind == "transpose" else self.n
        return [*operands[:at], *operands[at + 1 :]], operands[at]

    # --- What the engine asks ------------------------------------------------------

    def source(self) -> str:
        return self.seen.source

    def awaits(self) -> bool:
        return self.seen.awaits

    def result_words(self, number: int) -> tuple[str, str]:
        which, hint = self._result_of_a_rule(number)
        if not which:
            return "", ""
        rule = f"`{self.seen.name}`, {RULES[self.kind][1]} of `{self.site.name}`"
        return f"{which} that {rule}, returned", hint

    def _result_of_a_rule(self, number: int) -> tuple[str, str]:
        """(what this result is, which shape it has). Empty for the function's own
        results and residuals, and if the rule is not the user's.
        """
        site = self.site
        kind = self.kind
        if kind == "jacobian":
            which = f"the Jacobian of {site.jacobian_paths[number]}"
            return which, _LIKE_BOTH
        if site.function.advice:
            return "", ""
        number -= len(site.avals) if kind == "both" else 0
        if kind in ("jvp", "both") and number >= 0:
            outs = pick(site.results.paths(), site.out_diff)
            return f"the tangent of {outs[number]}", _LIKE_RESULT
        if kind in ("backward", "transpose"):
            args = pick(site.template.paths(), site.unmasked(self.nz))
            return f"the cotangent of {args[number]}", _LIKE_ARGUMENT
        return "", ""

    def lane(self) -> Function:  # the function and its rules are one
        return self.site.function.fn

    def parts(self) -> tuple[Kind, Function]:
        return self.kind, self.code

    def __call__(self, *operands: Tree, **out: Tree) -> Tree:
        run, sent, finish = self.split(operands, out)
        return finish(run(*sent, **out))

    def split(self, args: Sequence[Tree], kwargs: object) -> Parts:
        del kwargs
        if self.kind == "value":
            return self.sent, args, same
        parts: Parts = getattr(self, f"_{self.kind}")(args)
        return parts

    def _code(self, kind: Kind, index: int | None = None) -> Function:
        """Another of the user's functions, in a form that the executor can send."""
        return to_send(self.site.function, kind, index)

    # --- What is different in JAX code ---------------------------------------------

    def _arguments(self, arrays: Arrays) -> Sequence[Tree]:
        template = self.site.template
        return arrays if template.is_flat else template.unflatten(arrays)[0]

    def _kept(self, residual: Tree) -> Arrays:
        """The arrays that a forward rule's residual becomes in the program."""
        if (spec := self.rule.residuals) is None:
            return [store.put(residual)]
        structure = "residuals in the structure of residuals="
        return self.site.leaves_of(spec.treedef, residual, self.kind, structure)

    def _residual(self, leaves: Arrays) -> Tree:
        """The residual of these arrays."""
        assert self.rule.residuals is not None
        return self.rule.residuals.treedef.unflatten(leaves)

    # --- The steps of a rule -------------------------------------------------------
    #
    # Each takes the operands without the mask.

    def _several(self, calls: Function, *sent: Tree) -> tuple[Function, Sequence[Tree]]:
        drive = sendable.awaited if self.seen.awaits else sendable.driven
        return drive, (calls, *sent)

    def _jvp(self, operands: Arrays) -> Parts:
        site = self.site
        jvp = self.rule
        n = self.n
        linear = self.linear
        args = self._arguments(operands[:n])
        outs = operands[linear.stop :]
        dots = spread(operands[linear], self.nz)
        if jvp.flat:
            sent = args, site.unmasked(dots), site.out_diff
            return self.sent, sent, self._pushed
        zeros = jnp.zeros_like if self.traced else _zeros
        whole = site.tangents(operands[:n], dots, zeros)
        fn = self._code("value") if self.kind == "both" else None
        if not jvp.each:
            like = site.results.treedef
            out = like.unflatten([0] * like.num_leaves)
            calls = self._several(sendable.push_whole, self.sent, fn, out, args, whole)
        else:
            positions = sorted(set(pick(site.positions, self.nz)))
            terms = [(self._code("jvp", p), whole[p]) for p in positions]
            result = site.results.unflatten(outs) if outs else None
            fn = None if outs else self._code("value")
            calls = self._several(sendable.push_each, terms, fn, result, args)
        return *calls, self._pushed

    _both = _jvp

    def _fitting(
        self, values: Tangents, avals: Sequence[Aval], first: int = 0
    ) -> Arrays:
        """What JAX code returned, as arrays: the results from number `first` on."""
        words = [self._result_of_a_rule(first + i) for i, _ in enumerate(avals)]
        return self.site.fitting(values, avals, self.kind, words)

    def _pushed(self, value: tuple[Tree, Tree]) -> tuple[Tree, ...]:
        site = self.site
        rule = self.rule
        outs, touts = value
        if self.kind != "both":
            outs = ()
        elif not rule.flat:
            outs = site.out_leaves(outs, self.kind)
        if rule.flat:
            return *outs, *touts
        # A rule of one argument may return None for zero.
        terms = (there(touts) or touts[:1]) if rule.each else [touts]
        leaves = [pick(site.out_leaves(x, self.kind), site.out_diff) for x in terms]
        if self.traced:  # what may be anything that JAX takes for an array
            first = len(outs)
            leaves = [self._fitting(x, site.out_avals, first) for x in leaves]
        return *outs, *reduce(_add, leaves)

    def _forward(self, operands: Arrays) -> Parts:
        def finish(value: Tree) -> tuple[Tree, ...]:
            outs, residual = forward_pair(value, self.site.name)
            return *self.site.out_leaves(outs, self.kind), *self._kept(residual)

        return self.sent, self._arguments(operands), finish

    def _backward(self, operands: Arrays) -> Parts:
        site = self.site
        given = operands[self.linear]
        back = self.sent
        pulled = partial(self._pulled, given, None)
        more: Trees = (site.cotangents(given),)
        if self.rule.flat:
            more = spread(given, site.out_diff), site.unmasked(self.nz)
        if not self.rule.keeps_objects:
            residual = self._residual(operands[: len(operands) - len(given)])
            return back, (residual, *more), pulled
        handle = operands[self.n]
        residual, found = store.get(handle, self.take)
        if found:
            return back, (residual, *more), pulled
        # The forward rule again, as the store has dropped its residual.
        source = inspect_callable(site.function.fn).source
        store.warn(handle, site.name, source, site.place)
        sent = (
            self._code("forward"),
            back,
            site.name,
            self._arguments(operands[: self.n]),
        )

        def finish(value: tuple[Tree, Tree]) -> Tree:
            store.put_back(handle, value[0])
            return pulled(value[1])

        return *self._several(sendable.both_halves, *sent, more), finish

    def _pulled(self, given: Arrays, of: Positions, value: Tree) -> Trees:
        """The cotangents of arguments; those of host code with zeros for None.

        If the rule works on whole batches, the batch axes come first, and the zeros
        need them too, as the cotangents of the results have them.
        """
        if not self.rule.flat:
            leaves = self.site.argument_leaves(value, self.kind, of)
            value = pick(leaves, self.nz)
        if self.traced:
            return tuple(value)
        # All cotangents of the results have the same batch axes.
        ct = given[-1]
        out = self.site.out_avals[-1]
        batch = ct.shape[: len(ct.shape) - len(out.shape)]
        pairs = zip(value, self.avals, strict=True)
        zero = [
            np.zeros(batch + a.shape, a.dtype) if x is None else x for x, a in pairs
        ]
        return tuple(zero)

    def _transpose(self, operands: Arrays) -> Parts:
        site = self.site
        positions = self.site.diff_positions
        still = [not flag for flag in site.unmasked(self.nz)]
        given = operands[self.linear]
        args = self._arguments(spread(operands[: sum(still)], still))

        def finish(value: Tree) -> Tree:
            whole = (value,) if len(positions) == 1 else value
            return self._pulled(given, positions, whole)

        others = [arg for i, arg in enumerate(args) if i not in positions]
        return self.sent, (site.cotangents(given), *others), finish

    def _jacobian(self, operands: Arrays) -> Parts:
        leaves = self.site.jacobian_leaves
        return self.sent, self._arguments(operands), leaves


# What JAX raises if NumPy or Python's control flow wants the number of a traced value.
_OF_NUMPY = (
    jax.errors.TracerArrayConversionError,
    jax.errors.ConcretizationTypeError,
)


# --- In JAX code ---------------------------------------------------------------------
#
# What a rule is called with and what becomes of its value does not depend on where it
# runs. Rules in JAX code run while a program is traced.


@dataclass(frozen=True, eq=False, repr=False)
class TracedRuleCall(RuleCall):
    """A rule in JAX code. It runs for every row, whatever the mask is.

    Attributes:
        template: the tree of the residuals that a forward rule leaves for the backward
            rule.
        mask: an array of the program, or None.
    """

    traced = True
    template: Template | None = None
    mask: jax.Array | None = None

    def trace(self, operands: Arrays) -> Arrays:
        mask = None
        if self.site.masked:
            operands, mask = self.unmasked(operands)
        vars(self).update(mask=mask)  # which `_code` gives to a rule
        vars(self).update(sent=self._code(self.kind))
        run, sent, finish = self.split(self._gated(operands), {})
        try:
            value = run(*sent)
        except _OF_NUMPY as error:
            failures.add_note(error, self._is_jax_code())
            raise
        values = list(finish(value))
        n = len(self.avals)
        found = self._fitting(values[:n], self.avals)
        if mask is not None:
            fills = self._of_results(self.site.fills)
            found = list(map(partial(_masked, mask), found, fills))
        return [*found, *values[n:]]

    def _is_jax_code(self) -> str:
        rule = f"`{self.seen.name}`, {RULES[self.kind][1]} of `{self.site.name}`,"
        return (
            f'hostcall: {rule} has where="jax", so it is JAX code: it runs while the'
            " program is traced, on values that have no numbers yet. Write it with"
            " jax.numpy, or leave out where= for a rule that runs on the host with"
            " NumPy arrays"
        )

    def _gated(self, operands: Arrays) -> Arrays:
        """The operands, without derivatives where the mask is False.

        There a derivative of the rule may be infinite, and infinity times the zero
        cotangent of a masked result would be NaN.
        """
        mask = self.mask
        if mask is None:
            return operands
        linear = range(len(operands))[self.linear]

        def gated(i: int, operand: jax.Array) -> jax.Array:
            # A tangent may be one of Python's numbers.
            with _jax.able_to_hold(getattr(operand, "dtype", None)):
                x = jnp.asarray(operand)
                if not jnp.issubdtype(x.dtype, jnp.inexact):
                    return x
                other = 0 if i in linear else jax.lax.stop_gradient(x)
                return jnp.where(mask, x, other)

        return [gated(i, operand) for i, operand in enumerate(operands)]

    def _code(self, kind: Kind, index: int | None = None) -> Function:
        if kind == "value":
            return self._value
        rule: Tree = self.site.function._code_of(kind, index)
        # A rule that can take a mask, such as a HostFunction, gets it.
        masked = self.mask is not None and issubclass(type(rule), TakesMask)
        found: Function = rule.where(self.mask) if masked else rule
        return found

    def _value(self, *args: Tree) -> Tree:
        """The function itself, as a call in the program."""
        arrays, _ = flatten_arguments(args, {})
        mask = [] if self.mask is None else [self.mask]
        return self.site.results.unflatten(bind([*arrays, *mask], self.site))

    def _arguments(self, arrays: Arrays) -> Sequence[Tree]:
        return _with_keys(self.site.template, arrays)

    def _kept(self, residual: Tree) -> Arrays:
        kept, template = flatten_arguments((residual,), {})
        vars(self).update(template=template)
        return kept

    def _residual(self, leaves: Arrays) -> Tree:
        assert self.template is not None
        return _with_keys(self.template, leaves)[0]


def _with_keys(template: Template, arrays: Arrays) -> Trees:
    """The arguments that the first of these arrays are; typed keys among them."""
    keys = template.keys
    return template.unflatten(wrap_keys(arrays[: len(keys)], keys))[0]


def _zeros(like: jax.Array) -> jax.Array:
    return np.zeros(like.shape, like.dtype)


def _masked(mask: jax.Array, value: jax.Array, fill: bytes | None) -> jax.Array:
    """A result of JAX code, with its fill, or zeros, where the mask is False."""
    other = np.zeros(1, value.dtype)
    if fill is not None:
        other = np.frombuffer(fill, value.dtype)
    # One element stands for all, as it does if the shape is symbolic.
    shape = () if other.size == 1 else value.shape
    with _jax.able_to_hold(value.dtype):
        return jnp.where(mask, value, other.reshape(shape))
