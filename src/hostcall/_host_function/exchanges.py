"""What goes out to the user's code, and what comes back: one class for each kind of it.

A program hands host code flat arrays and wants flat arrays back. The user's functions
take and return trees. An `Exchange` has the two directions side by side: `request` says
which function is called with what, `results` makes arrays of what it returned.

    kind       operands in the program    the user's code is called      results
    value      (trees, by the engine)     fn(*args)                      (by the engine)
    jvp, both  args, tangents,            defjvp: rule(args, tangents)   [results,]
               [results]                  defjvps: rule(tangent,           tangents
                                            result, *args) for each
    forward    args                       fwd(*args)                     results,
                                                                           residuals
    backward   [args,] residuals,         bwd(residuals, cotangents)     cotangents of
               cotangents                                                  the args
    jacobian   args                       rule(*args)                    its blocks
    transpose  args that aren't linear,   rule(cotangents, *args that    cotangents of
               cotangents                   aren't linear)                 linear args

"args" are those arrays of the arguments that the operands have in front, and `nz` says
which arrays have tangents. A mask is no part of it: the two drivers take it away first.

    on the host    `rule_call.RuleCall`, which a program binds and the engine calls
    in JAX code    `in_jax.in_jax`, while a program is traced

What differs between the two is the `Side` of an exchange. Host code sees NumPy arrays,
its functions may be sent to workers, and the engine checks what it returns. JAX code
sees traced arrays and typed keys, and is checked here.

In a batch host code runs row by row, or gets all arrays with the batch's axes in
front, as `vmap_method=` says. An exchange is the same for both. Only the zeros that it
makes need the axes. A rule for batches (`defbatch`) has no exchange: it is JAX code in
place of the call (`BoundHostCall.batch`). Finite differences are an ordinary Jacobian
rule (`differences.Differences`), and a bridge's rules are those with `Rule.flat`.

A new kind is a class here, with its row in `rules.RULES`, and a line in `site` that
binds it.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import ClassVar, TypeAlias

import jax
import numpy as np

from hostcall._core.source import CallableFacts, inspect_callable
from hostcall._host_function import sendable
from hostcall._host_function.primitives import Arrays, Operands, Tangents, there
from hostcall._host_function.residuals import store
from hostcall._host_function.rules import (
    Function,
    Kind,
    Rule,
    Tree,
    Trees,
)
from hostcall._host_function.trees import (
    ArgumentLayout,
    Positions,
    forward_halves,
    pick,
    spread,
)
from hostcall._jax.types import Aval

# What messages call a result, and which shape it has; empty for the usual words.
Words: TypeAlias = tuple[str, str]

_USUAL_WORDS: Words = ("", "")
_LIKE_BOTH = "A Jacobian has the axes of the result, then those of the argument"
_LIKE_RESULT = "A tangent has the shape of the result whose tangent it is"
_LIKE_ARGUMENT = (
    "A cotangent has the shape of its argument, and the rule returns one for each, in"
    " the order of the arguments"
)

# What host code returns for an array may be nested lists of numbers.
_add = partial(jax.tree.map, operator.add)


# A call of the user's code: (function, its arguments). A plain tuple, since one is made
# in each call.
Request: TypeAlias = tuple[Function, Sequence[Tree]]


class Side(ABC):
    """Where the user's code runs, and what arrays are to it there."""

    @abstractmethod
    def function(
        self, code: Function, kind: Kind, index: int | None = None
    ) -> Function:
        """One of the user's functions, `Rules.of(kind, index)`, in a form to call
        there.
        """

    @abstractmethod
    def arguments(self, leaves: Sequence[jax.Array | None]) -> Sequence[Tree]:
        """The arguments that these leaves belong to. None stands for itself."""

    @abstractmethod
    def residual(self, rule: Rule, leaves: Operands) -> Tree:
        """The residual that a forward rule left as these leaves of the program."""

    @abstractmethod
    def zeros_like(self, array: jax.Array) -> jax.Array:
        """The zero tangent of an array."""

    @abstractmethod
    def fitted(
        self, tangents: Tangents, avals: Sequence[Aval], words: Iterable[Words]
    ) -> Sequence[Tree]:
        """Tangents that a rule returned, in a form that can be added."""

    @abstractmethod
    def with_zeros(
        self,
        cotangents: Tangents,
        avals: Sequence[Aval],
        result_cotangent: jax.Array,
        result_aval: Aval,
    ) -> Tangents:
        """Cotangents that a rule returned, where None may stand for zero.

        `result_cotangent` is one that the rule was given, and `result_aval` its aval in
        one row: what it has more is the axes of a whole batch, in front.
        """


