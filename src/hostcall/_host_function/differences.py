"""Derivatives by finite differences, for functions that have no rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core.errors import SpecError
from hostcall._core.host_code import TakesMask
from hostcall._core.spec import is_array_like
from hostcall._host_function import results
from hostcall._host_function.difference_error import (
    Precision,
    central_error,
    forward_error,
    lines,
    noise_of,
)
from hostcall._host_function.function import HostFunction
from hostcall._host_function.kept import options_of
from hostcall._host_function.rules import P, R

Scheme = Literal["central", "forward", "complex"]
_POWERS = {"central": 1 / 3, "forward": 1 / 2}
_EPS = float(np.finfo(np.float64).eps)
tree = jax.tree_util


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
    if scheme not in ("central", "forward", "complex"):
        raise SpecError(
            f"hostcall: scheme= of `{f.__name__}` should be one of 'central',"
            f" 'forward', 'complex', got {scheme!r}",
            code="hc-option",
        )
    if step is not None and not (isinstance(step, (int, float)) and step > 0):
        raise SpecError(
            f"hostcall: step= of `{f.__name__}` should be a number above 0, got"
            f" {step!r}",
            code="hc-option",
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
        wide = _wide(args)
        out = self.function.run(*wide)

        def column(place: _Place) -> list[np.ndarray]:
            return self._slope(wide, place, out)

        return self._blocks(wide, out, column)

    def diagonal(self, position: int, *args: Any) -> np.ndarray:
        """The derivative of an elementwise function with respect to one argument."""
        wide = _wide(args)
        out = self.function.run(*wide) if self.scheme == "forward" else None
        place = _Place(position, 0, np.ones(np.shape(args[position])))
        (slope,) = self._slope(wide, place, out)
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
        args = tree.tree_map(_on_host, args)
        wide = _wide(args)
        out = self.function.run(*wide)
        known = [Precision(np.asarray(o).dtype) for o in tree.tree_leaves(out)]

        def column(place: _Place) -> list[np.ndarray]:
            return self._error(wide, place, known)

        def whole(number: int, pair: np.ndarray) -> np.ndarray:
            return np.asarray(pair[0] + known[number].eps * pair[1])

        if not self.elementwise:
            return self._blocks(wide, out, column, (2,), whole)
        places = [
            _Place(p, 0, np.ones(np.shape(args[p]))) for p in self._positions(args)
        ]
        pairs = [column(place)[0] for place in places]
        errors = [whole(0, pair) for pair in pairs]
        return errors[0] if len(errors) == 1 else tuple(errors)

    def _error(
        self, args: Any, place: _Place, known: list[Precision]
    ) -> list[np.ndarray]:
        """For each result (error, what its relative rounding would add), stacked."""
        best = _EPS ** _POWERS["central"]
        step = best if self.scheme == "complex" else self.step

        def at(steps: float) -> tuple[list[Any], Any]:
            x = place.leaf(args)
            moved = x + steps * self._steps(x, place, step)
            return self._at(args, place, moved), self._width(moved - x, place)

        found = lines(at, 256 * best / step)
        for precision, line in zip(known, found, strict=True):
            precision.see(line)
        if self.scheme != "complex":
            error = central_error if self.scheme == "central" else forward_error
            return [error(line) for line in found]

        def slopes(steps: float) -> tuple[list[Any], Any]:
            x = place.leaf(args)
            moved = x + steps * self._steps(x, place, step)
            return self._imaginary(args, place, moved), 0.0

        pairs = []
        for line, slope in zip(found, lines(slopes, 0.0), strict=True):
            # A function that isn't analytic has a wrong complex slope. The central
            # difference shows it.
            rough, rounding = central_error(line)
            wrong = np.maximum(0, abs(slope.middle - line.central(2)) - rough)
            exact = 4 * _EPS * slope.size + noise_of(slope)
            pairs.append(np.stack([wrong + exact, rounding * (wrong > 0)]))
        return pairs

    def _positions(self, args: Any) -> list[int]:
        nondiff = self.function.nondiff_of(len(args))
        return [
            i
            for i, arg in enumerate(args)
            if i not in nondiff and any(map(_moves, tree.tree_leaves(arg)))
        ]

    # --- One element at a time -----------------------------------------------------

    def _blocks(
        self,
        args: Any,
        out: Any,
        column: Callable[[_Place], list[np.ndarray]],
        lead: tuple[int, ...] = (),
        finish: Callable[[int, np.ndarray], np.ndarray] = lambda _, block: block,
    ) -> Any:
        """Assembles columns, one for each element of each argument, into a Jacobian.

        Args:
            args: the arguments of the function.
            out: its result.
            column: returns for each result an array of shape (*lead, *result's shape).
            lead: the leading axes of those arrays.
            finish: maps the number of a result and a block of columns to the block
                that goes into the Jacobian.
        """
        outs, out_tree = tree.tree_flatten(out)
        shapes = [(*lead, *np.shape(o)) for o in outs]
        columns = [
            self._columns(args, p, shapes, column) for p in self._positions(args)
        ]
        leaves = []
        for i in range(len(outs)):
            of_out = [
                treedef.unflatten(b if b is None else finish(i, b) for b in blocks[i])
                for treedef, blocks in columns
            ]
            leaves.append(of_out[0] if len(of_out) == 1 else tuple(of_out))
        return out_tree.unflatten(leaves) if columns else None

    def _columns(
        self,
        args: Any,
        position: int,
        shapes: list[tuple[int, ...]],
        column: Callable[[_Place], list[np.ndarray]],
    ) -> Any:
        """(treedef of the argument, its blocks by result and then by leaf)."""
        leaves, treedef = tree.tree_flatten(args[position])
        blocks: list[list[Any]] = [[] for _ in shapes]
        for number, leaf in enumerate(leaves):
            if not _moves(leaf):
                for block in blocks:
                    block.append(None)
                continue
            columns: list[list[Any]] = [[] for _ in shapes]
            for index in np.ndindex(leaf.shape):
                mask = np.zeros(leaf.shape)
                mask[index] = 1
                found = column(_Place(position, number, mask))
                for several, one in zip(columns, found, strict=True):
                    several.append(one)
            for block, several, shape in zip(blocks, columns, shapes, strict=True):
                whole = np.stack(several, -1) if several else np.zeros((*shape, 0))
                block.append(whole.reshape(shape + leaf.shape))
        return treedef, blocks

    # --- One place -----------------------------------------------------------------

    def _slope(self, args: Any, place: _Place, out: Any) -> list[np.ndarray]:
        """The derivative of each result with respect to what moves at `place`."""
        x = place.leaf(args)
        if self.scheme == "complex":
            return self._imaginary(args, place, x)
        h = self._steps(x, place, self.step)
        up, down = x + h, (x - h if self.scheme == "central" else x)
        size = self._width(up - down, place)
        ups = self._at(args, place, up)
        lows = tree.tree_leaves(out)
        if self.scheme == "central":
            lows = self._at(args, place, down)
        return [(b - np.asarray(a)) / size for b, a in zip(ups, lows, strict=True)]

    def _steps(self, x: Any, place: _Place, step: float) -> Any:
        return place.mask * step * np.maximum(1, np.abs(x))

    def _width(self, moved: Any, place: _Place) -> Any:
        """The distance that the argument really moved, after rounding."""
        if self.elementwise and place.mask.all():
            return moved
        return moved[place.mask != 0].sum()

    def _imaginary(self, args: Any, place: _Place, x: Any) -> list[np.ndarray]:
        outs = self._at(args, place, x + 1j * place.mask * self.step)
        return [o.imag / self.step for o in outs]

    def _at(self, args: Any, place: _Place, moved: Any) -> list[np.ndarray]:
        """The results, with another value for one leaf of the arguments."""
        leaves, treedef = tree.tree_flatten(args[place.position])
        leaves[place.number] = moved
        new = list(args)
        new[place.position] = treedef.unflatten(leaves)
        return [np.asarray(o) for o in tree.tree_leaves(self.function.run(*new))]


@dataclass(frozen=True)
class _Place:
    """What moves: an argument, one of its leaves, and in it the elements marked 1."""

    position: int
    number: int
    mask: np.ndarray

    def leaf(self, args: Any) -> Any:
        return tree.tree_leaves(args[self.position])[self.number]


def _on_host(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return _jax.to_numpy(leaf)
    return np.asarray(leaf) if is_array_like(leaf) else leaf


def _moves(leaf: Any) -> bool:
    return bool(jnp.issubdtype(np.asarray(leaf).dtype, np.floating))


def _wide(args: Any) -> Any:
    def wide(leaf: Any) -> Any:
        array = np.asarray(leaf)
        return array.astype(np.float64) if _moves(array) else leaf

    return tree.tree_map(wide, tuple(args))


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
    """The jvp rule of an elementwise function, in JAX code."""

    differences: Differences

    def __call__(self, primals: Any, tangents: Any) -> Any:
        return self._along(None, primals, tangents)

    def where(self, mask: Any) -> Callable[..., Any]:
        """The rule of the function under a mask."""
        return partial(self._along, mask)

    def _along(self, mask: Any, primals: Any, tangents: Any) -> Any:
        total: Any = None
        for position, tangent in enumerate(tangents):
            if tangent is None or tangent.dtype == jax.dtypes.float0:
                continue
            slope = self.differences.slope(position)
            term = slope.where(mask)(*primals) * tangent
            total = term if total is None else total + term
        return total
