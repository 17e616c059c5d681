"""One way of calling a HostFunction: which of its rules serves which derivative.

    rules                     forward mode          reverse mode
    deftranspose              the function itself   the transposition rule
    defjvp in JAX code        the rule              JAX transposes the rule
    defjacobian               J t                   J^T ct, with the same J
    defjvp in host code       the rule              refused: no reverse rule
    defvjp                    refused               bwd, on what fwd left
    several                   jvp, else jacobian    vjp, else jacobian

The first three are JAX code over values, so they need no primitive for the derivative.
The others, and functions with several rules, go through `host_jvp` (see `primitive`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from hostcall import _jax
from hostcall._core.errors import BatchingError
from hostcall._core.source import Place
from hostcall._core.spec import flatten_arguments, wrap_keys
from hostcall._host_function import (  # they register
    batching,  # noqa: F401
    derivatives,  # noqa: F401
    rules,
)
from hostcall._host_function.linear import Transposed, contract, transposed_by_rule
from hostcall._host_function.pairs import SitePair
from hostcall._host_function.parts import HostCode, OfFunction
from hostcall._host_function.primitive import (
    Arrays,
    Tangents,
    bind,
    bind_jvp,
)
from hostcall._host_function.residuals import store
from hostcall._host_function.rules import forward_pair
from hostcall._host_function.trees import Trees, is_pair, pick, spread
from hostcall._primitives.call.batching import batched_results


@dataclass(frozen=True)
class Site(OfFunction):
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
    def avals(self) -> tuple[Any, ...]:  # type: ignore[override]
        return self.trees.results.avals

    def __repr__(self) -> str:
        return self.name

    def host(self, kind: Any, nz: tuple[bool, ...] = (), take: bool = True) -> HostCode:
        return HostCode(self.function, self.trees, kind, self.place, nz, take)

    @property
    def for_tangents(self) -> Site:
        """The same linear function with tangents for its linear arguments."""
        return replace(self, trees=self.trees.for_tangents)

    def run(self, args: Arrays) -> Arrays:
        return self.host("value").run(args)

    # --- Derivatives ---------------------------------------------------------------

    def jvp(self, args: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
        self._check_tangents(tangents)
        found = self.rules
        if not any(self.trees.out_diff):
            outs = bind(args, self)
            return outs, [None] * len(outs)
        if found.transpose:
            return self._linear_jvp(args, tangents)
        if found.vjp is None and found.jvp is None:
            if found.jacobian is None:
                raise rules.no_derivative(self.name, self.place, self.function.advice)
            outs = bind(args, self)
            touts = contract(self.jacobian(args), tangents, self.trees)
        elif found.only_jax_jvp:
            outs, touts = self.jax_jvp(args, tangents)
        else:
            nz = tuple(t is not None for t in tangents)
            some = [t for t in tangents if t is not None]
            outs, touts = bind_jvp(args, some, SitePair(self, nz))
        return outs, spread(touts, self.trees.out_diff)

    def _check_tangents(self, tangents: Tangents) -> None:
        each = self.rules.jvp.each if self.rules.jvp else ()
        for position, tangent in zip(self.trees.positions, tangents, strict=True):
            if tangent is None:
                continue
            why = ""
            if position in self.trees.nondiff:
                why = "which is in nondiff="
            elif each and (position >= len(each) or each[position] is None):
                why = "for which defjvps was given no rule"
            if why:
                raise rules.not_differentiable(self.name, position, why, self.place)

    def _linear_jvp(self, args: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
        moved = [
            (jnp.zeros_like(x) if t is None else t) if flag else x
            for x, t, flag in zip(args, tangents, self.trees.diff, strict=True)
        ]
        touts = bind(moved, self.for_tangents)
        flags = self.trees.out_diff
        return bind(args, self), spread(pick(touts, flags), flags)

    def transposed(self, args: Arrays, cotangents: Arrays) -> Tangents:
        rule = self.rules.transpose
        if rule is None:
            return super().transposed(args, cotangents)
        linear = self.trees.diff
        known = [x for x, flag in zip(args, linear, strict=True) if not flag]
        if any(x is None for x in known):
            position = self.trees.positions[args.index(None)]
            why = "in which it isn't linear"
            raise rules.not_differentiable(self.name, position, why, self.place)
        cotangents = pick(cotangents, self.trees.out_diff)
        if rule.where == "jax":
            back = transposed_by_rule(rule.rule, known, cotangents, self.trees)
        else:
            back = bind([*known, *cotangents], Transposed(self))
        return spread(back, linear)

    def jacobian(self, args: Arrays) -> Arrays:
        rule = self.rules.jacobian
        assert rule is not None
        if rule.where == "host":
            return bind(args, self.host("jacobian"))
        trees = self.trees
        args = trees.gated(args)
        found = trees.rule_masked(args, rule.rule)(*trees.arguments(args))
        leaves = trees.jacobian_leaves(found)
        blocks = trees.fitting(leaves, trees.jacobian_avals, "the Jacobian rule")
        return trees.zeroing(args, blocks)

    def jax_jvp(
        self, args: Arrays, tangents: Tangents, outs: Arrays | None = None
    ) -> tuple[Arrays, Arrays]:
        """The results and the tangents of the differentiable ones, by a JAX rule."""
        jvp, trees = self.rules.jvp, self.trees
        assert jvp is not None
        args, tangents = trees.gated(args), trees.zeroing(args, tangents)
        primals = trees.arguments(args)
        if jvp.flat:
            assert jvp.rule is not None
            leaves, dots = jvp.rule(primals, trees.unmasked(tangents), trees.out_diff)
            outs = trees.fitting(leaves, self.avals, "the jvp rule")
            dots = trees.fitting(dots, trees.out_avals, "the jvp rule")
            return trees.masking(args, outs), trees.zeroing(args, dots)
        whole = trees.tangents(args, tangents, jnp.zeros_like)
        if jvp.rule is None:
            outs = bind(args, self) if outs is None else outs
            out = trees.result(outs)
            terms = []
            for position in sorted(
                {*pick(trees.positions, [t is not None for t in tangents])}
            ):
                rule = jvp.each[position]
                assert rule is not None
                rule = trees.rule_masked(args, rule)
                term = rule(whole[position], out, *primals)
                terms.append(self._tangent_leaves(term))
            touts = [sum(ts[1:], ts[0]) for ts in zip(*terms, strict=True)]
            return outs, trees.zeroing(args, touts)
        value = trees.rule_masked(args, jvp.rule)(primals, whole)
        if is_pair(value, trees.results.treedef):
            leaves, _ = flatten_arguments((value[0],), {})
            outs = trees.fitting(leaves, self.avals, "the jvp rule")
            outs, value = trees.masking(args, outs), value[1]
        elif outs is None:
            outs = bind(args, self)
        return outs, trees.zeroing(args, self._tangent_leaves(value))

    def _tangent_leaves(self, value: Any) -> Arrays:
        leaves = self.trees.out_leaves(value, "the jvp rule")
        leaves = pick(leaves, self.trees.out_diff)
        return self.trees.fitting(leaves, self.trees.out_avals, "the jvp rule")

    def forward(self, args: Arrays) -> tuple[Arrays, Arrays, Any]:
        """The results, the residuals, and (for JAX code) the tree of the residuals."""
        vjp = self.rules.vjp
        assert vjp is not None
        n = len(self.avals)
        if vjp.where == "host":
            found = bind(args, self.host("forward"))
            if vjp.keeps_objects:
                _forget_with(found[n])
            return found[:n], found[n:], None
        args = self.trees.gated(args)
        value = vjp.fwd(*self.trees.arguments(args))
        out, residual = forward_pair(value, self.name)
        leaves, _ = flatten_arguments((out,), {})
        outs = self.trees.fitting(leaves, self.avals, "the forward rule")
        kept, template = flatten_arguments((residual,), {})
        return self.trees.masking(args, outs), kept, template

    def backward(
        self,
        nz: tuple[bool, ...],
        args: Arrays,
        kept: Arrays,
        template: Any,
        cotangents: Arrays,
    ) -> Arrays:
        """The cotangents of the arguments that `nz` marks."""
        vjp, trees = self.rules.vjp, self.trees
        assert vjp is not None
        if vjp.where == "host":
            take = True
            if vjp.keeps_objects:
                take = isinstance(kept[0], jax.core.Tracer)
                _forget_with(kept[0])
            else:
                args = args[-1:] if trees.masked else []
            what = self.host("backward", nz, take)
            return bind([*args, *kept, *cotangents], what)
        kept, cotangents = trees.gate(args, kept), trees.zeroing(args, cotangents)
        leaves = wrap_keys(kept, template.keys)
        ((residual,), _) = template.fill(leaves)
        avals = pick(trees.in_avals, nz)
        if vjp.flat:
            cts, wanted = spread(cotangents, trees.out_diff), trees.unmasked(nz)
            found = vjp.bwd(residual, cts, wanted)
            back = trees.fitting(found, avals, "the backward rule")
            return trees.zeroing(args, back)
        value = vjp.bwd(residual, trees.cotangents(cotangents))
        positions = range(len(trees.argument_trees))
        found = trees.argument_leaves(value, positions, "the backward rule")
        back = trees.fitting(pick(found, nz), avals, "the backward rule")
        return trees.zeroing(args, back)

    # --- Batching ------------------------------------------------------------------

    def batch(self, size: int, args: Arrays, dims: Any) -> tuple[Arrays, Any] | None:
        rule = self.rules.batch
        if rule is None:
            return None
        if self.trees.masked:
            raise BatchingError(
                f"hostcall: `{self.name}` is called with a mask (where), and has a"
                " defbatch rule, which the mask could not reach. Call it without the"
                " mask and choose with jnp.where; or give a vmap_method instead"
            )
        moved = [
            x if d is None else _jax.moveaxis(x, d, 0)
            for x, d in zip(args, dims, strict=True)
        ]
        marks = self.trees.template.fill([d is not None for d in dims])[0]
        answer = rule(size, tuple(marks), *self.trees.arguments(moved))
        what = f"the defbatch rule of `{self.name}`"
        treedef = self.trees.results.treedef
        outs, flags = batched_results(answer, size, treedef, self.avals, what)
        return outs, [0 if flag else None for flag in flags]


def _forget_with(handle: Any) -> None:
    """Ties the residual of an eager call to the array that holds its handle."""
    if isinstance(handle, jax.core.Tracer) or not isinstance(handle, jax.Array):
        return
    if handle.is_fully_addressable and handle.is_ready():
        store.forget_with(handle)


for _type in (Site, HostCode, Transposed):
    _jax.hold_weakly_in_caches(_type)
