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
                `BoundHostCall`
              JAX differentiates it: `BoundHostCall.jvp` binds host_jvp on a
                `Derivative`
              JAX splits that: `Derivative.start` binds host_function on the
                `RuleCall` of "forward" and leaves one on a `LinearPart`
              JAX transposes that: `LinearPart.back` binds host_function on the
                `RuleCall` of "backward"
    lowered   `RuleCall.run` makes each of the two a call, by `make`. Without a
                derivative `BoundHostCall.run` does so, on the `RuleCall` of "value"
    run       the engine calls `RuleCall.__call__`: fwd runs, and its residual goes into
                `residuals.store`; bwd runs on what is found there
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp

from hostcall import _jax
from hostcall._core.spec import Template
from hostcall._host_function.primitives import (
    Arrays,
    Flags,
    Linear,
    Moved,
    Pair,
    Rows,
    Tangents,
    Value,
    bind,
    filled,
    there,
)
from hostcall._host_function.residuals import HANDLE, store
from hostcall._host_function.rules import Function, Rule
from hostcall._host_function.steps import RuleCall, TracedRuleCall
from hostcall._host_function.trees import ArgumentLayout, pick, spread
from hostcall._jax.types import Aval, TreeDef
from hostcall._primitives.batching import Dims, batch_by_rule


@dataclass(frozen=True, repr=False)
class BoundHostCall(ArgumentLayout):
    """A HostFunction, called with arguments of these trees."""

    def run(self, operands: Arrays, by_rule: Function | None = None) -> Arrays:
        return RuleCall(self, "value", self.avals).run(operands, by_rule)

    def jvp(self, operands: Arrays, tangents: Tangents) -> Moved:
        found = self.function.rules
        nz = tuple([t is not None for t in tangents])
        if self.nondiff or (found.jvp and found.jvp.each):
            self._check_tangents(nz)
        if not self.out_avals:
            return bind(operands, self), [None for _ in self.avals]
        if found.transpose:
            return self._linear_jvp(operands, tangents)
        if not (found.vjp or found.jvp or found.jacobian):
            raise self.missing("derivative")
        avals = (*self.avals, *self.out_avals)
        whole = [*operands, *there(tangents)]
        derivative = Derivative(self, len(nz), nz, avals)
        if found.vjp or (found.jvp and (found.jacobian or found.jvp.where == "host")):
            both = bind(whole, derivative)
        else:  # JAX can transpose the rule's code, and the product with a Jacobian
            both = derivative.run(whole)
        n = len(self.avals)
        return both[:n], spread(both[n:], self.out_diff)

    def _check_tangents(self, nz: Flags) -> None:
        jvp = self.function.rules.jvp
        each = jvp.each if jvp else ()
        for position in pick(self.positions, nz):
            why = ""
            if position in self.nondiff:
                why = "which is in nondiff="
            elif each and (position >= len(each) or each[position] is None):
                why = "for which defjvps was given no rule"
            if why:
                raise self.missing("argument", position=position, why=why)

    # --- Linear functions ----------------------------------------------------------
    #
    # A linear function is its own derivative, and the transpose of its transpose is the
    # function again. So derivatives of any order work, and none needs `host_jvp`.

    @property
    def of_tangents(self) -> BoundHostCall:
        """The same function with tangents for its linear arguments. Fills have none."""
        return replace(self, fills=(None,) * len(self.avals)) if self.masked else self

    def _linear_jvp(self, operands: Arrays, tangents: Tangents) -> Moved:
        """The results, and the same function of the tangents."""
        whole = zip(operands, filled(operands, tangents), self.diff, strict=True)
        touts = bind([t if flag else x for x, t, flag in whole], self.of_tangents)
        return bind(operands, self), spread(pick(touts, self.out_diff), self.out_diff)

    def transposed(self, operands: Tangents, cotangents: Arrays) -> Tangents:
        if self.function.rules.transpose is None:
            return super().transposed(operands, cotangents)
        still = [not flag for flag in self.diff]
        known = list[jax.Array]()
        for position, x in pick(zip(self.positions, operands, strict=True), still):
            if x is None:
                why = "in which it isn't linear"
                raise self.missing("argument", position=position, why=why)
            known.append(x)
        given = pick(cotangents, self.out_diff)
        avals = tuple(pick(self.in_avals, self.diff))
        what = Transpose(self, len(known), avals)
        return spread(bind([*known, *given], what), self.diff)

    # --- Batches -------------------------------------------------------------------

    def batch(self, size: int, operands: Arrays, dims: Dims) -> Rows | None:
        rule = self.function.rules.batch
        trees = self.name, self.template, self.results
        return batch_by_rule(rule, trees, operands, dims, size) if rule else None


