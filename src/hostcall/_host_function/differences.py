"""Derivatives by finite differences, for functions that have no rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core.arguments import conflict
from hostcall._core.errors import SpecError
from hostcall._core.host_code import TakesMask
from hostcall._core.spec import is_array_like
from hostcall._engine.options import SECONDS, check, choice
from hostcall._host_function import results
from hostcall._host_function.difference_error import (
    Line,
    central_error,
    complex_error,
    eps_of,
    forward_error,
    lines,
)
from hostcall._host_function.function import HostFunction
from hostcall._host_function.kept import options_of
from hostcall._host_function.rules import P, R

Scheme = Literal["central", "forward", "complex"]
_POWERS = {"central": 1 / 3, "forward": 1 / 2}
_ERRORS: dict[str, Callable[..., np.ndarray]] = {
    "central": central_error,
    "forward": forward_error,
    "complex": complex_error,
}
_EPS = float(np.finfo(np.float64).eps)
tree = jax.tree_util

_OPTIONS = {
    "scheme": choice("central", "forward", "complex"),
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
        `f`, which now has a Jacobian rule (if elementwise, a jvp rule in JAX code) and
        can estimate its errors: `f.difference_error(*args)`.

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
    size = step or (1e-20 if scheme == "complex" else _EPS ** _POWERS[scheme])
    elementwise = f.result is results.elementwise
    found = Differences(f, scheme, float(size), elementwise)
    if elementwise:
        f.defjvp(_Elementwise(found), where="jax")
    else:
        f.defjacobian(found.jacobian)
    f.differences = found
    return f


@dataclass(frozen=True)
class Differences:
    """The finite differences of one function.

    Attributes:
        function: the HostFunction.
        scheme, step: as given; the step is relative to `max(1, |x|)`.
        elementwise: all elements move at once.
        slopes: the functions that `slope` has made, by position.
    """

    function: HostFunction[..., Any]
    scheme: Scheme
    step: float
    elementwise: bool
    slopes: dict[int, HostFunction[..., Any]] = field(
        default_factory=dict, compare=False
    )

    def jacobian(self, *args: Any) -> Any:
        """The Jacobian, in the structure that a Jacobian rule returns."""
        point = _Point(self.function, args)
        columns = [self._slope(point, place) for place in point.elements]
        return point.jacobian(columns)

    def diagonal(self, position: int, *args: Any) -> np.ndarray:
        """The derivative of an elementwise function with respect to one argument."""
        point = _Point(self.function, args)
        (place,) = (part for part in point.moving if part.position == position)
        (slope,) = self._slope(point, place)
        return slope

    def slope(self, position: int) -> HostFunction[..., Any]:
        """`diagonal` for programs; one object each, so that JAX's caches hit."""
        if position not in self.slopes:
            function = self.function
            lend = bool(function.options["lend"])
            options = options_of(
                function.options, ("slope", position, self.scheme, self.step)
            )
            options |= {"lend": lend, "name": function.__name__ + "'"}
            self.slopes[position] = HostFunction(
                Diagonal(self, position),
                result=results.elementwise,
                nondiff=(),
                **options,
            )
        return self.slopes[position]

    def error(self, *args: Any) -> Any:
        """Error estimates (see `difference_error`), in the structure of a Jacobian."""
        point = _Point(self.function, args)
        places = point.moving if self.elementwise else point.elements
        found = [self._lines(point, place) for place in places]
        # All values that were seen tell how exact a result is.
        eps = [eps_of([of[0] for of in seen]) for seen in zip(*found, strict=True)]
        error = _ERRORS[self.scheme]
        columns = [
            [error(of, *lines) for of, lines in zip(eps, column, strict=True)]
            for column in found
        ]
        if self.elementwise:
            return _one_or_all([error for (error,) in columns])
        return point.jacobian(columns)

    def _slope(self, point: _Point, place: _Part) -> list[np.ndarray]:
        """The derivative of each result with respect to what moves at `place`."""
        if self.scheme == "complex":
            return self._imaginary(point, place, 0.0)
        ups, up = point.at(place, self.step)
        central = self.scheme == "central"
        lows, low = point.at(place, -self.step) if central else (point.start, 0.0)
        return [(b - a) / (up - low) for a, b in zip(lows, ups, strict=True)]

    def _imaginary(self, point: _Point, place: _Part, step: float) -> list[Any]:
        outs, _ = point.at(place, step, self.step)
        return [out.imag / self.step for out in outs]

    def _lines(self, point: _Point, place: _Part) -> list[tuple[Line, ...]]:
        """For each result its values around the point; and its complex slopes."""
        best = _EPS ** _POWERS["central"]
        step = best if self.scheme == "complex" else self.step
        values = lines(lambda steps: point.at(place, steps * step), 256 * best / step)
        if self.scheme != "complex":
            return [(line,) for line in values]
        slopes = lines(
            lambda steps: (self._imaginary(point, place, steps * step), 0.0), 0.0
        )
        return list(zip(values, slopes, strict=True))


