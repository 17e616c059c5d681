"""Jacobians: the rule of `defjacobian`, and what both modes do with its blocks.

The blocks are ordered by result, then by argument, and each has the shape
out.shape + in.shape. Forward mode computes J t, reverse mode ct J, with the same J.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hostcall._host_function.function_code import FunctionCode
from hostcall._host_function.primitive import Arrays, Tangents, bind
from hostcall._host_function.trees import Trees, pick


def jacobian(site: Any, args: Arrays) -> Arrays:
    """The blocks for a `site.Site` at these arguments."""
    rule, trees = site.function.rules.jacobian, site.trees
    if rule.where == "host":
        return bind(args, FunctionCode(site, "jacobian", trees.jacobian_avals))
    args = trees.gated(args)
    found = trees.rule_masked(args, rule.rule)(*trees.arguments(args))
    leaves = trees.jacobian_leaves(found)
    blocks = trees.fitting(leaves, trees.jacobian_avals, "the Jacobian rule")
    return trees.zeroing(args, blocks)  # type: ignore[no-any-return]


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
    rows = [jacobian[i * len(ins) : (i + 1) * len(ins)] for i in range(len(outs))]
    sums: list[tuple[Any, list[tuple[Any, Any, int]]]]
    if wanted is None:
        tangents = pick(given, trees.diff)
        sums = [
            (
                out,
                [
                    (block, t, aval.ndim)
                    for block, t, aval in zip(row, tangents, ins, strict=True)
                    if t is not None
                ],
            )
            for row, out in zip(rows, outs, strict=True)
        ]
    else:
        columns = pick(list(zip(*rows, strict=True)), pick(wanted, trees.diff))
        avals = pick(trees.in_avals, wanted)
        ndims = [out.ndim for out in outs]
        sums = [
            (aval, list(zip(given, column, ndims, strict=True)))
            for aval, column in zip(avals, columns, strict=True)
        ]
    return [_sum([_tensordot(*term) for term in terms], like) for like, terms in sums]


def _tensordot(left: Any, right: Any, axes: int) -> Any:
    return jnp.tensordot(left, right, axes, precision=jax.lax.Precision.HIGHEST)


def _sum(terms: Arrays, like: Any) -> Any:
    if not terms:
        return jnp.zeros(like.shape, like.dtype)
    total: Any = sum(terms[1:], terms[0])
    return total.astype(like.dtype)
