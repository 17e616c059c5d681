"""A call of a HostFunction, and which of its rules serves which derivative.

    rules                     forward mode          reverse mode
    deftranspose              the function itself   the transposition rule
    defjvp in JAX code        the rule              JAX transposes the rule
    defjacobian               J t                   J^T ct, with the same J
    defjvp in host code       the rule              refused: no reverse rule
    defvjp                    refused               bwd, on what fwd left
    several                   jvp, else jacobian    vjp, else jacobian

The first three are JAX code over values, so they need no primitive for the derivative.
The others, and functions with several rules, go through `host_jvp` (see `primitives`).

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
    run       the engine calls `RuleCall.__call__`, whose exchange (`exchanges`) says
                what the user's code gets: fwd runs, and its residual goes into
                `residuals.store`; bwd runs on what is found there
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp

from hostcall import _jax
from hostcall._core.spec import Template
from hostcall._host_function import batched as batched  # sets JAX's rule of vmap
from hostcall._host_function.in_jax import forward_in_jax, in_jax
from hostcall._host_function.primitives import (
    Arrays,
    DiffFunction,
    Flags,
    LinearMap,
    Moved,
    Rows,
    Tangents,
    ValueAndTangent,
    bind,
    filled,
    there,
)
from hostcall._host_function.residuals import HANDLE, store
from hostcall._host_function.rule_call import RuleCall
from hostcall._host_function.rules import Function
from hostcall._host_function.trees import ArgumentLayout, pick, spread
from hostcall._jax.types import Aval, TreeDef
from hostcall._primitives.batching import Dims, batch_by_rule


@dataclass(frozen=True, repr=False)
class BoundHostCall(ArgumentLayout):
    """A HostFunction, called with arguments of these trees."""

    def run(self, operands: Arrays, by_rule: Function | None = None) -> Arrays:
        return RuleCall(self, "value", self.avals).run(operands, by_rule)

    def jvp(self, operands: Arrays, tangents: Tangents) -> Moved:
        """The results and their tangents, by the rules that there are: see the top."""
        rules = self.function.rules
        nz = tuple([tangent is not None for tangent in tangents])
        if self.nondiff or (rules.jvp and rules.jvp.by_argument):
            self._check_tangents(nz)
        if not self.out_avals:  # all results are integers
            return bind(operands, self), [None for _ in self.avals]
        if rules.transpose:
            return self._linear_jvp(operands, tangents)
        if not (rules.vjp or rules.jvp or rules.jacobian):
            raise self.missing("derivative")
        derivative = Derivative(
            value=self,
            n=len(nz),
            nz=nz,
            avals=(*self.avals, *self.out_avals),
        )
        primals_and_tangents = [*operands, *there(tangents)]
        # JAX can't transpose a rule in host code, and with a Jacobian reverse mode goes
        # by that.
        jvp_may_not_serve_both = rules.jvp and (
            rules.jacobian or rules.jvp.runs_in == "host"
        )
        if rules.vjp or jvp_may_not_serve_both:
            # Which rule serves is known once JAX shows its mode: see `primitives`.
            both = bind(primals_and_tangents, derivative)
        else:
            # JAX can transpose the rule's code, and the product with a Jacobian.
            both = derivative.run(primals_and_tangents)
        n = len(self.avals)
        return both[:n], spread(both[n:], self.out_diff)

    def _check_tangents(self, nz: Flags) -> None:
        """Refuses tangents of arguments that have no derivative."""
        jvp = self.function.rules.jvp
        by_argument = jvp.by_argument if jvp else ()
        for position in pick(self.positions, nz):
            if position in self.nondiff:
                why = "which is in nondiff="
                raise self.missing("argument", position=position, why=why)
            # `defjvps` may be given fewer rules than there are arguments.
            of_position = by_argument[position : position + 1]
            if by_argument and not there(of_position):
                why = "for which defjvps was given no rule"
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
        complete = filled(operands, tangents)
        moved: Arrays = []
        for operand, tangent, is_linear in zip(
            operands, complete, self.diff, strict=True
        ):
            moved.append(tangent if is_linear else operand)
        moved_results = bind(moved, self.of_tangents)
        # Integer results have no tangents.
        result_tangents = spread(pick(moved_results, self.out_diff), self.out_diff)
        return bind(operands, self), result_tangents

    def transposed(self, operands: Tangents, cotangents: Arrays) -> Tangents:
        if self.function.rules.transpose is None:
            return super().transposed(operands, cotangents)
        nonlinear = list[jax.Array]()
        for position, operand, is_linear in zip(
            self.positions, operands, self.diff, strict=True
        ):
            if is_linear:
                continue
            if operand is None:
                why = "in which it isn't linear"
                raise self.missing("argument", position=position, why=why)
            nonlinear.append(operand)
        transpose = Transpose(
            site=self,
            n=len(nonlinear),
            avals=tuple(pick(self.in_avals, self.diff)),
        )
        back = bind([*nonlinear, *pick(cotangents, self.out_diff)], transpose)
        return spread(back, self.diff)

    # --- Batches -------------------------------------------------------------------

    def batch(self, size: int, operands: Arrays, dims: Dims) -> Rows | None:
        rule = self.function.rules.batch
        if rule is None:
            return None
        trees = self.name, self.template, self.results
        return batch_by_rule(rule, trees, operands, dims, size)


@dataclass(frozen=True, repr=False)
class Transpose(LinearMap):
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
        call = RuleCall(self.site, "transpose", self.avals, self.site.diff)
        return called(call, operands)

    def back(self, consts: Arrays, cotangents: Arrays) -> Arrays:
        # The function itself, of its arguments in their order: the constants, and what
        # is here the "cotangent" of each linear argument.
        nonlinear = iter(consts)
        linear = iter(cotangents)
        operands = [
            next(linear) if is_linear else next(nonlinear)
            for is_linear in self.site.diff
        ]
        return pick(bind(operands, self.site.of_tangents), self.site.out_diff)


# --- The derivative of a call for which both modes may have rules --------------------
#
# `Derivative` is (results, derivative along some tangents). When JAX needs to know the
# two halves apart, `start` computes the results and hands the rest to a `LinearPart`:
# constants, and a linear function of the tangents with its transpose.


@dataclass(frozen=True)
class Derivative(ValueAndTangent):
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
        function = site.function
        jvp = function.rules.jvp
        # A rule on the host returns arrays, so it can't write the function's results
        # into memory that is lent for them: these have a call of their own.
        writes_results = function.options.lend == "out"
        if jvp and (jvp.runs_in == "jax" or not writes_results):
            return called(RuleCall(site, "both", self.avals, self.nz), operands)
        tangents = operands[self.n :]
        outs, consts, linear = self.start(operands[: self.n], backward=False)
        out_tangents = linear.run([*consts, *tangents])
        return [*outs, *out_tangents]

    def start(
        self, args: Arrays, backward: bool
    ) -> tuple[Arrays, Arrays, DiffFunction]:
        # JAX keeps the constants from here until the linear part runs: in reverse mode
        # for the whole backward pass, in a scan once for each step. So they are only
        # what a rule of that mode reads.
        #
        #     mode      rule         the results come from   constants
        #     reverse   defvjp       its forward rule        what that left as residuals
        #     reverse   defjacobian  the function            its blocks, and arguments
        #     forward   any          the function            arguments
        #
        # `defvjp` needs arguments as well if its forward rule may have to run again:
        # its residual may be dropped from the store, and a mask is an argument of both
        # rules. And `jvp` and `jacobian` need them in case the linear part is asked for
        # its value after all, as by a derivative of the derivative. A rule of `defjvps`
        # is called with the results.
        site = self.value
        rules = site.function.rules
        vjp = rules.vjp
        residuals = list[jax.Array]()
        residual_tree = None
        if backward and vjp:
            outs, residuals, residual_tree = _forward(site, args)
        else:
            outs = bind(args, site)
            if backward and rules.jacobian:
                residuals = jacobian(site, args)
        runs_again = vjp and (site.masked or vjp.keeps_objects)
        needs_args = rules.jvp or rules.jacobian or runs_again or not backward
        needs_results = rules.jvp and rules.jvp.by_argument
        kept_args = args if needs_args else []
        kept_results = outs if needs_results else []
        consts, const_tree = jax.tree.flatten((kept_args, kept_results, residuals))
        linear = LinearPart(
            site=site,
            const_tree=const_tree,
            n=len(consts),
            avals=site.out_avals,
            nz=self.nz,
            has_residuals=backward,
            residual_tree=residual_tree,
        )
        return outs, consts, linear


@dataclass(frozen=True, repr=False)
class LinearPart(LinearMap):
    """The derivative at given arguments, as a linear function of tangents.

    Attributes:
        site: the call that is differentiated.
        const_tree: of its `n` constants: (arguments, results, residuals), each as far
            as its rules need them.
        nz: for each array of the arguments, whether it has a tangent.
        has_residuals: whether the constants include what the reverse rule needs.
        residual_tree: the tree of the residuals of JAX code.
    """

    site: ArgumentLayout
    const_tree: TreeDef
    n: int
    avals: tuple[Aval, ...] = field(compare=False)
    nz: tuple[bool, ...]
    has_residuals: bool
    residual_tree: Template | None

    def run(self, operands: Arrays) -> Arrays:
        site = self.site
        rules = site.function.rules
        args, outs, residuals = self.const_tree.unflatten(operands[: self.n])
        tangents = operands[self.n :]
        if rules.jvp:
            call = RuleCall(site, "jvp", self.avals, self.nz)
            return called(call, [*args, *tangents, *outs])
        if rules.jacobian:
            # With a defvjp the residuals are those of its forward rule.
            are_blocks = self.has_residuals and rules.vjp is None
            blocks = residuals if are_blocks else jacobian(site, args)
            return push(blocks, site, self.nz, tangents)
        raise site.missing("forward")

    def back(self, consts: Arrays, cotangents: Arrays) -> Arrays:
        site = self.site
        rules = site.function.rules
        args, _, residuals = self.const_tree.unflatten(consts)
        if rules.vjp:
            return self._by_backward_rule(args, residuals, cotangents)
        if rules.jacobian:
            blocks = residuals if self.has_residuals else jacobian(site, args)
            forward = partial(push, blocks, site, self.nz)
            (back,) = jax.linear_transpose(forward, pick(args, self.nz))(cotangents)
            return list(back)
        raise site.missing("reverse")

    def _by_backward_rule(
        self, args: Arrays, residuals: Arrays, cotangents: Arrays
    ) -> Arrays:
        """The cotangents by the second rule of `defvjp`."""
        site = self.site
        vjp = site.function.rules.vjp
        assert vjp is not None, "`back` has asked"
        residual_tree = self.residual_tree
        if not self.has_residuals:
            _, residuals, residual_tree = _forward(site, args)
        take = True
        if not vjp.keeps_objects:
            # Of the arguments only the mask, which is the last, is an operand.
            args = args[-1:] if site.masked else []
        elif not isinstance(residuals[0], jax.core.Tracer):
            # An eager pullback of jax.vjp, which may be called again.
            take = False
            _forget_with(residuals[0])
        avals = tuple(pick(site.in_avals, self.nz))
        call = RuleCall(site, "backward", avals, self.nz, take)
        return called(call, [*args, *residuals, *cotangents], residual_tree)


# --- Calls of rules ------------------------------------------------------------------


def called(
    call: RuleCall, operands: Arrays, residual_tree: Template | None = None
) -> Arrays:
    """The results of a rule: an equation on the host, or JAX code at once.

    `residual_tree` is for a backward rule in JAX code: what its forward rule left.
    """
    if call.exchange.rule.runs_in == "host":
        return bind(operands, call)
    return in_jax(call, operands, residual_tree)


def _forward(
    site: ArgumentLayout, args: Arrays
) -> tuple[Arrays, Arrays, Template | None]:
    """The results, the residuals, and (for JAX code) the tree of the residuals."""
    vjp = site.function.rules.vjp
    assert vjp is not None, "only a defvjp has a forward rule"
    if vjp.runs_in == "jax":
        return forward_in_jax(RuleCall(site, "forward", site.avals), args)
    residual_avals = (HANDLE,) if vjp.residuals is None else vjp.residuals.avals
    call = RuleCall(site, "forward", (*site.avals, *residual_avals))
    outs_and_residuals = bind(args, call)
    n = len(site.avals)
    residuals = outs_and_residuals[n:]
    if vjp.keeps_objects and not isinstance(residuals[0], jax.core.Tracer):
        _forget_with(residuals[0])
    return outs_and_residuals[:n], residuals, None


def _forget_with(handle: jax.Array) -> None:
    """Ties the residual of an eager call to the array that holds its handle."""
    # The number in an array that other processes hold, or that is still computed, can't
    # be read without a wait. Such a residual goes when newer ones need its place.
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
    """The blocks for a call at these arguments."""
    return called(RuleCall(site, "jacobian", site.jacobian_avals), args)


def push(blocks: Arrays, site: ArgumentLayout, nz: Flags, tangents: Arrays) -> Arrays:
    """The tangents of the results, J t, for the tangents of the arrays that `nz` marks.

    JAX transposes it for reverse mode.
    """
    row_length = sum(site.diff)
    # Which blocks of a row have a tangent: of [x, y] with a tangent of y only the last.
    columns = pick(range(row_length), pick(nz, site.diff))
    product = partial(jnp.tensordot, precision=jax.lax.Precision.HIGHEST)

    def dot(block: jax.Array, tangent: jax.Array) -> jax.Array:
        if site.diagonal:
            return block * tangent
        # The last axes of a block are those of the argument.
        return product(block, tangent, tangent.ndim)

    def result_tangent(out: Aval, row: Arrays) -> jax.Array:
        terms: Arrays = []
        for column, tangent in zip(columns, tangents, strict=True):
            terms.append(dot(row[column], tangent))
        # From the first one, not from 0: a number would decide about the dtype.
        total = sum(terms[1:], terms[0]) if terms else jnp.zeros(out.shape)
        return total.astype(out.dtype)

    out_tangents: Arrays = []
    dtypes = [x.dtype for x in (*blocks, *tangents, *site.out_avals)]
    with _jax.able_to_hold(*dtypes):
        for number, out in enumerate(site.out_avals):
            first = number * row_length
            row = blocks[first : first + row_length]
            out_tangents.append(result_tangent(out, row))
    return out_tangents
