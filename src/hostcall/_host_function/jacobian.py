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