@dataclass(frozen=True)
class OnHost(Side):
    """The side of host code, which gets arrays as NumPy has them, or as `arrays=` says.
    The engine checks what it returns.
    """

    layout: ArgumentLayout

    def function(
        self, code: Function, kind: Kind, index: int | None = None
    ) -> Function:
        owner = self.layout.function
        if owner.policy.pool is None:
            return code
        return sendable.Sendable(owner, kind, index)

    def arguments(self, leaves: Sequence[jax.Array | None]) -> Sequence[Tree]:
        template = self.layout.template
        return leaves if template.is_flat else template.unflatten(leaves)[0]

    def residual(self, rule: Rule, leaves: Operands) -> Tree:
        assert rule.residuals is not None, "others stay in the store, behind a handle"
        return rule.residuals.treedef.unflatten(leaves)

    def zeros_like(self, array: jax.Array) -> jax.Array:
        return np.zeros(array.shape, array.dtype)

    def fitted(
        self, tangents: Tangents, avals: Sequence[Aval], words: object
    ) -> Sequence[Tree]:
        del avals, words
        return tangents

    def with_zeros(
        self,
        cotangents: Tangents,
        avals: Sequence[Aval],
        result_cotangent: jax.Array,
        result_aval: Aval,
    ) -> Tangents:
        # A rule that gets whole batches has their axes in front of each array, and so
        # zeros must have them.
        batch_axes = len(result_cotangent.shape) - len(result_aval.shape)
        batch = result_cotangent.shape[:batch_axes]
        return [
            np.zeros(batch + aval.shape, aval.dtype) if cotangent is None else cotangent
            for cotangent, aval in zip(cotangents, avals, strict=True)
        ]


@dataclass(frozen=True)
class Exchange(ABC):
    """One kind of the user's code, as one call of a HostFunction needs it.

    Attributes:
        layout: of the arguments and results of the call.
        kind: which of the function's codes it is.
        rule: the rule that this belongs to.
        code: the user's function in it, which names the exchange in messages.
        avals: of the results of the exchange.
        nz: for each array of the arguments, whether it has a tangent here; for a
            transposition, whether the function is linear in it.
        side: where the code runs.
        take: whether a backward rule may take its residual out of the store, because
            this looks like the last use.
    """

    layout: ArgumentLayout
    kind: Kind
    rule: Rule
    code: Function
    avals: tuple[Aval, ...]
    nz: tuple[bool, ...]
    side: Side
    take: bool = True

    # Whether the results begin with those of the function itself.
    begins_with_results: ClassVar[bool] = False
    # Whether operands and results have the shape of the function's result, given that
    # the function is elementwise.
    is_elementwise: ClassVar[bool] = False

    # --- The two directions --------------------------------------------------------

    @abstractmethod
    def request(self, operands: Operands) -> Request:
        """What the user's code is called with. The operands have no mask."""

    @abstractmethod
    def results(self, answer: Tree, operands: Operands) -> Tree:
        """A tuple with an array for each aval, from what the user's code returned for
        these operands.
        """

    # --- What operands and results are ---------------------------------------------

    @property
    def argument_count(self) -> int:
        """How many of the first operands are arrays of the function's arguments."""
        return self.layout.n

    @property
    def mask_position(self) -> int:
        """Where the mask stands among the operands, if there is one."""
        return self.argument_count

    @property
    def linear(self) -> slice:
        """Which of its operands, without the mask, are tangents or cotangents."""
        return slice(0)

    def words(self, number: int) -> Words:
        """What messages call this result."""
        del number
        return _USUAL_WORDS

    # --- The user's code -----------------------------------------------------------

    @cached_property
    def function(self) -> Function:
        """`code`, in a form to call on its side."""
        return self.side.function(self.code, self.kind)

    def may_call(self) -> list[Function]:
        """All of the user's functions that a request may call; `code` is the first."""
        return [self.code]

    @cached_property
    def facts(self) -> CallableFacts:
        """What hostcall knows of the user's code that this calls."""
        codes = list(map(inspect_callable, self.may_call()))
        awaits = self.rule.runs_in == "host" and True in [code.awaits for code in codes]
        return CallableFacts(
            name=codes[0].name,
            code=None,
            awaits=awaits,
            yields=False,
            source=codes[0].source,
        )

    def _in_turn(self, calls: sendable.Calls, *args: Tree) -> Request:
        """A request that calls several of the user's functions."""
        awaits = self.facts.awaits
        run = sendable.await_in_turn if awaits else sendable.call_in_turn
        return run, (calls, *args)


