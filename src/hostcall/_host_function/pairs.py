"""The derivative of a function for which both modes may have rules of their own.

`SitePair` is (result, derivative along some tangents). When JAX needs to know the two
halves apart, `SitePair.start` computes the results and hands the rest to a
`SiteLinear`: constants, and a linear function of the tangents with its transpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hostcall import _jax
from hostcall._host_function import rules
from hostcall._host_function.linear import contract
from hostcall._host_function.primitive import (
    Arrays,
    Linear,
    Pair,
    Value,
    bind,
    bind_linear,
)
from hostcall._host_function.trees import spread


@dataclass(frozen=True)
class SitePair(Pair):
    """The function and its derivative along the tangents that `nz` marks."""

    site: Any  # a calls.Site
    nz: tuple[bool, ...]

    @property
    def value(self) -> Value:  # type: ignore[override]
        return self.site  # type: ignore[no-any-return]

    @property
    def tangent_avals(self) -> tuple[Any, ...]:  # type: ignore[override]
        return self.site.trees.out_avals  # type: ignore[no-any-return]

    def run(self, args: Arrays, tangents: Arrays) -> Arrays:
        site, jvp = self.site, self.site.rules.jvp
        if jvp and jvp.where == "host" and site.function.lend != "out":
            return bind([*args, *tangents], site.host("both", self.nz))
        if jvp and jvp.where == "jax":
            outs, touts = site.jax_jvp(args, spread(tangents, self.nz))
            return [*outs, *touts]
        outs, consts, linear = self.start(args, False)
        return [*outs, *bind_linear(consts, tangents, linear)]

    def start(self, args: Arrays, backward: bool) -> tuple[Arrays, Arrays, Linear]:
        site, found = self.site, self.site.rules
        kept: Arrays = []
        template: Any = None
        if backward and found.vjp:
            outs, kept, template = site.forward(args)
        else:
            outs = bind(args, site)
            if backward and found.jacobian:
                kept = site.jacobian(args)
        linear = SiteLinear(site, self.nz, backward, template)
        return outs, linear.consts(args, outs, kept), linear


@dataclass(frozen=True)
class SiteLinear(Linear):
    """The derivative at given arguments, as a linear function of tangents.

    Its consts are, as far as its rules need them, the arguments, the results and the
    residuals.

    Attributes:
        site: the call that is differentiated.
        nz: for each array of the arguments, whether it has a tangent.
        ready: whether the consts include what the reverse rule needs.
        template: the tree of the residuals of JAX code.
    """

    site: Any  # a calls.Site
    nz: tuple[bool, ...]
    ready: bool
    template: Any

    @property
    def avals(self) -> tuple[Any, ...]:  # type: ignore[override]
        return self.site.trees.out_avals  # type: ignore[no-any-return]

    def consts(self, args: Arrays, outs: Arrays, kept: Arrays) -> Arrays:
        with_args, with_outs = self._layout
        return [*(args if with_args else ()), *(outs if with_outs else ()), *kept]

    def _parts(self, consts: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        """(arguments, results, residuals); empty lists for those that aren't kept."""
        with_args, with_outs = self._layout
        n = len(self.nz) if with_args else 0
        m = n + (len(self.site.avals) if with_outs else 0)
        return consts[:n], consts[n:m], consts[m:]

    @property
    def _layout(self) -> tuple[bool, bool]:
        """Whether the arguments are among the consts, and whether the results are."""
        found = self.site.rules
        again = found.vjp is not None and found.vjp.keeps_objects
        each = found.jvp is not None and bool(found.jvp.each)
        again = again or self.site.trees.masked
        return not self.ready or found.jvp is not None or again, each

    def run(self, consts: Arrays, tangents: Arrays) -> Arrays:
        site, found = self.site, self.site.rules
        args, outs, kept = self._parts(consts)
        if found.jvp and found.jvp.where == "host":
            return bind([*args, *tangents, *outs], site.host("jvp", self.nz))
        if found.jvp:
            return site.jax_jvp(args, spread(tangents, self.nz), outs or None)[1]  # type: ignore[no-any-return]
        if found.jacobian:
            there = self.ready and found.vjp is None
            jacobian = kept if there else site.jacobian(args)
            return contract(jacobian, spread(tangents, self.nz), site.trees)
        raise rules.no_forward(site.name, site.place)

    def back(self, consts: Arrays, cotangents: Arrays) -> Arrays:
        site, found, template = self.site, self.site.rules, self.template
        args, _, kept = self._parts(consts)
        if found.vjp:
            if not self.ready:
                _, kept, template = site.forward(args)
            return site.backward(self.nz, args, kept, template, cotangents)  # type: ignore[no-any-return]
        if found.jacobian:
            jacobian = kept if self.ready else site.jacobian(args)
            return contract(jacobian, cotangents, site.trees, self.nz)
        raise rules.no_reverse(site.name, site.place)


for _type in (SitePair, SiteLinear):
    _jax.hold_weakly_in_caches(_type)
