"""Derivatives by finite differences, for functions that have no rule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core import result_rules
from hostcall._core.array_values import is_array_like
from hostcall._core.errors import DerivativeError, SpecError
from hostcall._core.host_code import HostCode
from hostcall._core.option_checks import check
from hostcall._core.options import SECONDS
from hostcall._host_function.function import HostFunction
from hostcall._host_function.rules import P, R, Rule, Tree, among
from hostcall._host_function.trees import pick

_STEP = float(np.finfo(np.float64).eps) ** (1 / 3)
tree = jax.tree_util
# What moves: an element of a leaf of the arguments; or all of the leaf, for ().
_Place: TypeAlias = tuple[int, tuple[Any, ...]]


def finite_difference(
    f: HostFunction[P, R], *, step: float | None = None
) -> HostFunction[P, R]:
    """Gives a host function derivatives by central finite differences.

    `fn` is called with 64-bit arguments, whatever the program's dtypes are, so that
    differences are as good as float64 allows. If `fn` is less exact than its arguments
    (it computes in float32, or it solves to a tolerance), a difference divides its
    error by the step. Then give a larger `step`; `hc.testing.check(f, args)` says
    whether the derivatives agree with each other.

    Args:
        f: made by `hc.host`, with real arguments and no derivative rule yet. With
            result=hc.results.elementwise it is taken to be elementwise, and all
            elements move at once; otherwise they move one by one.
        step: relative to `max(1, |x|)`. Default: eps^(1/3), which suits an `fn` as
            exact as float64 (eps = 2e-16). The error is then about 1e-10 of the scale
            of f.

    Returns:
        `f`, which now has a Jacobian rule (if elementwise, of the diagonal).

    Raises:
        SpecError: `f` is not a HostFunction, has a derivative rule already, or `step`
            is wrong.
        DerivativeError: an argument that is not in `nondiff` is complex (raised when a
            derivative runs).

    Under transformations: as `HostFunction.defjacobian`: both modes, first order only.

    Cost: a Jacobian is one host call, which calls `fn` 2 n times for n elements of the
    arguments (if elementwise, twice per argument).
    """
    if not isinstance(f, HostFunction):
        raise SpecError(
            f"hostcall: hc.derivatives.finite_difference wants what hc.host"
            f" returns, got {f!r}. Write"
            " hc.derivatives.finite_difference(hc.host(f, result=...))"
        )
    shown = f"`{f.__name__}`"
    check(shown, {"step": step}, {"step": replace(SECONDS, wanted="a number above 0")})
    differences = Differences(f, float(step or _STEP))
    diagonal = differences.elementwise
    f._add("jacobian", Rule(differences, "host", diagonal=diagonal))
    return f


@dataclass(unsafe_hash=True)
class Differences(HostCode):
    """The finite differences of one function. It is the rule that gives the Jacobian.

    Attributes:
        function: the HostFunction.
        step: relative to `max(1, |x|)`.
    """

    function: HostFunction[..., Tree]
    step: float

    def __post_init__(self) -> None:
        # The one thing that is set, so that the class can't be frozen: what Python
        # itself takes for the name of a callable can be no property of its class.
        self.__qualname__ = f"differences of {self.function.__name__}"

    @property
    def elementwise(self) -> bool:
        """Whether all elements of a leaf move at once."""
        return result_rules.is_elementwise(self.function.result)

    def parts(self) -> float:
        return self.step

    def __call__(self, *args: Tree) -> Tree:
        """The Jacobian, in the structure that a Jacobian rule returns."""
        point = _Point(self, args)
        return point.jacobian([self._slope(point, place) for place in point.places])

    def _slope(self, point: _Point, place: _Place) -> list[np.ndarray]:
        """The derivative of each result with respect to what moves at `place`."""
        results_above, offset_above = point.at(place, self.step)
        results_below, offset_below = point.at(place, -self.step)
        # By how far the argument really moved: in floating point that is not 2 h.
        run = offset_above - offset_below
        return [
            (above - below) / run
            for above, below in zip(results_above, results_below, strict=True)
        ]


class _Point:
    """The arguments of a function.

    Attributes:
        leaves: of all of them.
        moving: for each leaf that moves, the position of its argument.
        places: what moves, one by one.
    """

    def __init__(self, differences: Differences, args: Tree) -> None:
        self._function = differences.function
        wide_args = tree.tree_map(_wide, tuple(args))
        self.leaves, self._tree = tree.tree_flatten(wide_args)
        positions = list[int]()  # of the argument that each leaf is in
        for position, arg in enumerate(wide_args):
            positions += [position] * len(tree.tree_leaves(arg))
        fixed = among(self._function.nondiff, len(wide_args))
        for leaf, position in zip(self.leaves, positions, strict=True):
            if position not in fixed and np.iscomplexobj(leaf):
                raise DerivativeError(
                    "hostcall: hc.derivatives.finite_difference wants real arguments,"
                    f" and args[{position}] of `{self._function.__name__}` is complex."
                    f" If nothing is differentiated by it, give hc.host"
                    f" nondiff={position}; else pass its real and imaginary parts, or"
                    " write a rule"
                )
        # `_wide` has made all real floating leaves float64.
        are_floats = [np.asarray(leaf).dtype == np.float64 for leaf in self.leaves]
        self.moving = {
            n: position
            for n, position in pick(enumerate(positions), are_floats)
            if position not in fixed
        }
        # The axes of a leaf whose elements move one by one; none if all move at once.
        move_together = differences.elementwise
        self._axes = {
            n: () if move_together else self.leaves[n].shape for n in self.moving
        }
        self.places: list[_Place] = []
        for n, axes in self._axes.items():
            self.places += [(n, index) for index in np.ndindex(axes)]

    def at(self, place: _Place, step: float) -> tuple[list[np.ndarray], np.ndarray]:
        """(the results nearby, how far the argument really moved, after rounding).

        `step` is relative to `max(1, |x|)`.
        """
        n, index = place
        x = self.leaves[n]
        scale = np.maximum(1, abs(x[index]))
        moved = x.copy()
        moved[index] += step * scale
        # The sum is rounded, so the distance is not the step.
        offset = moved[index] - x[index]
        leaves = list(self.leaves)
        leaves[n] = moved
        return self._run(leaves), offset

    def _run(self, leaves: list[Tree]) -> list[np.ndarray]:
        """The results at these leaves of the arguments."""
        args = self._tree.unflatten(leaves)
        result = self._function.run(*args)
        results, self._out_tree = tree.tree_flatten(result)
        return [np.asarray(leaf) for leaf in results]

    def jacobian(self, columns: list[list[np.ndarray]]) -> Tree:
        """A Jacobian from the derivatives of all results by what moves at each place;
        if leaves move as a whole, its diagonal blocks.
        """
        if not self.moving:
            return None
        by_result = []
        # Empty arrays have nothing that moves. Then a run tells the results' shapes.
        results = columns[0] if columns else self._run(self.leaves)
        for i, result in enumerate(results):
            slopes = [column[i] for column in columns]
            dtype = np.result_type(result, *slopes)
            blocks = {
                n: np.empty(result.shape + axes, dtype)
                for n, axes in self._axes.items()
            }
            for (n, index), slope in zip(self.places, slopes, strict=True):
                blocks[n][..., *index] = slope
            # In the structure of the arguments, with None for leaves that don't move.
            leaves = [blocks.get(n) for n in range(len(self.leaves))]
            args = self._tree.unflatten(leaves)
            positions = dict.fromkeys(self.moving.values())
            entries = tuple(args[position] for position in positions)
            by_result.append(entries[0] if len(entries) == 1 else entries)
        return self._out_tree.unflatten(by_result)


def _wide(leaf: Tree) -> Tree:
    """A leaf on the host; in 64 bits if it is real and floating."""
    if isinstance(leaf, jax.Array):
        array = _jax.to_numpy(leaf)
    elif is_array_like(leaf):
        array = np.asarray(leaf)
    else:
        return leaf
    is_real = jnp.issubdtype(array.dtype, np.floating)
    return array.astype(np.float64) if is_real else array