class FunctionItself(Exchange):
    """The function. Its call has the trees, so the engine puts the arguments together
    and takes the result apart.
    """

    begins_with_results = True

    def request(self, operands: Operands) -> Request:
        return self.function, operands

    def results(self, answer: Tree, operands: Operands) -> Tree:
        del operands
        return answer


# --- Forward mode --------------------------------------------------------------------


class TangentRule(Exchange):
    """`defjvp` and `defjvps`: operands are arguments and the tangents that `nz` marks,
    results are the tangents of the results. For the kind "both" the function's results
    come in front of these.
    """

    @property
    def linear(self) -> slice:
        return slice(self.argument_count, self.argument_count + sum(self.nz))

    @property
    def begins_with_results(self) -> bool:  # type: ignore[override]
        return self.kind == "both"

    is_elementwise = True

    def may_call(self) -> list[Function]:
        return [self.code, self.layout.function.fn, *there(self.rule.by_argument)]

    def words(self, number: int) -> Words:
        layout = self.layout
        if self.begins_with_results:
            number -= len(layout.avals)
        if number < 0 or layout.function.advice:  # a bridge's rule is nobody's to mend
            return _USUAL_WORDS
        paths = pick(layout.results.paths(), layout.out_diff)
        return f"the tangent of {paths[number]}", _LIKE_RESULT

    def results(self, answer: Tree, operands: Operands) -> Trees:
        del operands
        result, tangents = answer
        outs: Arrays = []
        if self.begins_with_results:
            outs = self.layout.out_leaves(result, self.kind)
        return (*outs, *self._sum(tangents, first=len(outs)))

    def _sum(self, tangents: Sequence[Tree], first: int) -> Trees:
        """The sum of tangents of the result, of which the result number `first` of the
        exchange is the first leaf.
        """
        layout = self.layout
        avals = layout.out_avals
        numbers = range(first, first + len(avals))
        terms = []
        for tangent in tangents:
            # Integer results have no tangent, whatever a rule says of them.
            leaves = pick(layout.out_leaves(tangent, self.kind), layout.out_diff)
            terms.append(self.side.fitted(leaves, avals, map(self.words, numbers)))
        return tuple(reduce(_add, terms))

    def _tangents(self, operands: Operands) -> Trees:
        """The tangents in the structure of the arguments."""
        return self.layout.tangents(
            operands[: self.argument_count],
            spread(operands[self.linear], self.nz),
            self.side.zeros_like,
        )

    def _arguments(self, operands: Operands) -> Sequence[Tree]:
        return self.side.arguments(operands[: self.argument_count])


class TangentByAll(TangentRule):
    """`defjvp`: rule(arguments, tangents) -> tangent, or (result, tangent)."""

    def request(self, operands: Operands) -> Request:
        treedef = self.layout.results.treedef
        # Of "jvp" the results are known, so a rule that returns none is asked no more.
        function = None
        if self.begins_with_results:
            function = self.side.function(self.layout.function.fn, "value")
        return self._in_turn(
            sendable.tangent_by_all,
            self.function,
            function,
            treedef.unflatten([0] * treedef.num_leaves),
            self._arguments(operands),
            self._tangents(operands),
        )

    def results(self, answer: Tree, operands: Operands) -> Trees:
        result, tangent = answer
        return super().results((result, [tangent]), operands)


