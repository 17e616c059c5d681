"""Derivatives by finite differences, for functions that have no rule."""

from __future__ import annotations

import types
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core.arguments import conflict
from hostcall._core.errors import SpecError
from hostcall._core.host_code import HostCode
from hostcall._core.options import SECONDS, check, choice
from hostcall._core.spec import is_array_like
from hostcall._host_function import difference_error, results
from hostcall._host_function.difference_error import Line, lines
from hostcall._host_function.function import HostFunction
from hostcall._host_function.rules import P, R, Rule, Tree

Scheme = Literal["central", "forward", "complex"]
_EPS = float(np.finfo(np.float64).eps)
_STEPS = {"central": _EPS ** (1 / 3), "forward": _EPS ** (1 / 2), "complex": 1e-20}
tree = jax.tree_util
# What moves: an element of a leaf of the arguments, or all of the leaf.
_Place: TypeAlias = tuple[int, tuple[int, ...] | types.EllipsisType]

_OPTIONS = {
    "scheme": choice(*_STEPS),
    "step": replace(SECONDS, wanted="a number above 0"),
}


def finite_difference(
    f: HostFunction[P, R], *, scheme: Scheme = "central", step: float | None = None
) -> HostFunction[P, R]:
    """Gives a host function derivatives by finite differences.

    `fn` is called with 64-bit arguments (complex ones for "complex"), whatever the
    program's dtypes are, so that differences are as good as float64 allows. If `fn` is
    less exact than its arguments (it computes in float32, or it solves to a tolerance),
    a difference divides its error by the step. Then give a larger `step`, and look at
    `f.difference_error(*args)`.

    Args:
        f: made by `hc.host`, with real arguments and no derivative rule yet. With
            result=hc.results.elementwise it is taken to be elementwise, and all
            elements move at once; otherwise they move one by one.
        scheme: "central", 2 calls of `fn` per element, error about 1e-10 of the scale
            of f; "forward", 1 call per element and 1 for all, error about 1e-8;
            "complex", 1 call per element, exact to rounding, for analytic functions
            that take complex arguments.
        step: relative to `max(1, |x|)`. Default: eps^(1/3), eps^(1/2) and 1e-20 for the
            three schemes, which suits an `fn` as exact as float64 (eps = 2e-16).

    Returns:
        `f`, which now has a Jacobian rule (if elementwise, of the diagonal) and can
        estimate its errors: `f.difference_error(*args)`.

    Raises:
        SpecError: `f` is not a HostFunction, has a derivative rule already, or an
            option is wrong.

    Under transformations: as `HostFunction.defjacobian`: both modes, first order only.

    Cost: a Jacobian is one host call, which calls `fn` 2 n times for n elements of the
    arguments (if elementwise, twice per argument).
    """
    if not isinstance(f, HostFunction):
        raise SpecError(
            f"hostcall: hc.derivatives.finite_difference wants what hc.host"
            f" returns, got {f!r}"
        )
    check(f"`{f.__name__}`", {"scheme": scheme, "step": step}, _OPTIONS)
    if f.options.get("coalesce") is not None:
        raise conflict(
            f"`{f.__name__}`",
            "coalesce= and finite differences, which call it with one entry: leave out"
            " coalesce=, or give it a rule",
        )
    f.differences = Differences(f, scheme, float(step or _STEPS[scheme]))
    diagonal = f.differences.elementwise
    f._add("jacobian", Rule(f.differences, "host", diagonal=diagonal))
    return f


