"""How a function is given its rules: the def* methods of a HostFunction.

Each checks what it is given and makes a `Rule` of it, which it sets once: programs may
be compiled with a rule, and JAX's caches would keep these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, overload

from hostcall import _jax
from hostcall._core import mistakes
from hostcall._core.errors import SpecError, counted
from hostcall._core.host_code import Handle
from hostcall._core.option_checks import check
from hostcall._core.options import CallOptions, Option, Policy
from hostcall._core.signatures import accepts, most_positions, signature_of
from hostcall._core.source import inspect_callable, name_of
from hostcall._core.spec import parse_result
from hostcall._host_function.rules import (
    F,
    Function,
    Kind,
    Rule,
    Rules,
    Tree,
    Where,
)
from hostcall._policies.on_loop import run_one

_WHERE = Option(
    "'host' (Python on NumPy arrays) or 'jax' (JAX code)",
    lambda value: value in ("host", "jax"),
)


class Ruled(Handle):
    """A Python function with its rules: what these see of a HostFunction."""

    __name__: str
    __qualname__: str
    fn: Function
    rules: Rules  # those that it was given
    options: CallOptions  # of the calls that run it, where these have none of their own
    policy: Policy  # how it is run, its rules too
    result: Tree  # as `hc.host` takes it
    nondiff: tuple[int, ...]
    advice: str  # what errors advise if the rules are not the user's to give
    rules_copy = False  # whether rules that keep an argument as a residual copy it

    def _code_of(self, kind: Kind, index: int | None = None) -> Function:
        return self.rules.of(kind, index)[1]

    def run(self, *args: Any) -> Any:
        """Calls the function on this thread, or on the event loop and waits."""
        return call_here(self.fn, args)

    # --- The methods that set rules ------------------------------------------------

    @overload
    def defjvp(self, rule: F, *, where: Where = "host") -> F: ...
    @overload
    def defjvp(self, *, where: Where = "host") -> Callable[[F], F]: ...
    def defjvp(self, rule: Any = None, *, where: Where = "host") -> Any:
        """Sets the rule for forward mode.

        Args:
            rule: `rule(primals, tangents)`, both tuples with one entry per argument;
                returns the tangent of the result, or (result, tangent). Tangents that
                JAX knows to be zero are not sent to the host; zeros are made there in
                their place. Tangents of integers are float0 zeros; those of `nondiff`
                and static arguments are None.
            where: "host" for Python on NumPy arrays; "jax" for JAX code, from which JAX
                derives reverse mode and higher orders too.
        """
        return self._give("jvp", where, rule)

    def defjvps(self, *each: Function | None, where: Where = "host") -> None:
        """Sets the rule for forward mode, one argument at a time.

        Args:
            *each: for each argument `rule(tangent, result, *primals)`, which returns
                that argument's share of the result's tangent. None for an argument
                without a derivative: differentiating with respect to it is an error.
            where: as in `defjvp`, for all rules.
        """
        rules = [rule for rule in each if rule is not None]
        runs_in = self._where("defjvps(*rules)", where, *rules)
        if not rules:
            raise SpecError(
                f"hostcall: defjvps of `{self.__name__}` was given no rule: give one"
                " for each argument that has a derivative",
                code="hc-rule",
            )
        most = most_positions(self.fn)
        if len(each) > most:
            raise SpecError(
                f"hostcall: defjvps of `{self.__name__}` was given"
                f" {counted(len(each), 'rule')}, one for each argument, and it takes"
                f" {counted(int(most), 'argument')} by position",
                code="hc-rule",
            )
        self._add("jvp", Rule(rules[0], runs_in, by_argument=each))

    def defvjp(
        self, fwd: Any, bwd: Any, *, where: Where = "host", residuals: Any = None
    ) -> None:
        """Sets the rules for reverse mode.

        Args:
            fwd: `fwd(*args)`; returns (result, residuals).
            bwd: `bwd(residuals, cotangent)`; returns a tuple with a cotangent for each
                argument, None for zero. The cotangent has the result's structure.
            where: as in `defjvp`, for both. JAX code may have any residuals.
            residuals: for host code. By default residuals are any Python objects and
                stay on the host. At most 1024 are kept (hc.configure(residuals=)); for
                one that was dropped, `fwd` runs again. With a spec (as `result=` of
                `hc.call`) they are arrays of the program, which work in batches too:
                give it for small arrays, and if `fwd` must not run twice.
        """
        runs_in = self._where("defvjp(fwd, bwd)", where, fwd, bwd)
        if residuals is not None and runs_in == "jax":
            raise SpecError(
                f"hostcall: defjvp of `{self.__name__}` has residuals= and JAX code,"
                " whose residuals JAX sees: drop residuals=",
                code="hc-rule",
            )
        if residuals is not None:
            residuals = parse_result(residuals, f"{self.__name__} (residuals=)")
        self._takes_two(bwd, "bwd(residuals, cotangent)")
        self._add("vjp", Rule(fwd, runs_in, bwd, residuals=residuals))

    @overload
    def deftranspose(self, rule: F, *, where: Where = "host") -> F: ...
    @overload
    def deftranspose(self, *, where: Where = "host") -> Callable[[F], F]: ...
    def deftranspose(self, rule: Any = None, *, where: Where = "host") -> Any:
        """Says that the function is linear in all arguments that aren't `nondiff`
        together, and sets its transpose.

        Args:
            rule: `rule(cotangent, *nonlinear)`, where `nonlinear` are the arguments in
                `nondiff` and integer ones; returns the cotangent of the linear
                argument, or a tuple of them if there are several.
            where: as in `defjvp`.
        """
        return self._give("transpose", where, rule)

    @overload
    def defjacobian(self, rule: F, *, where: Where = "host") -> F: ...
    @overload
    def defjacobian(self, *, where: Where = "host") -> Callable[[F], F]: ...
    def defjacobian(self, rule: Any = None, *, where: Where = "host") -> Any:
        """Sets the Jacobian, which serves both modes.

        Args:
            rule: `rule(*args)`; returns, in the structure of the result, the Jacobian
                of each array of it: arrays of shape out.shape + in.shape, in the
                structure of the argument. With several arguments it is a tuple, with an
                entry for each differentiable one.
            where: as in `defjvp`. A HostFunction counts as JAX code, and its own rules
                give derivatives of higher order.
        """
        return self._give("jacobian", where, rule)

    def defbatch(self, rule: F) -> F:
        """Sets the rule for vmap, in JAX code, instead of a `vmap_method`.

        Args:
            rule: `rule(axis_size, in_batched, *args)`; returns (result, batched). The
                batch is the first axis of each batched array. The derivative of a
                batched call is that of this code.
        """
        self._where("defbatch(rule)", "jax", rule)
        self._add("batch", rule)
        return rule

    def _give(self, kind: Kind, runs_in: Where, rule: F | None) -> object:
        """Sets a rule that may be given by a decorator."""
        if rule is None:
            return functools.partial(self._give, kind, runs_in)
        runs_in = self._where(f"def{kind}(rule)", runs_in, rule)
        if kind == "jvp":
            self._takes_two(rule, "rule(primals, tangents)")
        self._add(kind, Rule(rule, runs_in))
        return rule

    def _where(self, usage: str, runs_in: Where, *rules: Function) -> Where:
        """Where the rules run; refuses what can't be rules, and a wrong `runs_in`."""
        shown = f"{usage} of `{self.__name__}`"
        check(shown, {"where": runs_in}, {"where": _WHERE})
        face = mistakes.Face("a rule", f"{self.__name__}({{args}})")
        if any(isinstance(rule, Ruled) for rule in rules):
            # It is called in the program, where its own rules give derivatives.
            runs_in = "jax"
        for rule in rules:
            if not callable(rule):
                raise SpecError(
                    f"hostcall: {shown} wants a function, got {rule!r}", code="hc-rule"
                )
            facts = inspect_callable(rule)
            this = f"the rule `{facts.name}`"
            if facts.awaits and runs_in == "jax":
                raise SpecError(
                    f"hostcall: {this} of `{self.__name__}` is a coroutine function and"
                    " JAX code, which JAX traces and can't await: make it a plain one",
                    code="hc-coroutine",
                )
            if facts.awaits:
                options = vars(self.options) | vars(self.policy)
                check(this, {**options, "awaits": True}, {})
            # A rule that is given inside of jit may hold traced values in its closure.
            if runs_in == "host" and not _jax.traces_nothing():
                mistakes.refuse_traced(rule, face.instead_of_traced)
        return runs_in

    def _takes_two(self, rule: Function, form: str) -> None:
        if not accepts(rule, 2, ()):
            raise SpecError(
                f"hostcall: a rule of `{self.__name__}` is called as {form}, but"
                f" `{name_of(rule)}` takes {signature_of(rule)}",
                code="hc-rule",
            )

    def _add(self, kind: str, rule: object) -> None:
        """Sets a rule, once, if it goes together with the order and other rules."""
        rules = self.rules
        order = self.options.order
        code = "hc-rule"
        # Of the rules that the two modes choose among, this one and those given so far.
        kinds: list[str] = []
        for of_mode in ("jvp", "vjp", "jacobian"):
            if of_mode == kind or getattr(rules, of_mode) is not None:
                kinds.append(of_mode)
        if order != "pure" and kind != "batch":
            code = "hc-conflict"
            why = (
                f"order={order!r} and def{kind}. Derivatives run the function again, or"
                " not at all: make it pure, and its effects a hc.tap or hc.call"
            )
        elif getattr(rules, kind) is not None:
            # JAX's caches compare a HostFunction by identity, and would keep the first.
            why = (
                f"a rule by def{kind} already. Programs may be compiled with it: make a"
                " new function with hc.host for another"
            )
        elif kinds and (rules.transpose or kind == "transpose"):
            why = (
                f"deftranspose and def{kinds[0]}. deftranspose says that the function"
                " is linear, and so its own derivative: drop one of the two"
            )
        else:
            setattr(rules, kind, rule)
            return
        raise SpecError(f"hostcall: `{self.__name__}` has {why}", code=code)


def call_here(fn: Function, args: Sequence[Tree]) -> Tree:
    """Calls a user's function on this thread, or on the event loop and waits."""
    return run_one(fn, *args) if inspect_callable(fn).awaits else fn(*args)