@dataclass(frozen=True, repr=False)
class Transpose(Linear):
    """The transpose of a linear function, by a rule.

    Its constants are the arrays in which the function isn't linear. It is linear in the
    cotangents of the results.
    """

    site: BoundHostCall
    n: int
    avals: tuple[Aval, ...] = field(compare=False)

    def __repr__(self) -> str:
        return f"{self.site.name}'s transpose"

    def run(self, operands: Arrays) -> Arrays:
        code = RuleCall(self.site, "transpose", self.avals, self.site.diff)
        return code.called(operands)

    def back(self, consts: Arrays, cotangents: Arrays) -> Arrays:
        rest = iter(consts)
        moved = iter(cotangents)
        operands = [next(moved if flag else rest) for flag in self.site.diff]
        return pick(bind(operands, self.site.of_tangents), self.site.out_diff)


# --- The derivative of a call for which both modes may have rules --------------------
#
# `Derivative` is (results, derivative along some tangents). When JAX needs to know the
# two halves apart, `start` computes the results and hands the rest to a `LinearPart`:
# constants, and a linear function of the tangents with its transpose.


@dataclass(frozen=True)
class Derivative(Pair):
    """A call and its derivative along the tangents that `nz` marks.

    Attributes:
        value: the call that is differentiated.
        nz: for each array of the arguments, whether it has a tangent.
    """

    value: ArgumentLayout
    n: int
    nz: tuple[bool, ...]
    avals: tuple[Aval, ...] = field(compare=False)

    def run(self, operands: Arrays) -> Arrays:
        site = self.value
        function = self.value.function
        jvp = function.rules.jvp
        alone = function.options.lend == "out"
        if jvp and (jvp.where == "jax" or not alone):
            return RuleCall(site, "both", self.avals, self.nz).called(operands)
        outs, consts, linear = self.start(operands[: self.n], False)
        return [*outs, *linear.run([*consts, *operands[self.n :]])]

    def start(self, args: Arrays, backward: bool) -> tuple[Arrays, Arrays, Value]:
        site = self.value
        found = self.value.function.rules
        residuals = list[jax.Array]()
        template = None
        if backward and found.vjp:
            outs, residuals, template = _forward(site, found.vjp, args)
        else:
            outs = bind(args, site)
            if backward and found.jacobian:
                residuals = jacobian(site, args)
        again = found.vjp and (site.masked or found.vjp.keeps_objects)
        needed = found.jvp or found.jacobian or again or not backward
        kept_outs = outs if found.jvp and found.jvp.each else []
        parts = args if needed else [], kept_outs, residuals
        consts, tree = jax.tree.flatten(parts)
        known = site, tree, len(consts), site.out_avals
        return outs, consts, LinearPart(*known, self.nz, backward, template)