class _Part(NamedTuple):
    """A leaf of the arguments in the vector of all that moves, or one element of it.

    Attributes:
        position: of the argument that it is in.
        leaf: its number among the leaves of all arguments.
        where: its place in the vector.
        shape: of the leaf; () for an element.
    """

    position: int
    leaf: int
    where: slice
    shape: tuple[int, ...]


class _Point:
    """The arguments of a function, with all that moves in them as one vector.

    Attributes:
        moving: the leaves that move.
        x: the vector.
    """

    def __init__(self, function: HostFunction[..., Any], args: Any) -> None:
        self.function, self.moving = function, list[_Part]()
        wide = tree.tree_map(_wide, tuple(args))
        self._leaves, self._tree = tree.tree_flatten(wide)
        positions = [p for p, arg in enumerate(wide) for _ in tree.tree_leaves(arg)]
        still, n = function.nondiff_of(len(wide)), 0
        for leaf, position in enumerate(positions):
            value = self._leaves[leaf]
            if position not in still and np.asarray(value).dtype == np.float64:
                where = slice(n, n + value.size)
                self.moving.append(_Part(position, leaf, where, value.shape))
                n += value.size
        vectors = [np.ravel(self._leaves[part.leaf]) for part in self.moving]
        self.x = np.concatenate([np.zeros(0), *vectors])

    @property
    def elements(self) -> list[_Part]:
        """The elements that move, one by one."""
        return [
            _Part(part.position, part.leaf, slice(k, k + 1), ())
            for part in self.moving
            for k in range(part.where.start, part.where.stop)
        ]

    @cached_property
    def start(self) -> list[np.ndarray]:
        """The results at the point itself."""
        return self._run(self.x)

    def at(
        self, place: _Part, step: float, lift: float = 0.0
    ) -> tuple[list[np.ndarray], Any]:
        """(the results nearby, how far the argument really moved, after rounding).

        `step` is relative to `max(1, |x|)`; `lift` is added to the imaginary part.
        """
        x, where = self.x.copy(), place.where
        x[where] += step * np.maximum(1, abs(x[where]))
        offset = (x - self.x)[where].reshape(place.shape)
        if lift:
            x = x.astype(np.complex128)
            x[where] += 1j * lift
        return self._run(x), offset

    def _run(self, x: np.ndarray) -> list[np.ndarray]:
        leaves = list(self._leaves)
        for part in self.moving:
            of = x[part.where].reshape(part.shape)
            leaves[part.leaf] = of if of.imag.any() else of.real
        out = self.function.run(*self._tree.unflatten(leaves))
        found, self._out_tree = tree.tree_flatten(out)
        return list(map(np.asarray, found))

    def jacobian(self, columns: list[list[np.ndarray]]) -> Any:
        """A Jacobian from the derivatives of all results by each element that moves."""
        if not self.moving:
            return None
        outs = []
        for i, out in enumerate(self.start):
            whole = np.stack([np.zeros(out.shape), *(c[i] for c in columns)], -1)
            leaves: list[Any] = [None] * len(self._leaves)
            for part in self.moving:
                block = whole[..., 1:][..., part.where]
                leaves[part.leaf] = block.reshape(out.shape + part.shape)
            args = self._tree.unflatten(leaves)
            positions = dict.fromkeys(part.position for part in self.moving)
            outs.append(_one_or_all([args[p] for p in positions]))
        return self._out_tree.unflatten(outs)


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


def _wide(leaf: Any) -> Any:
    """A leaf on the host; in 64 bits if it is real and floating."""
    if not is_array_like(leaf) and not isinstance(leaf, jax.Array):
        return leaf
    array = _jax.to_numpy(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf)
    floats = jnp.issubdtype(array.dtype, np.floating)
    return array.astype(np.float64) if floats else array


@dataclass(frozen=True)
class Diagonal:
    """The host code of the derivative with respect to one argument."""

    differences: Differences
    position: int

    def __call__(self, *args: Any) -> np.ndarray:
        return self.differences.diagonal(self.position, *args)

    @property
    def __name__(self) -> str:
        return f"difference of {self.differences.function.__name__}"


@dataclass(frozen=True)
class _Elementwise(TakesMask):
    """The jvp rule of an elementwise function, in JAX code, under a mask or without."""

    differences: Differences
    mask: Any = None

    def where(self, mask: Any) -> _Elementwise:
        return replace(self, mask=mask)

    def __call__(self, primals: Any, tangents: Any) -> Any:
        slope = self.differences.slope
        terms = [
            slope(position).where(self.mask)(*primals) * tangent
            for position, tangent in enumerate(tangents)
            if tangent is not None and tangent.dtype != jax.dtypes.float0
        ]
        return sum(terms[1:], terms[0])
