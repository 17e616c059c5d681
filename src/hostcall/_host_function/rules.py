"""A Python function with its rules, as data; and the errors for a missing rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar

from hostcall._core.spec import Results

Where = Literal["host", "jax"]
Function = Callable[..., Any]
# An argument, a result or a residual of the user's: a pytree of anything.
Tree: TypeAlias = Any
Trees: TypeAlias = tuple[Tree, ...]
# The parameters and the result of the function that a HostFunction is made of.
P = ParamSpec("P")
R = TypeVar("R", covariant=True)
F = TypeVar("F", bound=Function)  # a rule, which its decorator returns


# The kinds of code that a program calls. By these names exported programs know them.
# value: the function itself.
# jvp: the tangents of the results. both: the results and their tangents.
# forward, backward: the two rules of defvjp.
Kind = Literal["value", "jvp", "both", "forward", "backward", "jacobian", "transpose"]


class KindOfCode(NamedTuple):
    """What is known of a kind of code without its exchange (`exchanges`).

    Attributes:
        field: the field of `Rules` that has it.
        shown: what messages call it.
    """

    field: str
    shown: str


RULES: dict[Kind, KindOfCode] = {
    "value": KindOfCode("value", "the function"),
    "jvp": KindOfCode("jvp", "the jvp rule"),
    "both": KindOfCode("jvp", "the jvp rule"),
    "forward": KindOfCode("vjp", "the forward rule"),
    "backward": KindOfCode("vjp", "the backward rule"),
    "jacobian": KindOfCode("jacobian", "the Jacobian rule"),
    "transpose": KindOfCode("transpose", "the transposition rule"),
}


@dataclass(frozen=True)
class Rule:
    """What one of the def* methods was given.

    Attributes:
        fn: the rule, or the forward rule; the first one of `defjvps`.
        runs_in: "host" or "jax", as `where=` says.
        bwd: the backward rule of `defvjp`.
        by_argument: the rules of `defjvps`, by argument; else empty.
        residuals: the spec of those that are arrays of the program; None if they stay
            on the host, and for JAX code, whose `fn` returns any it likes.
        flat: the rule is a bridge's and works on flat arrays. A jvp rule is
            fn(primals, tangents, out_diff), with one tangent per array and None for
            zero; it returns the leaves of the result, and the tangents of the leaves
            that `out_diff` marks. A backward rule skips unwanted cotangents:
            bwd(residuals, cotangents, nz), with one cotangent per leaf of the result
            and None for a leaf without one; it returns one for each array that `nz`
            marks.
        diagonal: it is the Jacobian rule of an elementwise function, and returns the
            diagonal of each block, of the result's shape.
    """

    fn: Function
    runs_in: Where
    bwd: Function | None = None
    by_argument: tuple[Function | None, ...] = ()
    residuals: Results | None = None
    flat: bool = False
    diagonal: bool = False

    @cached_property
    def keeps_objects(self) -> bool:
        """Whether its residuals stay on the host, behind a handle."""
        is_vjp_on_host = self.bwd is not None and self.runs_in == "host"
        return is_vjp_on_host and self.residuals is None


@dataclass
class Rules:
    """The function, and all rules that it was given; None for each that it was not."""

    value: Rule
    jvp: Rule | None = None
    vjp: Rule | None = None
    transpose: Rule | None = None
    jacobian: Rule | None = None
    batch: Function | None = None

    def of(self, kind: Kind, index: int | None = None) -> tuple[Rule, Function]:
        """(the rule, the function in it that the user gave) for a kind of code.

        `index` is the argument of a rule of `defjvps`; None for the first of them.
        """
        rule: Rule = getattr(self, RULES[kind].field)
        assert rule is not None, "a kind of code is asked for if its rule is there"
        code = rule.bwd if kind == "backward" else rule.fn
        if index is not None:
            code = rule.by_argument[index]
        assert code is not None
        return rule, code


def among(positions: tuple[int, ...], n: int) -> tuple[int, ...]:
    """The positions, counted from 0, that exist among n arguments.

    A negative position counts from the end. A position that does not exist belongs to
    an optional argument that this call leaves out.
    """
    return tuple(i % n for i in positions if -n <= i < n)


# --- Missing rules -------------------------------------------------------------------

# By what is missing. `advice` is the function's own if the rules aren't the user's to
# give; otherwise it is from the second table.
MISSING = {
    "derivative": "`{name}` has no derivative rule (called at {place}). {advice}",
    "forward": (
        "`{name}` has a rule for reverse mode (defvjp), and is differentiated in"
        " forward mode: jvp, jacfwd, hessian (called at {place}). Add"
        " {name}.defjvp(rule), with rule(primals, tangents) -> tangent of the result,"
        " or {name}.defjacobian(rule), which serves both modes"
    ),
    "reverse": (
        "`{name}` has a rule for forward mode in host code (defjvp), and is"
        " differentiated in reverse mode: grad, vjp, jacrev (called at {place}). Add"
        " {name}.defvjp(fwd, bwd), with fwd(*args) -> (out, residuals) and"
        " bwd(residuals, cotangent) -> cotangents; or {name}.defjacobian(rule); or"
        " write the rule in JAX code: {name}.defjvp(rule, where='jax')"
    ),
    "second": "{rule} is itself differentiated (called at {place}). {advice}",
    "argument": (
        "`{name}` is differentiated with respect to argument {position}, {why} (called"
        " at {place}). Keep the derivative out with jax.lax.stop_gradient on that"
        " argument, or give a rule for it"
    ),
}
ADVICE = {
    "derivative": (
        "Give one: {name}.defjvp(rule) for forward mode, {name}.defvjp(fwd, bwd) for"
        " reverse mode, {name}.defjacobian(rule) for both,"
        " hc.derivatives.finite_difference({name}) if you have no rule; or keep the"
        " derivative out with jax.lax.stop_gradient on its arguments"
    ),
    "second": (
        "For derivatives of higher order write the rule in JAX code (where='jax') over"
        " functions that have rules of their own, such as other hc.host functions"
    ),
}