@dataclass(frozen=True)
class Differences(HostCode):
    """The finite differences of one function. It is the rule that gives the Jacobian.

    Attributes:
        function: the HostFunction.
        scheme, step: as given; the step is relative to `max(1, |x|)`.
    """

    function: HostFunction[..., Tree]
    scheme: Scheme
    step: float

    def __post_init__(self) -> None:
        name = f"differences of {self.function.__name__}"
        vars(self).update(__qualname__=name)

    @property
    def elementwise(self) -> bool:
        """Whether all elements of a leaf move at once."""
        return self.function.result is results.elementwise

    def parts(self) -> tuple[Scheme, float]:
        return self.scheme, self.step

    def __call__(self, *args: Tree) -> Tree:
        """The Jacobian, in the structure that a Jacobian rule returns."""
        point = _Point(self, args)
        return point.jacobian([self._slope(point, place) for place in point.places])

    def error(self, *args: Tree) -> Tree:
        """Error estimates (see `difference_error`), in the structure of a Jacobian."""
        point = _Point(self, args)
        found = [self._lines(point, place) for place in point.places]
        # All values that were seen tell how exact a result is.
        seen = [[of[0] for of in column] for column in zip(*found, strict=True)]
        eps = list(map(difference_error.eps_of, seen))
        error = difference_error.ERRORS[self.scheme]
        columns = [
            [error(of, *lines) for of, lines in zip(eps, column, strict=True)]
            for column in found
        ]
        return point.jacobian(columns)

    def _slope(self, point: _Point, place: _Place) -> list[np.ndarray]:
        """The derivative of each result with respect to what moves at `place`."""
        if self.scheme == "complex":
            return self._imaginary(point, place, 0.0)
        ups, up = point.at(place, self.step)
        central = self.scheme == "central"
        lows, low = point.at(place, -self.step) if central else (point.start, 0.0)
        return [(b - a) / (up - low) for a, b in zip(lows, ups, strict=True)]

    def _imaginary(self, point: _Point, place: _Place, step: float) -> list[np.ndarray]:
        outs, _ = point.at(place, step, self.step)
        return [out.imag / self.step for out in outs]

    def _lines(self, point: _Point, place: _Place) -> list[tuple[Line, ...]]:
        """For each result its values around the point; and its complex slopes."""
        best = _STEPS["central"]
        step = best if self.scheme == "complex" else self.step
        values = lines(lambda steps: point.at(place, steps * step), 256 * best / step)
        if self.scheme != "complex":
            return [(line,) for line in values]
        slopes = lines(
            lambda steps: (self._imaginary(point, place, steps * step), 0.0), 0.0
        )
        return list(zip(values, slopes, strict=True))


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
        still = self._function.nondiff_of(len(wide))
        self.moving = {
            n: position
            for n, (x, position) in enumerate(zip(self.leaves, positions, strict=True))
            if position not in still and np.asarray(x).dtype == np.float64
        }
        self._whole = differences.elementwise
        self.places: list[_Place] = [
            (leaf, index)
            for leaf in self.moving
            for index in ([...] if self._whole else np.ndindex(self.leaves[leaf].shape))
        ]

    @cached_property
    def start(self) -> list[np.ndarray]:
        """The results at the point itself."""
        return self._run(self.leaves)

    def at(
        self, place: _Place, step: float, lift: float = 0.0
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """(the results nearby, how far the argument really moved, after rounding).

        `step` is relative to `max(1, |x|)`; `lift` is added to the imaginary part.
        """
        (leaf, index), leaves = place, list(self.leaves)
        x = leaves[leaf].copy()
        x[index] += step * np.maximum(1, abs(x[index]))
        offset = x[index] - leaves[leaf][index]
        if lift:
            x = x.astype(np.complex128)
            x[index] += 1j * lift
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
        for i, out in enumerate(columns[0] if columns else self.start):
            rest = iter([column[i] for column in columns])
            leaves: list[np.ndarray | None] = [None] * len(self.leaves)
            for leaf in self.moving:
                x = self.leaves[leaf]
                if self._whole:
                    leaves[leaf] = next(rest)
                    continue
                parts = [next(rest)[..., None] for _ in range(x.size)]
                block = np.concatenate([np.zeros((*out.shape, 0)), *parts], axis=-1)
                leaves[leaf] = block.reshape(out.shape + x.shape)
            args = self._tree.unflatten(leaves)
            blocks = tuple(args[p] for p in dict.fromkeys(self.moving.values()))
            outs.append(blocks[0] if len(blocks) == 1 else blocks)
        return self._out_tree.unflatten(outs)


def _wide(leaf: Tree) -> Tree:
    """A leaf on the host; in 64 bits if it is real and floating."""
    if not is_array_like(leaf) and not isinstance(leaf, jax.Array):
        return leaf
    array = _jax.to_numpy(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf)
    floats = jnp.issubdtype(array.dtype, np.floating)
    return array.astype(np.float64) if floats else array