class TangentByEach(TangentRule):
    """`defjvps`: for each argument with a tangent, rule(tangent, result, *arguments) ->
    its share of the result's tangent.

    The operands of "jvp" end with the function's results.
    """

    def request(self, operands: Operands) -> Request:
        layout = self.layout
        tangents = self._tangents(operands)
        rules = []
        for position in sorted(set(pick(layout.positions, self.nz))):
            rule = self.rule.by_argument[position]
            assert rule is not None, "such a tangent is refused when it is traced"
            function = self.side.function(rule, "jvp", position)
            rules.append((function, tangents[position]))
        outs = operands[self.linear.stop :]
        return self._in_turn(
            sendable.tangent_by_each,
            rules,
            None if outs else self.side.function(layout.function.fn, "value"),
            layout.results.unflatten(outs) if outs else None,
            self._arguments(operands),
        )

    def results(self, answer: Tree, operands: Operands) -> Trees:
        result, tangents = answer
        # One rule may return None for zero. If all do, one None is left to be refused
        # or, in JAX code, to be zero.
        return super().results((result, there(tangents) or tangents[:1]), operands)


class TangentByBridge(TangentRule):
    """A bridge's rule(arguments, tangents, out_diff), on flat arrays; see `Rule.flat`.

    It returns the leaves of the result, and the tangents that `out_diff` marks.
    """

    def request(self, operands: Operands) -> Request:
        layout = self.layout
        tangents = layout.unmasked(spread(operands[self.linear], self.nz))
        arguments = (self._arguments(operands), tangents, layout.out_diff)
        return self.function, arguments

    def results(self, answer: Tree, operands: Operands) -> Trees:
        del operands
        outs, tangents = answer
        return (*outs, *tangents) if self.begins_with_results else tuple(tangents)


# --- Reverse mode --------------------------------------------------------------------


class ForwardRule(Exchange):
    """The first rule of `defvjp`: fwd(*args) -> (result, residuals).

    The results are those of the function, then what the residual becomes in the
    program: arrays, if the rule says which, else a handle of the residual, which stays
    here. (In JAX code the rule decides how many arrays: `in_jax.forward_in_jax`.)
    """

    begins_with_results = True

    def request(self, operands: Operands) -> Request:
        return self.function, self.side.arguments(operands)

    def results(self, answer: Tree, operands: Operands) -> Trees:
        del operands
        outs, residual = self.halves(answer)
        spec = self.rule.residuals
        if spec is None:
            return (*outs, store.put(residual))
        structure = "residuals in the structure of residuals="
        layout = self.layout
        arrays = layout.leaves_of(spec.treedef, residual, self.kind, structure)
        return (*outs, *arrays)

    def halves(self, answer: Tree) -> tuple[Arrays, Tree]:
        """(the leaves of the result, the residual)."""
        result, residual = forward_halves(answer, self.layout.name)
        return self.layout.out_leaves(result, self.kind), residual


class CotangentRule(Exchange):
    """A rule that gives cotangents of arguments, for those that `nz` marks. The last
    operands are the cotangents of the results.
    """

    @property
    def linear(self) -> slice:
        # A function without a floating result is not transposed, so there is one.
        assert self.layout.out_avals, "some result has a cotangent"
        return slice(-len(self.layout.out_avals), None)

    def words(self, number: int) -> Words:
        layout = self.layout
        if layout.function.advice:  # a bridge's rule is nobody's to mend
            return _USUAL_WORDS
        paths = pick(layout.template.paths(), layout.unmasked(self.nz))
        return f"the cotangent of {paths[number]}", _LIKE_ARGUMENT

    def _cotangents(
        self, values: Tree, operands: Operands, positions: Positions
    ) -> Trees:
        """The cotangents in a tuple with one value for each of these arguments."""
        leaves = self.layout.argument_leaves(values, self.kind, positions)
        return self._with_zeros(pick(leaves, self.nz), operands)

    def _with_zeros(self, cotangents: Tangents, operands: Operands) -> Trees:
        complete = self.side.with_zeros(
            cotangents,
            self.avals,
            # All cotangents of results have the same batch, so any of them tells it.
            result_cotangent=operands[-1],
            result_aval=self.layout.out_avals[-1],
        )
        return tuple(complete)


