"""Host code of a HostFunction: the function itself, or one of its rules.

In a program it is a `RuleCall`, a `DiffFunction` that lowers to a call. The engine
calls the same `RuleCall` when the program runs. Its `Exchange` (`exchanges`) puts the
trees together for the user's function, and takes apart what that returns.

The user's function, in the middle, may run on another thread, in another process or on
another machine (`executor=`); see `sendable`. A residual that it computes comes back
here, since the next call may go to another worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import ClassVar, TypeVar

import jax

from hostcall._core.callback import CallSpec
from hostcall._core.host_code import HostCode
from hostcall._core.options import LOCAL_ONLY, WHOLE, CallOptions, Policy
from hostcall._core.spec import Opaque, Results, Template
from hostcall._host_function.exchanges import Exchange, OnHost, Words, exchange_type
from hostcall._host_function.primitives import (
    Arrays,
    DiffFunction,
    Flags,
    Moved,
    Operands,
    Tangents,
)
from hostcall._host_function.result_specs import aligned, says_items
from hostcall._host_function.rules import RULES, Function, Kind, Tree
from hostcall._host_function.trees import ArgumentLayout
from hostcall._jax.types import Aval
from hostcall._policies.layer import same
from hostcall._primitives.make import bind_call

T = TypeVar("T")


@dataclass(unsafe_hash=True, repr=False)
class RuleCall(HostCode, DiffFunction):
    """One piece of host code. It is compared by what it is made of, so that JAX's
    caches hit.

    The function itself gets its arguments as trees. A rule gets all arrays flat, which
    spares the engine the trees.

    Attributes:
        site: the call of the HostFunction that it belongs to.
        kind: which of the function's codes is called.
        avals: of its results.
        nz: for each array of the arguments, whether it has a tangent here; for a
            transposition, whether the function is linear in it.
        take: whether a backward rule may take its residual out of the store, because
            this looks like the last use.
    """

    # An exported program holds the fields below by these names.
    travels_as: ClassVar[str] = "host"

    site: ArgumentLayout = field(metadata=LOCAL_ONLY)
    kind: Kind
    avals: tuple[Aval, ...] = field(compare=False)
    nz: tuple[bool, ...] = ()
    take: bool = True

    def __post_init__(self) -> None:
        # The one thing that is set, so that the class can't be frozen: what Python
        # itself takes for the name of a callable can be no property of its class.
        self.__qualname__ = self.exchange.facts.name

    def __repr__(self) -> str:
        name = self.site.name
        return name if self.kind == "value" else f"{self.kind} of {name}"

    @cached_property
    def exchange(self) -> Exchange:
        """What goes out to the user's code, and what comes back."""
        site = self.site
        rule, code = site.function.rules.of(self.kind)
        return exchange_type(self.kind, rule)(
            layout=site,
            kind=self.kind,
            rule=rule,
            code=code,
            avals=self.avals,
            nz=self.nz,
            side=OnHost(site),
            take=self.take,
        )

    # --- In a program ----------------------------------------------------------------

    def run(self, operands: Arrays, by_rule: Function | None = None) -> Arrays:
        """The results of the call.

        `by_rule` is the user's rule for batches, if the call has effects. Without them
        the primitive of the HostFunction has the rule.
        """
        site = self.site
        exchange = self.exchange
        options = self.options
        mask = None
        if site.masked:
            operands, mask = without_mask(operands, exchange)
        method = by_rule or options.vmap_method
        if method in WHOLE and says_items(site.function.result):
            operands, method = aligned(
                operands,
                site,
                is_value=self.kind == "value",
                is_elementwise=exchange.is_elementwise,
                method=method,
            )
        if method is not options.vmap_method:
            options = replace(options, vmap_method=method)
        template, results = self._trees(len(operands))
        spec = CallSpec(
            fn=Opaque(self),
            template=template,
            results=results,
            fills=of_results(exchange, site.fills),
            options=options,
            place=site.place,
            policy=self.policy,
            # Only here: facts that this object keeps must not hold it. Such a cycle
            # would keep the user's function until the garbage collector runs.
            known=self.exchange.facts._replace(host_code=self),
        )
        return bind_call(spec, operands, mask)

    def _trees(self, operand_count: int) -> tuple[Template, Results]:
        """How the engine puts its operands together, and takes its results apart."""
        site = self.site
        if self.kind == "value":
            return site.template, site.results
        # A rule gets flat arrays. Those of the arguments may be typed keys.
        keys = site.template.keys[: self.exchange.argument_count]
        no_keys = (None,) * (operand_count - len(keys))
        result_keys = of_results(self.exchange, site.results.keys)
        return Template.flat(*keys, *no_keys), Results.flat(self.avals, result_keys)

    @property
    def options(self) -> CallOptions:
        """The options of its calls."""
        function = self.site.function
        options = function.options
        if self.kind == "value":
            return options
        # With lend="out" a rule gets views too, and returns arrays.
        lend = bool(options.lend)
        method = options.vmap_method
        if self.exchange.rule.keeps_objects:
            # The residual may be an argument, and then outlives the call.
            lend = lend and function.rules_copy
            # A residual is of one row, behind a handle of its own.
            method = "parallel" if method == "parallel" else "sequential"
        return replace(options, lend=lend, vmap_method=method)

    @property
    def policy(self) -> Policy:
        """How its calls are run."""
        function = self.site.function
        return function.policy.owned_by(function)

    def jvp(self, operands: Arrays, tangents: Tangents) -> Moved:
        del operands, tangents
        name = self.site.name
        rule = f"`{self.exchange.facts.name}`, a rule of `{name}` in host code,"
        if self.site.function.advice:  # the rule is not the user's
            rule = f"a derivative of `{name}`"
        raise self.site.missing("second", rule=rule)

    def shared(self, dims: Sequence[int | None]) -> DiffFunction:
        """A backward rule does not take out a residual that the rows share."""
        handle = len(self.site.in_avals)
        keeps_objects = self.kind == "backward" and self.exchange.rule.keeps_objects
        if keeps_objects and dims[handle] is None:
            return replace(self, take=False)
        return self

    def narrowed(self, used: Flags) -> DiffFunction | None:
        """The function itself, if nothing uses the forward rule's residuals."""
        if self.kind != "forward":
            return None
        used_residuals = used[len(self.site.avals) :]
        return None if any(used_residuals) else self.site

    # --- When the program runs -----------------------------------------------------

    def __call__(self, *operands: Tree, **out: Tree) -> Tree:
        exchange = self.exchange
        function, arguments = exchange.request(operands)
        # `out` has the arrays of lend="out", which only the function itself gets.
        return exchange.results(function(*arguments, **out), operands)

    def split(
        self, args: Sequence[Tree], kwargs: object
    ) -> tuple[Function, Sequence[Tree], Callable[[Tree], Sequence[Tree]]]:
        del kwargs
        exchange = self.exchange
        function, arguments = exchange.request(args)
        if self.kind == "value":
            # Nothing is to be done with what it returns, so its arguments may go.
            return function, arguments, same
        return function, arguments, partial(exchange.results, operands=args)

    # --- What the engine asks ------------------------------------------------------

    def source(self) -> str:
        return self.exchange.facts.source

    def awaits(self) -> bool:
        return self.exchange.facts.awaits

    def result_words(self, number: int) -> Words:
        which, shape = self.exchange.words(number)
        if not which:
            return "", ""
        code = self.exchange.facts.name
        rule = f"`{code}`, {RULES[self.kind].shown} of `{self.site.name}`"
        return f"{which} that {rule}, returned", shape

    def lane(self) -> Function:  # the function and its rules are one
        return self.site.function.fn

    def parts(self) -> tuple[Kind, Function]:
        return self.kind, self.exchange.code


def without_mask(operands: Operands, exchange: Exchange) -> tuple[Arrays, jax.Array]:
    """(the operands without the mask, the mask) of a masked call."""
    assert exchange.layout.masked, "the call was given a mask"
    position = exchange.mask_position
    unmasked = [*operands[:position], *operands[position + 1 :]]
    return unmasked, operands[position]


def of_results(
    exchange: Exchange, of_function: Sequence[T] | None
) -> tuple[T | None, ...]:
    """One entry for each result of an exchange: those of the function's results first,
    if they are among them, and None for the others.
    """
    first: Sequence[T] = ()
    if exchange.begins_with_results and of_function is not None:
        first = of_function
    behind = len(exchange.avals) - len(first)
    return (*first, *(None,) * behind)
