"""The derivative of a call for which both modes may have rules of their own.

`Derivative` is (results, derivative along some tangents). When JAX needs to know the
two halves apart, `start` computes the results and hands the rest to a `LinearPart`:
constants, and a linear function of the tangents with its transpose. The functions at
the end apply the rules of `defjvp` and `defvjp`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from hostcall import _jax
from hostcall._core.spec import flatten_arguments, wrap_keys
from hostcall._host_function import rules
from hostcall._host_function.function_code import FunctionCode
from hostcall._host_function.jacobian import contract, jacobian
from hostcall._host_function.primitive import (
    Arrays,
    Linear,
    Pair,
    Tangents,
    bind,
    bind_linear,
)
from hostcall._host_function.residuals import HANDLE, store
from hostcall._host_function.trees import is_pair, pick, spread


@dataclass(frozen=True)
class Derivative(Pair):
    """A call and its derivative along the tangents that `nz` marks.

    Attributes:
        value: the call that is differentiated.
        nz: for each array of the arguments, whether it has a tangent.
    """

    value: Any  # a site.Site
    nz: tuple[bool, ...]

    @property
    def tangent_avals(self) -> tuple[Any, ...]:  # type: ignore[override]
        return self.value.trees.out_avals  # type: ignore[no-any-return]

    def run(self, args: Arrays, tangents: Arrays) -> Arrays:
        site, function = self.value, self.value.function
        jvp = function.rules.jvp
        if jvp and jvp.where == "host" and function.options["lend"] != "out":
            avals = (*site.avals, *self.tangent_avals)
            return bind([*args, *tangents], FunctionCode(site, "both", avals, self.nz))
        if jvp and jvp.where == "jax":
            outs, touts = jax_jvp(site, args, spread(tangents, self.nz))
            return [*outs, *touts]
        outs, consts, linear = self.start(args, False)
        return [*outs, *bind_linear(consts, tangents, linear)]

    def start(self, args: Arrays, backward: bool) -> tuple[Arrays, Arrays, Linear]:
        site, found = self.value, self.value.function.rules
        kept: Arrays = []
        template: Any = None
        if backward and found.vjp:
            outs, kept, template = _forward(site, args)
        else:
            outs = bind(args, site)
            if backward and found.jacobian:
                kept = jacobian(site, args)
        linear = LinearPart(site, self.nz, backward, template)
        return outs, linear.consts(args, outs, kept), linear


@dataclass(frozen=True)
class LinearPart(Linear):
    """The derivative at given arguments, as a linear function of tangents.

    Its consts are, as far as its rules need them, the arguments, the results and the
    residuals.

    Attributes:
        site: the call that is differentiated.
        nz: for each array of the arguments, whether it has a tangent.
        ready: whether the consts include what the reverse rule needs.
        template: the tree of the residuals of JAX code.
    """

    site: Any  # a site.Site
    nz: tuple[bool, ...]
    ready: bool
    template: Any

    @property
    def avals(self) -> tuple[Any, ...]:  # type: ignore[override]
        return self.site.trees.out_avals  # type: ignore[no-any-return]

    def consts(self, args: Arrays, outs: Arrays, kept: Arrays) -> Arrays:
        with_args, with_outs = self._layout()
        return [*(args if with_args else ()), *(outs if with_outs else ()), *kept]

    def _parts(self, consts: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        """(arguments, results, residuals); empty lists for those that aren't kept."""
        with_args, with_outs = self._layout()
        n = len(self.nz) if with_args else 0
        m = n + (len(self.site.avals) if with_outs else 0)
        return consts[:n], consts[n:m], consts[m:]

    def _layout(self) -> tuple[bool, bool]:
        """Whether the arguments are among the consts, and whether the results are."""
        found = self.site.function.rules
        again = found.vjp is not None and found.vjp.keeps_objects
        each = found.jvp is not None and bool(found.jvp.each)
        again = again or self.site.trees.masked
        return not self.ready or found.jvp is not None or again, each

    def run(self, consts: Arrays, tangents: Arrays) -> Arrays:
        site, found = self.site, self.site.function.rules
        args, outs, kept = self._parts(consts)
        if found.jvp and found.jvp.where == "host":
            code = FunctionCode(site, "jvp", self.avals, self.nz)
            return bind([*args, *tangents, *outs], code)
        if found.jvp:
            return jax_jvp(site, args, spread(tangents, self.nz), outs or None)[1]
        if found.jacobian:
            there = self.ready and found.vjp is None
            blocks = kept if there else jacobian(site, args)
            return contract(blocks, spread(tangents, self.nz), site.trees)
        raise rules.no_forward(site.name, site.place)

    def back(self, consts: Arrays, cotangents: Arrays) -> Arrays:
        site, found, template = self.site, self.site.function.rules, self.template
        args, _, kept = self._parts(consts)
        if found.vjp:
            if not self.ready:
                _, kept, template = _forward(site, args)
            return _backward(site, self.nz, args, kept, template, cotangents)
        if found.jacobian:
            blocks = kept if self.ready else jacobian(site, args)
            return contract(blocks, cotangents, site.trees, self.nz)
        raise rules.no_reverse(site.name, site.place)


