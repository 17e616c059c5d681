"""Derivatives by finite differences, for functions that have no rule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core import result_rules
from hostcall._core.errors import DerivativeError, SpecError
from hostcall._core.host_code import HostCode
from hostcall._core.options import SECONDS, check
from hostcall._core.spec import is_array_like
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


@dataclass(frozen=True)
class Differences(HostCode):
    """The finite differences of one function. It is the rule that gives the Jacobian.

    Attributes:
        function: the HostFunction.
        step: relative to `max(1, |x|)`.
    """

    function: HostFunction[..., Tree]
    step: float

    def __post_init__(self) -> None:
        name = f"differences of {self.function.__name__}"
        vars(self).update(__qualname__=name)

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
        (ups, up), (lows, low) = (point.at(place, h) for h in (self.step, -self.step))
        return [(b - a) / (up - low) for a, b in zip(lows, ups, strict=True)]


class _Point:
    """The arguments of a function.

    Attributes:
        leaves: of all of them.
        moving: for each leaf that moves, the position of its argument.
        places: what moves, one by one.
    """

    def __init__(self, differences: Differences, args: Tree) -> None:
        self._function = differences.function
        wide = tree.tree_map(_wide, tuple(args))
        self.leaves, self._tree = tree.tree_flatten(wide)
        positions = [p for p, arg in enumerate(wide) for _ in tree.tree_leaves(arg)]
        still = among(self._function.nondiff, len(wide))
        for leaf, position in zip(self.leaves, positions, strict=True):
            if position not in still and np.iscomplexobj(leaf):
                raise DerivativeError(
                    "hostcall: hc.derivatives.finite_difference wants real arguments,"
                    f" and args[{position}] of `{self._function.__name__}` is complex."
                    f" If nothing is differentiated by it, give hc.host"
                    f" nondiff={position}; else pass its real and imaginary parts, or"
                    " write a rule"
                )
        floats = [np.asarray(x).dtype == np.float64 for x in self.leaves]
        moving = pick(enumerate(positions), floats)
        self.moving = {n: position for n, position in moving if position not in still}
        whole = differences.elementwise
        self._axes = {n: () if whole else self.leaves[n].shape for n in self.moving}
        self.places: list[_Place] = [
            (leaf, index)
            for leaf, axes in self._axes.items()
            for index in np.ndindex(axes)
        ]

    def at(self, place: _Place, step: float) -> tuple[list[np.ndarray], np.ndarray]:
        """(the results nearby, how far the argument really moved, after rounding).

        `step` is relative to `max(1, |x|)`.
        """
        leaf, index = place
        leaves = list(self.leaves)
        x = leaves[leaf].copy()
        x[index] += step * np.maximum(1, abs(x[index]))
        offset = x[index] - leaves[leaf][index]
        leaves[leaf] = x
        return self._run(leaves), offset

    def _run(self, leaves: list[Tree]) -> list[np.ndarray]:
        out = self._function.run(*self._tree.unflatten(leaves))
        found, self._out_tree = tree.tree_flatten(out)
        return list(map(np.asarray, found))

    def jacobian(self, columns: list[list[np.ndarray]]) -> Tree:
        """A Jacobian from the derivatives of all results by what moves at each place;
        if leaves move as a whole, its diagonal blocks.
        """
        if not self.moving:
            return None
        outs = []
        for i, out in enumerate(columns[0] if columns else self._run(self.leaves)):
            dtype = np.result_type(out, *(column[i] for column in columns))
            blocks = {n: np.empty(out.shape + x, dtype) for n, x in self._axes.items()}
            for (leaf, index), column in zip(self.places, columns, strict=True):
                blocks[leaf][..., *index] = column[i]
            args = self._tree.unflatten(map(blocks.get, range(len(self.leaves))))
            entries = tuple(args[p] for p in dict.fromkeys(self.moving.values()))
            outs.append(entries[0] if len(entries) == 1 else entries)
        return self._out_tree.unflatten(outs)


def _wide(leaf: Tree) -> Tree:
    """A leaf on the host; in 64 bits if it is real and floating."""
    if not is_array_like(leaf) and not isinstance(leaf, jax.Array):
        return leaf
    array = _jax.to_numpy(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf)
    floats = jnp.issubdtype(array.dtype, np.floating)
    return array.astype(np.float64) if floats else array
