"""Linear algebra of derivatives: applies Jacobians and transposes linear functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from hostcall._host_function import rules
from hostcall._host_function.primitive import Arrays, Tangents, Value, bind
from hostcall._host_function.trees import Trees, pick, spread_known


def contract(
    jacobian: Arrays,
    given: Tangents,
    trees: Trees,
    wanted: Sequence[bool] | None = None,
) -> Arrays:
    """Applies a Jacobian.

    Without `wanted`: J t for the tangents `given`, where None is zero. With `wanted`:
    ct J for the cotangents `given`, one result for each array that `wanted` marks. The
    blocks in `jacobian` are ordered by result, then by argument; each has the shape
    out.shape + in.shape.
    """
    outs, ins = trees.out_avals, pick(trees.in_avals, trees.diff)
    rows = [jacobian[i * len(ins) : (i + 1) * len(ins)] for i in range(len(outs))]
    if wanted is None:
        tangents = pick(given, trees.diff)
        return [
            _sum(
                [
                    _tensordot(block, t, aval.ndim)
                    for block, t, aval in zip(row, tangents, ins, strict=True)
                    if t is not None
                ],
                out,
            )
            for row, out in zip(rows, outs, strict=True)
        ]
    flags = pick(wanted, trees.diff)
    return [
        _sum(
            [
                _tensordot(ct, row[i], out.ndim)
                for ct, row, out in zip(given, rows, outs, strict=True)
            ],
            aval,
        )
        for i, (aval, flag) in enumerate(zip(ins, flags, strict=True))
        if flag
    ]


def _tensordot(left: Any, right: Any, axes: int) -> Any:
    return jnp.tensordot(left, right, axes, precision=jax.lax.Precision.HIGHEST)


def _sum(terms: Arrays, like: Any) -> Any:
    if not terms:
        return jnp.zeros(like.shape, like.dtype)
    total: Any = sum(terms[1:], terms[0])
    return total.astype(like.dtype)


# --- Transposition -----------------------------------------------------------------


@dataclass(frozen=True)
class Transposed(Value):
    """The transpose of a linear function, by a rule in host code.

    Its operands are the arrays in which the function isn't linear, then the cotangents
    of the results. It is linear in the cotangents, and its own transpose is the
    function again, so derivatives of any order work.
    """

    site: Any

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.site.name}'s transpose"

    @property
    def trees(self) -> Trees:
        return self.site.trees  # type: ignore[no-any-return]

    @property
    def avals(self) -> tuple[Any, ...]:  # type: ignore[override]
        return tuple(pick(self.trees.in_avals, self.trees.diff))

    @property
    def _n(self) -> int:
        """The number of operands in front of the cotangents."""
        return len(self.trees.diff) - sum(self.trees.diff)

    def run(self, args: Arrays) -> Arrays:
        code = self.site.host("transpose", self.trees.diff)
        return code.run(args)  # type: ignore[no-any-return]

    def jvp(self, args: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
        if any(t is not None for t in tangents[: self._n]):
            raise rules.not_again(self.name, self._rule, self.site.place)
        moved = [
            jnp.zeros_like(x) if t is None else t
            for x, t in zip(args[self._n :], tangents[self._n :], strict=True)
        ]
        return bind(args, self), bind([*args[: self._n], *moved], self)

    @property
    def _rule(self) -> Any:
        return self.site.rules.transpose.rule

    def transposed(self, args: Arrays, cotangents: Arrays) -> Tangents:
        known = args[: self._n]
        if any(x is None for x in known):
            raise rules.not_again(self.name, self._rule, self.site.place)
        rest, back = iter(known), iter(cotangents)
        moved = [next(back) if flag else next(rest) for flag in self.trees.diff]
        outs = bind(moved, self.site.for_tangents)
        return [*(None for _ in known), *pick(outs, self.trees.out_diff)]

    def __repr__(self) -> str:
        return self.name


def transposed_by_rule(
    rule: Any, known: Arrays, cotangents: Arrays, trees: Trees
) -> Arrays:
    """The cotangents of the linear arguments, by a rule in JAX code."""
    args = trees.arguments(spread_known(known, trees.diff))
    value = rule(trees.cotangents(cotangents), *trees.nonlinear(args))
    leaves = pick(trees.transposed_leaves(value), trees.diff)
    avals = pick(trees.in_avals, trees.diff)
    return trees.zeroing(known, trees.fitting(leaves, avals, "the transposition rule"))