for _type in (Derivative, LinearPart):
    _jax.hold_weakly_in_caches(_type)


# --- defvjp --------------------------------------------------------------------------


def _forward(site: Any, args: Arrays) -> tuple[Arrays, Arrays, Any]:
    """The results, the residuals, and (for JAX code) the tree of the residuals."""
    vjp, trees = site.function.rules.vjp, site.trees
    n = len(site.avals)
    if vjp.where == "host":
        residuals = (HANDLE,) if vjp.keeps_objects else vjp.residuals.avals
        found = bind(args, FunctionCode(site, "forward", (*site.avals, *residuals)))
        if vjp.keeps_objects:
            _forget_with(found[n])
        return found[:n], found[n:], None
    args = trees.gated(args)
    value = vjp.fwd(*trees.arguments(args))
    out, residual = rules.forward_pair(value, site.name)
    leaves, _ = flatten_arguments((out,), {})
    outs = trees.fitting(leaves, site.avals, "the forward rule")
    kept, template = flatten_arguments((residual,), {})
    return trees.masking(args, outs), kept, template


def _backward(
    site: Any,
    nz: tuple[bool, ...],
    args: Arrays,
    kept: Arrays,
    template: Any,
    cotangents: Arrays,
) -> Arrays:
    """The cotangents of the arguments that `nz` marks."""
    vjp, trees = site.function.rules.vjp, site.trees
    avals = tuple(pick(trees.in_avals, nz))
    if vjp.where == "host":
        take = True
        if vjp.keeps_objects:
            take = isinstance(kept[0], jax.core.Tracer)
            _forget_with(kept[0])
        else:
            args = args[-1:] if trees.masked else []
        code = FunctionCode(site, "backward", avals, nz, take)
        return bind([*args, *kept, *cotangents], code)
    kept, cotangents = trees.gate(args, kept), trees.zeroing(args, cotangents)
    leaves = wrap_keys(kept, template.keys)
    ((residual,), _) = template.fill(leaves)
    if vjp.flat:
        cts, wanted = spread(cotangents, trees.out_diff), trees.unmasked(nz)
        back = trees.fitting(vjp.bwd(residual, cts, wanted), avals, "the backward rule")
        return trees.zeroing(args, back)  # type: ignore[no-any-return]
    value = vjp.bwd(residual, trees.cotangents(cotangents))
    found = trees.argument_leaves(value, "the backward rule")
    back = trees.fitting(pick(found, nz), avals, "the backward rule")
    return trees.zeroing(args, back)  # type: ignore[no-any-return]


def _forget_with(handle: Any) -> None:
    """Ties the residual of an eager call to the array that holds its handle."""
    if isinstance(handle, jax.core.Tracer) or not isinstance(handle, jax.Array):
        return
    if handle.is_fully_addressable and handle.is_ready():
        store.forget_with(handle)


# --- defjvp in JAX code --------------------------------------------------------------


def jax_jvp(
    site: Any, args: Arrays, tangents: Tangents, outs: Arrays | None = None
) -> tuple[Arrays, Arrays]:
    """The results and the tangents of the differentiable ones."""
    jvp, trees = site.function.rules.jvp, site.trees
    args, tangents = trees.gated(args), trees.zeroing(args, tangents)
    primals = trees.arguments(args)
    if jvp.flat:
        leaves, dots = jvp.rule(primals, trees.unmasked(tangents), trees.out_diff)
        outs = trees.fitting(leaves, site.avals, "the jvp rule")
        dots = trees.fitting(dots, trees.out_avals, "the jvp rule")
        return trees.masking(args, outs), trees.zeroing(args, dots)
    whole = trees.tangents(args, tangents, jnp.zeros_like)
    if jvp.rule is None:
        outs = bind(args, site) if outs is None else outs
        out = trees.results.fill(outs)
        terms = []
        moving = [t is not None for t in tangents]
        for position in sorted({*pick(trees.positions, moving)}):
            rule = trees.rule_masked(args, jvp.each[position])
            term = rule(whole[position], out, *primals)
            terms.append(_tangent_leaves(site, term))
        touts = [sum(ts[1:], ts[0]) for ts in zip(*terms, strict=True)]
        return outs, trees.zeroing(args, touts)
    value = trees.rule_masked(args, jvp.rule)(primals, whole)
    if is_pair(value, trees.results.treedef):
        leaves, _ = flatten_arguments((value[0],), {})
        outs = trees.fitting(leaves, site.avals, "the jvp rule")
        outs, value = trees.masking(args, outs), value[1]
    elif outs is None:
        outs = bind(args, site)
    return outs, trees.zeroing(args, _tangent_leaves(site, value))


def _tangent_leaves(site: Any, value: Any) -> Arrays:
    trees = site.trees
    leaves = pick(trees.out_leaves(value, "the jvp rule"), trees.out_diff)
    return trees.fitting(leaves, trees.out_avals, "the jvp rule")  # type: ignore[no-any-return]
