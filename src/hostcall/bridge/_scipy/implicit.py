"""The derivative of what a solver of `hc.bridge.scipy` found.

A solution x is where some F(x, args) is zero (`Problem.zero`): `fun` itself, or the
gradient of what is minimized. If F stays zero while the args move by dargs, then
F_x dx + F_args dargs = 0. So the solution moves by

    dx = -F_x^-1 F_args dargs

(the implicit function theorem). This is JAX code of the program, in its dtypes: JAX
transposes it for reverse mode, and differentiates it again for higher orders.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from hostcall import _jax
from hostcall._core.host_code import TakesMask
from hostcall._host_function.trees import pick
from hostcall.bridge._library import Arrays, MarkedArrays, is_operand
from hostcall.bridge._scipy.problem import Code, Problem, Tree

tree = jax.tree_util


class ImplicitRule(TakesMask):
    """The jvp rule of a solver. It solves only where the mask of `where` is True."""

    def __init__(self, problem: Problem, solver: Any) -> None:
        self._problem = problem
        self._solver = solver

    def where(self, mask: Any) -> ImplicitRule:
        return ImplicitRule(self._problem, self._solver.where(mask))

    def __call__(self, primals: Arrays, tangents: Arrays) -> tuple[Tree, Tree]:
        """(result, its tangent). Neither depends on the first guess, primals[0]."""
        problem = self._problem
        result = self._solver(*primals)
        x, outcome = result if problem.full_output else (result, None)
        z, unravel = ravel_pytree(x)

        def of_unknown(z: jax.Array, *args: Tree) -> jax.Array:
            return problem.flat(unravel(z), *args)

        slope, moved = _linearized(
            problem.zero, of_unknown, z, args=primals[1:], tangents=tangents[1:]
        )
        if problem.bounds is not None:
            low, high = problem.limits(x)
            # A bound that becomes infinite in the program's dtype holds no number.
            with np.errstate(over="ignore"):
                is_above = z > low.astype(z.dtype)
                is_below = z < high.astype(z.dtype)
            is_free = is_above & is_below
            # A number at its bound stays there: the equation dz_i = 0 for its own.
            identity = jnp.eye(z.size, dtype=slope.dtype)
            slope = jnp.where(is_free[:, None], slope, identity)
            moved = jnp.where(is_free, moved, 0)
        # LAPACK has no narrower dtypes.
        wide = jnp.promote_types(z.dtype, np.float32)
        dz = -jnp.linalg.solve(slope.astype(wide), moved.astype(wide))
        dx = unravel(dz.astype(z.dtype))
        # An outcome is of integers and a bool, which have no tangent.
        return result, problem.with_outcome(dx, outcome)


def _linearized(
    zero: Callable[[Code], Code],
    of_unknown: Code,
    z: jax.Array,
    args: Arrays,
    tangents: Arrays,
) -> tuple[jax.Array, jax.Array]:
    """(F_x, F_args dargs), where F is `zero(of_unknown)`, at z and the args."""
    arrays = [leaf for leaf in tree.tree_leaves(args) if is_operand(leaf)]
    # Integers have no derivative, and strings and the like are no arrays.
    can_move = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in arrays]
    moving = MarkedArrays(args, can_move, is_operand)
    moving_tangents = pick(tree.tree_leaves(tangents), can_move)
    # JAX refuses reshapes and LUs along explicit axes of a mesh.
    at = tuple(map(_jax.replicated, moving.arrays))
    along = tuple(map(_jax.replicated, moving_tangents))

    def flat_fun(z: jax.Array, *arrays: jax.Array) -> jax.Array:
        return of_unknown(z, *moving.filled(arrays))

    zero_of_fun = zero(flat_fun)
    slope = jax.jacfwd(zero_of_fun)(z, *at)
    _, moved = jax.jvp(functools.partial(zero_of_fun, z), at, along)
    return slope, moved
