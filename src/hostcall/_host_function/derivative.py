"""The derivative of a call for which both modes may have rules of their own.

`Derivative` is (results, derivative along some tangents). When JAX needs to know the
two halves apart, `start` computes the results and hands the rest to a `LinearPart`:
constants, and a linear function of the tangents with its transpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from hostcall import _jax
from hostcall._host_function import rules
from hostcall._host_function.function_code import FunctionCode
from hostcall._host_function.primitive import (
    Arrays,
    Linear,
    Pair,
    Tangents,
    bind,
    bind_linear,
)
from hostcall._host_function.residuals import HANDLE, store
from hostcall._host_function.traced import JaxCode, bound
from hostcall._host_function.trees import Trees, pick, spread


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
        options = function.options
        alone = options["lend"] == "out" or options.get("coalesce") is not None
        if jvp and (jvp.where == "jax" or not alone):
            avals = (*site.avals, *self.tangent_avals)
            code = FunctionCode(site, "both", avals, self.nz)
            return bound(code, [*args, *tangents])
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
        n, m = self._kept
        return [*args[:n], *outs[:m], *kept]

    def _parts(self, consts: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        """(arguments, results, residuals); empty lists for those that aren't kept."""
        n, m = self._kept
        return consts[:n], consts[n : n + m], consts[n + m :]

    @property
    def _kept(self) -> tuple[int, int]:
        """How many arguments and how many results are among the consts."""
        jvp, vjp = self.site.function.rules.jvp, self.site.function.rules.vjp
        again = self.site.trees.masked or (vjp is not None and vjp.keeps_objects)
        n = len(self.nz) if jvp or again or not self.ready else 0
        return n, len(self.site.avals) if jvp and jvp.each else 0

    def run(self, consts: Arrays, tangents: Arrays) -> Arrays:
        site, found = self.site, self.site.function.rules
        args, outs, kept = self._parts(consts)
        if found.jvp:
            code = FunctionCode(site, "jvp", self.avals, self.nz)
            return bound(code, [*args, *tangents, *outs])
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


# --- The rules of defvjp -------------------------------------------------------------


def _forward(site: Any, args: Arrays) -> tuple[Arrays, Arrays, Any]:
    """The results, the residuals, and (for JAX code) the tree of the residuals."""
    vjp, n = site.function.rules.vjp, len(site.avals)
    if vjp.where == "jax":
        traced = JaxCode(FunctionCode(site, "forward", site.avals))
        found = traced.run(args)
        return found[:n], found[n:], traced.template
    residuals = (HANDLE,) if vjp.keeps_objects else vjp.residuals.avals
    found = bind(args, FunctionCode(site, "forward", (*site.avals, *residuals)))
    if vjp.keeps_objects:
        _forget_with(found[n])
    return found[:n], found[n:], None


def _backward(
    site: Any,
    nz: tuple[bool, ...],
    args: Arrays,
    kept: Arrays,
    template: Any,
    cotangents: Arrays,
) -> Arrays:
    """The cotangents of the arguments that `nz` marks."""
    vjp, trees, take = site.function.rules.vjp, site.trees, True
    if vjp.keeps_objects:
        take = isinstance(kept[0], jax.core.Tracer)
        _forget_with(kept[0])
    else:
        args = args[-1:] if trees.masked else []
    avals = tuple(pick(trees.in_avals, nz))
    code = FunctionCode(site, "backward", avals, nz, take)
    return bound(code, [*args, *kept, *cotangents], template)


def _forget_with(handle: Any) -> None:
    """Ties the residual of an eager call to the array that holds its handle."""
    if isinstance(handle, jax.core.Tracer) or not isinstance(handle, jax.Array):
        return
    if handle.is_fully_addressable and handle.is_ready():
        store.forget_with(handle)


# --- Jacobians -----------------------------------------------------------------------
#
# The blocks are ordered by result, then by argument, and each has the shape
# out.shape + in.shape. Forward mode computes J t, reverse mode ct J, with the same J.


def jacobian(site: Any, args: Arrays) -> Arrays:
    """The blocks for a `site.Site` at these arguments."""
    code = FunctionCode(site, "jacobian", site.trees.jacobian_avals)
    return bound(code, args)


def contract(
    jacobian: Arrays,
    given: Tangents,
    trees: Trees,
    wanted: Sequence[bool] | None = None,
) -> Arrays:
    """Applies a Jacobian.

    Without `wanted`: J t for the tangents `given`, where None is zero. With `wanted`:
    ct J for the cotangents `given`, one result for each array that `wanted` marks.
    """
    outs, ins = trees.out_avals, pick(trees.in_avals, trees.diff)
    lines: Sequence[Sequence[Any]] = [
        jacobian[i * len(ins) : (i + 1) * len(ins)] for i in range(len(outs))
    ]
    likes: Sequence[Any] = outs
    if wanted is None:
        given, axes = pick(given, trees.diff), [aval.ndim for aval in ins]
    else:
        axes = [out.ndim for out in outs]
        lines = pick(list(zip(*lines, strict=True)), pick(wanted, trees.diff))
        likes = pick(trees.in_avals, wanted)
    sums = []
    for like, line in zip(likes, lines, strict=True):
        terms = [
            _dot(block, x, n) if wanted is None else _dot(x, block, n)
            for block, x, n in zip(line, given, axes, strict=True)
            if x is not None
        ]
        total: Any = sum(terms[1:], terms[0]) if terms else jnp.zeros(like.shape)
        sums.append(total.astype(like.dtype))
    return sums


def _dot(left: Any, right: Any, axes: int) -> Any:
    return jnp.tensordot(left, right, axes, precision=jax.lax.Precision.HIGHEST)