class BackwardRule(CotangentRule):
    """The second rule of `defvjp`: bwd(residuals, cotangent) -> a cotangent for each
    argument. A bridge's is bwd(residuals, cotangents, nz); see `Rule.flat`.

    A residual that stays on the host may have been dropped (see `residuals`), so its
    operands are the arguments too: [arguments, handle, cotangents]. Then the forward
    rule runs again. Otherwise they are [residual arrays, cotangents].
    """

    @property
    def argument_count(self) -> int:
        return self.layout.n if self.rule.keeps_objects else 0

    def may_call(self) -> list[Function]:
        return [self.code, self.rule.fn]

    def request(self, operands: Operands) -> Request:
        layout = self.layout
        count = self.argument_count
        cotangents = operands[self.linear]
        backward_args: Trees = (layout.cotangents(cotangents),)
        if self.rule.flat:
            backward_args = (
                spread(cotangents, layout.out_diff),
                layout.unmasked(self.nz),
            )
        if not self.rule.keeps_objects:
            arrays = operands[: len(operands) - len(cotangents)]
            residual = self.side.residual(self.rule, arrays)
            return self.function, (residual, *backward_args)

        handle = operands[count]
        residual, is_there = store.get(handle, self.take)
        if is_there:
            return self.function, (residual, *backward_args)
        source = inspect_callable(layout.function.fn).source
        store.warn(handle, layout.name, source, layout.place)
        return self._in_turn(
            sendable.forward_and_backward,
            self.side.function(self.rule.fn, "forward"),
            self.function,
            layout.name,
            self.side.arguments(operands[:count]),
            backward_args,
        )

    def results(self, answer: Tree, operands: Operands) -> Trees:
        # By its type, which no rule of a user's returns.
        if type(answer) is sendable.Recomputed:
            store.put_back(operands[self.argument_count], answer.residual)
            answer = answer.cotangents
        if self.rule.flat:
            return self._with_zeros(answer, operands)
        return self._cotangents(answer, operands, None)


class TransposeRule(CotangentRule):
    """`deftranspose`: rule(cotangent, *arguments in which the function isn't linear) ->
    the cotangent of the linear argument, or a tuple if there are several.

    The operands are the arrays of those arguments, then the cotangents.
    """

    argument_count = 0

    @property
    def mask_position(self) -> int:
        # The function isn't linear in its mask, which is behind all arguments.
        return self.nz.count(False) - 1

    def request(self, operands: Operands) -> Request:
        layout = self.layout
        # The tree of the arguments is put together with None for the linear arrays,
        # which the rule does not get.
        is_known = [not is_linear for is_linear in layout.unmasked(self.nz)]
        arrays = spread(operands[: sum(is_known)], is_known)
        nonlinear = [
            argument
            for position, argument in enumerate(self.side.arguments(arrays))
            if position not in layout.diff_positions
        ]
        cotangent = layout.cotangents(operands[self.linear])
        return self.function, (cotangent, *nonlinear)

    def results(self, answer: Tree, operands: Operands) -> Trees:
        positions = self.layout.diff_positions
        # A rule of one linear argument returns no tuple.
        values = (answer,) if len(positions) == 1 else answer
        return self._cotangents(values, operands, positions)


# --- Both modes ----------------------------------------------------------------------


class JacobianRule(Exchange):
    """`defjacobian`: rule(*args) -> the Jacobian; see `layout.jacobian_leaves`.

    Finite differences are one.
    """

    @property
    def is_elementwise(self) -> bool:  # type: ignore[override]
        # Only a diagonal has the shape of the result.
        return self.layout.diagonal

    def words(self, number: int) -> Words:
        return f"the Jacobian of {self.layout.jacobian_paths[number]}", _LIKE_BOTH

    def request(self, operands: Operands) -> Request:
        return self.function, self.side.arguments(operands)

    def results(self, answer: Tree, operands: Operands) -> Trees:
        del operands
        return self.layout.jacobian_leaves(answer)


_EXCHANGES: dict[Kind, type[Exchange]] = {
    "value": FunctionItself,
    "forward": ForwardRule,
    "backward": BackwardRule,
    "jacobian": JacobianRule,
    "transpose": TransposeRule,
}


def exchange_type(kind: Kind, rule: Rule) -> type[Exchange]:
    """The class for a kind of code of a rule."""
    if kind not in ("jvp", "both"):
        return _EXCHANGES[kind]
    if rule.flat:
        return TangentByBridge
    return TangentByEach if rule.by_argument else TangentByAll
