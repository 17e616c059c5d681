"""A call of a HostFunction, and which of its rules serves which derivative.

    rules                     forward mode          reverse mode
    deftranspose              the function itself   the transposition rule
    defjvp in JAX code        the rule              JAX transposes the rule
    defjacobian               J t                   J^T ct, with the same J
    defjvp in host code       the rule              refused: no reverse rule
    defvjp                    refused               bwd, on what fwd left
    several                   jvp, else jacobian    vjp, else jacobian

The first three are JAX code over values, so they need no primitive for the derivative.
The others, and functions with several rules, go through `host_jvp` (see `primitive`).

The way of a value and its gradient, for a `defvjp` in host code:

    traced    HostFunction._call flattens the arguments and binds host_function on a
                `Site`
              JAX differentiates it: `Site.jvp` binds host_jvp on a `Derivative`
              JAX splits that: `Derivative.start` binds host_function on
                FunctionCode("forward") and leaves host_linear on a `LinearPart`
              JAX transposes that: `LinearPart.back` binds host_function on
                FunctionCode("backward")
    lowered   `FunctionCode.run` makes each of the two a call, by `make`. Without a
                derivative `Site.run` does so, on FunctionCode("value")
    run       the engine calls `FunctionCode.__call__`: fwd runs, and its residual goes
                into `residuals.store`; bwd runs on what is found there
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hostcall import _jax
from hostcall._core.errors import BatchingError
from hostcall._core.source import Place
from hostcall._host_function import batching, rules  # noqa: F401  (it registers)
from hostcall._host_function.derivative import Derivative, contract, jacobian
from hostcall._host_function.function_code import FunctionCode
from hostcall._host_function.primitive import (
    Arrays,
    Tangents,
    Value,
    bind,
    bind_jvp,
    filled,
)
from hostcall._host_function.traced import bound
from hostcall._host_function.trees import Trees, pick, spread
from hostcall._primitives.axes import in_front
from hostcall._primitives.call.batching import batched_results


@dataclass(frozen=True)
class Site(Value):
    """A HostFunction, called with arguments of these trees.

    Attributes:
        function: the HostFunction, compared by identity.
        trees: the trees of this way of calling it.
        place: the user's line.
    """

    function: Any
    trees: Trees
    place: Place = field(compare=False)

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.trees.name

    @property
    def avals(self) -> tuple[Any, ...]:  # type: ignore[override]
        return self.trees.results.avals

    def __repr__(self) -> str:
        return self.name

    def run(self, args: Arrays) -> Arrays:
        return FunctionCode(self, "value", self.avals).run(args)

    def jvp(self, args: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
        function, trees = self.function, self.trees
        found = function.rules
        self._check_tangents(tangents)
        if not trees.out_avals:
            outs = bind(args, self)
            return outs, [None] * len(outs)
        if found.transpose:
            return self._linear_jvp(args, tangents)
        if found.vjp is None and found.jvp is None:
            if found.jacobian is None:
                raise rules.no_derivative(self.name, self.place, function.advice)
            outs = bind(args, self)
            touts = contract(jacobian(self, args), tangents, trees)
        else:
            nz = tuple(t is not None for t in tangents)
            some = [t for t in tangents if t is not None]
            derivative = Derivative(self, nz)
            if found.vjp or found.jacobian or found.jvp.where == "host":
                outs, touts = bind_jvp(args, some, derivative)
            else:
                both, n = derivative.run(args, some), len(self.avals)
                outs, touts = both[:n], both[n:]
        return outs, spread(touts, trees.out_diff)

    def _check_tangents(self, tangents: Tangents) -> None:
        jvp, trees = self.function.rules.jvp, self.trees
        each = jvp.each if jvp else ()
        for position, tangent in zip(trees.positions, tangents, strict=True):
            if tangent is None:
                continue
            why = ""
            if position in trees.nondiff:
                why = "which is in nondiff="
            elif each and (position >= len(each) or each[position] is None):
                why = "for which defjvps was given no rule"
            if why:
                raise rules.not_differentiable(self.name, position, why, self.place)

    # --- Linear functions ----------------------------------------------------------
    #
    # A linear function is its own derivative, and the transpose of its transpose is the
    # function again. So derivatives of any order work, and none needs `host_jvp`.

    @property
    def of_tangents(self) -> Site:
        """The same function with tangents for its linear arguments. Fills have none."""
        fills = None if self.trees.fills is None else (None,) * len(self.avals)
        return replace(self, trees=replace(self.trees, fills=fills))

    def _linear_jvp(self, args: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
        """The results, and the same function of the tangents."""
        diff, flags = self.trees.diff, self.trees.out_diff
        whole = zip(args, filled(args, tangents), diff, strict=True)
        touts = bind([t if flag else x for x, t, flag in whole], self.of_tangents)
        return bind(args, self), spread(pick(touts, flags), flags)

    def transposed(self, args: Arrays, cotangents: Arrays) -> Tangents:
        if self.function.rules.transpose is None:
            return super().transposed(args, cotangents)
        trees, linear = self.trees, self.trees.diff
        known = [x for x, flag in zip(args, linear, strict=True) if not flag]
        if any(x is None for x in known):
            there = zip(trees.positions, args, linear, strict=True)
            position = next(n for n, x, flag in there if x is None and not flag)
            why = "in which it isn't linear"
            raise rules.not_differentiable(self.name, position, why, self.place)
        avals = tuple(pick(trees.in_avals, linear))
        code = Transpose(self, "transpose", avals, linear)
        operands = [*known, *pick(cotangents, trees.out_diff)]
        return spread(bound(code, operands), linear)

    # --- Batches -------------------------------------------------------------------

    def batch(self, size: int, args: Arrays, dims: Any) -> tuple[Arrays, Any] | None:
        rule, trees = self.function.rules.batch, self.trees
        if rule is None:
            return None
        if trees.masked:
            raise BatchingError(
                f"hostcall: `{self.name}` is called with a mask (where), and has a"
                " defbatch rule, which the mask could not reach. Call it without the"
                " mask and choose with jnp.where; or give a vmap_method instead"
            )
        moved = in_front(args, dims)
        marks = trees.template.fill([d is not None for d in dims])[0]
        answer = rule(size, tuple(marks), *trees.arguments(moved))
        what = f"the defbatch rule of `{self.name}`"
        treedef = trees.results.treedef
        outs, flags = batched_results(answer, size, treedef, self.avals, what)
        return outs, [0 if flag else None for flag in flags]


class Transpose(FunctionCode):
    """The transpose of a linear function, by a rule in host code.

    Its operands are the arrays in which the function isn't linear, then the cotangents
    of the results, in which it is linear itself.
    """

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.site.trees.name}'s transpose"

    def __repr__(self) -> str:
        return self.name

    def jvp(self, args: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
        n = self.nz.count(False)
        if any(t is not None for t in tangents[:n]):
            raise self._not_again()
        moved = filled(args[n:], tangents[n:])
        return bind(args, self), bind([*args[:n], *moved], self)

    def transposed(self, args: Arrays, cotangents: Arrays) -> Tangents:
        known = args[: self.nz.count(False)]
        if any(x is None for x in known):
            raise self._not_again()
        rest, back = iter(known), iter(cotangents)
        moved = [next(back) if flag else next(rest) for flag in self.nz]
        outs = bind(moved, self.site.of_tangents)
        return [*(None for _ in known), *pick(outs, self.site.trees.out_diff)]


for _type in (Site, Transpose):
    _jax.hold_weakly_in_caches(_type)
