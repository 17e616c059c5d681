"""Linear functions, which `deftranspose` declares, and their transposes.

A linear function is its own derivative, and the transpose of its transpose is the
function again. So derivatives of any order work, and none needs `host_jvp`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from hostcall import _jax
from hostcall._host_function import rules
from hostcall._host_function.function_code import FunctionCode
from hostcall._host_function.primitive import Arrays, Tangents, bind, filled
from hostcall._host_function.traced import bound
from hostcall._host_function.trees import pick, spread


def linear_jvp(site: Any, args: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
    """The results of a `site.Site`, and the same function of the tangents."""
    flags = site.trees.out_diff
    moved = [
        (jnp.zeros_like(x) if t is None else t) if flag else x
        for x, t, flag in zip(args, tangents, site.trees.diff, strict=True)
    ]
    touts = bind(moved, _of_tangents(site))
    return bind(args, site), spread(pick(touts, flags), flags)


def _of_tangents(site: Any) -> Any:
    """The same function with tangents for its linear arguments."""
    return replace(site, trees=site.trees.for_tangents)


def transposed(site: Any, args: Arrays, cotangents: Arrays) -> Tangents:
    """The cotangents of the arguments that are None in `args`, by the rule."""
    trees = site.trees
    linear = trees.diff
    known = [x for x, flag in zip(args, linear, strict=True) if not flag]
    if any(x is None for x in known):
        position = trees.positions[args.index(None)]
        why = "in which it isn't linear"
        raise rules.not_differentiable(trees.name, position, why, site.place)
    cotangents = pick(cotangents, trees.out_diff)
    avals = tuple(pick(trees.in_avals, linear))
    transpose = Transpose(site, "transpose", avals, linear)
    return spread(bound(transpose, [*known, *cotangents]), linear)


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
            raise rules.not_again(self.name, self.code, self.site.place)
        moved = filled(args[n:], tangents[n:])
        return bind(args, self), bind([*args[:n], *moved], self)

    def transposed(self, args: Arrays, cotangents: Arrays) -> Tangents:
        known = args[: self.nz.count(False)]
        if any(x is None for x in known):
            raise rules.not_again(self.name, self.code, self.site.place)
        rest, back = iter(known), iter(cotangents)
        moved = [next(back) if flag else next(rest) for flag in self.nz]
        outs = bind(moved, _of_tangents(self.site))
        return [*(None for _ in known), *pick(outs, self.site.trees.out_diff)]


_jax.hold_weakly_in_caches(Transpose)