@dataclass(frozen=True, repr=False)
class LinearPart(Linear):
    """The derivative at given arguments, as a linear function of tangents.

    Attributes:
        site: the call that is differentiated.
        tree: of its `n` constants: (arguments, results, residuals), each as far as its
            rules need them.
        nz: for each array of the arguments, whether it has a tangent.
        ready: whether the consts include what the reverse rule needs.
        template: the tree of the residuals of JAX code.
    """

    site: ArgumentLayout
    tree: TreeDef
    n: int
    avals: tuple[Aval, ...] = field(compare=False)
    nz: tuple[bool, ...]
    ready: bool
    template: Template | None

    def run(self, operands: Arrays) -> Arrays:
        site = self.site
        found = self.site.function.rules
        args, outs, residuals = self.tree.unflatten(operands[: self.n])
        tangents = operands[self.n :]
        if found.jvp:
            code = RuleCall(site, "jvp", self.avals, self.nz)
            return code.called([*args, *tangents, *outs])
        if found.jacobian:
            there = self.ready and found.vjp is None
            blocks = residuals if there else jacobian(site, args)
            return push(blocks, site, self.nz, tangents)
        raise site.missing("forward")

    def back(self, consts: Arrays, cotangents: Arrays) -> Arrays:
        site = self.site
        found = self.site.function.rules
        template = self.template
        args, _, residuals = self.tree.unflatten(consts)
        if found.vjp:
            if not self.ready:
                _, residuals, template = _forward(site, found.vjp, args)
            take = True
            if not found.vjp.keeps_objects:
                args = args[-1:] if site.masked else []
            elif not isinstance(residuals[0], jax.core.Tracer):
                take = False
                _forget_with(residuals[0])
            avals = tuple(pick(site.in_avals, self.nz))
            code = RuleCall(site, "backward", avals, self.nz, take)
            return code.called([*args, *residuals, *cotangents], template)
        if found.jacobian:
            blocks = residuals if self.ready else jacobian(site, args)
            forward = partial(push, blocks, site, self.nz)
            (back,) = jax.linear_transpose(forward, pick(args, self.nz))(cotangents)
            return list(back)
        raise site.missing("reverse")


# --- The rules of defvjp -------------------------------------------------------------


def _forward(
    site: ArgumentLayout, vjp: Rule, args: Arrays
) -> tuple[Arrays, Arrays, Template | None]:
    """The results, the residuals, and (for JAX code) the tree of the residuals."""
    n = len(site.avals)
    if vjp.where == "jax":
        traced = TracedRuleCall(site, "forward", site.avals)
        found = traced.trace(args)
        return found[:n], found[n:], traced.template
    avals = (HANDLE,) if vjp.residuals is None else vjp.residuals.avals
    steps = RuleCall(site, "forward", (*site.avals, *avals))
    found = bind(args, steps)
    if vjp.keeps_objects and not isinstance(found[n], jax.core.Tracer):
        _forget_with(found[n])
    return found[:n], found[n:], None


def _forget_with(handle: jax.Array) -> None:
    """Ties the residual of an eager call to the array that holds its handle."""
    if not isinstance(handle, jax.Array) or not handle.is_fully_addressable:
        return
    # Nothing here may wait for a host function. On a GPU a program's calls are over
    # when its dispatch returns: only the copy of the handle may still be on its way.
    if handle.is_ready() or handle.platform() == "gpu":
        store.forget_with(handle)


# --- Jacobians -----------------------------------------------------------------------
#
# The blocks are ordered by result, then by argument, and each has the shape
# out.shape + in.shape.


def jacobian(site: ArgumentLayout, args: Arrays) -> Arrays:
    """The blocks for a `site.BoundHostCall` at these arguments."""
    return RuleCall(site, "jacobian", site.jacobian_avals).called(args)


def push(jacobian: Arrays, site: ArgumentLayout, nz: Flags, tangents: Arrays) -> Arrays:
    """The tangents of the results, J t, for the tangents of the arrays that `nz` marks.

    JAX transposes it for reverse mode.
    """
    n = sum(site.diff)
    used = pick(range(sum(site.diff)), pick(nz, site.diff))
    product = partial(jnp.tensordot, precision=jax.lax.Precision.HIGHEST)

    def dot(block: jax.Array, t: jax.Array) -> jax.Array:
        return block * t if site.diagonal else product(block, t, t.ndim)

    def total(out: Aval, row: Arrays) -> jax.Array:
        terms = [dot(row[j], t) for j, t in zip(used, tangents, strict=True)]
        all_terms = sum(terms[1:], terms[0]) if terms else jnp.zeros(out.shape)
        return all_terms.astype(out.dtype)

    dtypes = [x.dtype for x in (*jacobian, *tangents, *site.out_avals)]
    with _jax.able_to_hold(*dtypes):
        return [
            total(out, jacobian[i * n : (i + 1) * n])
            for i, out in enumerate(site.out_avals)
        ]
