"""Derivatives by finite differences, for functions that have no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

from hostcall._errors import SpecError
from hostcall._host_function import results
from hostcall._host_function.function import HostFunction

Scheme = Literal["central", "forward", "complex"]
_POWERS = {"central": 1 / 3, "forward": 1 / 2}
tree = jax.tree_util


def finite_difference(
    f: HostFunction, *, scheme: Scheme = "central", step: float | None = None
) -> HostFunction:
    """Gives a host function derivatives by finite differences.

    `fn` is called with 64-bit arguments (complex ones for "complex"), whatever the
    program's, so that differences are as good as float64 allows.

    Args:
        f: made by `hc.host`, with real arguments, and no rule for derivatives. With
            result=hc.elementwise it is taken to be elementwise, and all elements move
            at once; else they move one by one.
        scheme: "central", 2 calls of `fn` an element, error about 1e-10 of the scale
            of f; "forward", 1 call and 1 for all, error about 1e-8; "complex", 1 call
            an element, exact to rounding, for functions that take complex arguments
            and are analytic.
        step: as a part of max(1, |x|). Default: eps^(1/3), eps^(1/2), 1e-20.

    Returns:
        `f`, which now has a Jacobian rule (elementwise: a jvp rule in JAX code), and
        can tell its errors: `f.difference_error(*args)`.

    Raises:
        SpecError: `f` is no HostFunction, has such a rule already, or an option is
            wrong.

    Under transformations: as `HostFunction.defjacobian`: both modes, first order only.

    Cost: a Jacobian is one host call, in which `fn` is called 2 n times for n elements
    of the arguments (elementwise: twice an argument).
    """
    if not isinstance(f, HostFunction):
        raise SpecError(
            f"hostcall: hc.finite_difference wants what hc.host returns, got {f!r}"
        )
    if scheme not in ("central", "forward", "complex"):
        raise SpecError(
            f"hostcall: scheme= of `{f.__name__}` should be one of 'central',"
            f" 'forward', 'complex', got {scheme!r}"
        )
    if step is not None and not (isinstance(step, (int, float)) and step > 0):
        raise SpecError(
            f"hostcall: step= of `{f.__name__}` should be a number above 0, got"
            f" {step!r}"
        )
    eps = float(np.finfo(np.float64).eps)
    size = step or (1e-20 if scheme == "complex" else eps ** _POWERS[scheme])
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
    """Of one function.

    Attributes:
        function: the HostFunction.
        scheme, step: as given, the step as a part of max(1, |x|).
        elementwise: all elements move at once.
        slopes: the functions of `slope`.
    """

    function: HostFunction
    scheme: Scheme
    step: float
    elementwise: bool
    slopes: dict[int, HostFunction] = field(default_factory=dict, compare=False)

    def jacobian(self, *args: Any) -> Any:
        """In the structure that a Jacobian rule returns."""
        return self._jacobian(args, self.step)

    def diagonal(self, position: int, *args: Any) -> np.ndarray:
        """The derivative by one argument, elementwise."""
        return self._diagonal(args, position, self.step)

    def slope(self, position: int) -> HostFunction:
        """`diagonal` in programs; one object, so that JAX's caches hit."""
        if position not in self.slopes:
            function = self.function
            options = function.call_options("value", False)
            options |= {"lend": bool(options["lend"]), "name": function.__name__ + "'"}
            self.slopes[position] = HostFunction(
                _Diagonal(self, position),
                result=results.elementwise,
                nondiff=(),
                **options,
            )
        return self.slopes[position]

    def error(self, *args: Any) -> Any:
        """The difference to half the step, and what rounding may do to one step.

        Halving takes 3/4 of a central difference's error away, 1/2 of a forward one's.
        """
        args = tree.tree_map(np.asarray, args)
        if self.elementwise:
            positions = self._positions(args)
            errors = [
                self._error(
                    args,
                    self._diagonal(args, p, self.step),
                    self._diagonal(args, p, self.step / 2),
                )
                for p in positions
            ]
            return errors[0] if len(errors) == 1 else tuple(errors)
        full = self._jacobian(args, self.step)
        half = self._jacobian(args, self.step / 2)
        return tree.tree_map(lambda a, b: self._error(args, a, b), full, half)

    def _error(self, args: Any, full: np.ndarray, half: np.ndarray) -> np.ndarray:
        eps = float(np.finfo(np.float64).eps)
        if self.scheme == "complex":
            return np.asarray(np.abs(full - half) + 4 * eps * np.abs(full))
        outs = tree.tree_leaves(self.function.fn(*_wide(args)))
        scale = max([float(np.max(np.abs(o), initial=0.0)) for o in outs], default=0.0)
        factor = 4 / 3 if self.scheme == "central" else 2
        return np.asarray(factor * np.abs(full - half) + eps * scale / self.step)

    def _positions(self, args: Any) -> list[int]:
        nondiff = self.function.nondiff_of(len(args))
        return [
            i
            for i, arg in enumerate(args)
            if i not in nondiff and any(map(_moves, tree.tree_leaves(arg)))
        ]

    # --- One element at a time -----------------------------------------------------

    def _jacobian(self, args: Any, step: float) -> Any:
        wide = _wide(args)
        columns = [self._columns(wide, p, step) for p in self._positions(args)]
        outs = [tree.tree_structure(c[0]) for c in columns]
        n_outs = outs[0].num_leaves if outs else 0
        leaves = []
        for i in range(n_outs):
            of_out = [treedef.unflatten(blocks[i]) for _, treedef, blocks in columns]
            leaves.append(of_out[0] if len(of_out) == 1 else tuple(of_out))
        return outs[0].unflatten(leaves) if outs else None

    def _columns(self, args: Any, position: int, step: float) -> Any:
        """(a result, treedef of the argument, blocks by result and then by leaf)."""
        leaves, treedef = tree.tree_flatten(args[position])
        out = self.function.fn(*args)
        shapes = [np.shape(o) for o in tree.tree_leaves(out)]
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
                moved = self._slope(args, position, number, mask, step, out)
                for column, slope in zip(columns, moved, strict=True):
                    column.append(slope)
            for block, column, shape in zip(blocks, columns, shapes, strict=True):
                whole = np.stack(column, -1) if column else np.zeros((*shape, 0))
                block.append(whole.reshape(shape + leaf.shape))
        return out, treedef, blocks

    # --- All at once ---------------------------------------------------------------

    def _diagonal(self, args: Any, position: int, step: float) -> np.ndarray:
        wide = _wide(args)
        out = self.function.fn(*wide) if self.scheme == "forward" else None
        ones = np.ones(np.shape(args[position]))
        (slope,) = self._slope(wide, position, 0, ones, step, out)
        return slope

    def _slope(
        self, args: Any, position: int, number: int, mask: Any, step: float, out: Any
    ) -> list[np.ndarray]:
        """Derivative of each result along `mask`, in one leaf of one argument."""
        leaves, treedef = tree.tree_flatten(args[position])
        x = leaves[number]
        h = mask * step * (1 if self.scheme == "complex" else np.maximum(1, np.abs(x)))

        def at(moved: Any) -> list[Any]:
            changed = list(leaves)
            changed[number] = moved
            new = list(args)
            new[position] = treedef.unflatten(changed)
            return [np.asarray(o) for o in tree.tree_leaves(self.function.fn(*new))]

        if self.scheme == "complex":
            return [o.imag / step for o in at(x + 1j * h)]
        # What was really added, after rounding.
        up, down = x + h, (x - h if self.scheme == "central" else x)
        width = up - down
        size = width if mask.all() and self.elementwise else width[mask != 0].sum()
        low = at(down) if self.scheme == "central" else tree.tree_leaves(out)
        return [(b - np.asarray(a)) / size for b, a in zip(at(up), low, strict=True)]


def _moves(leaf: Any) -> bool:
    return np.issubdtype(np.asarray(leaf).dtype, np.floating)


def _wide(args: Any) -> Any:
    def wide(leaf: Any) -> Any:
        array = np.asarray(leaf)
        return array.astype(np.float64) if array.dtype.kind == "f" else leaf

    return tree.tree_map(wide, tuple(args))


@dataclass(frozen=True)
class _Diagonal:
    """The host code of one argument's derivative."""

    differences: Differences
    position: int

    def __call__(self, *args: Any) -> np.ndarray:
        return self.differences.diagonal(self.position, *args)

    @property
    def __name__(self) -> str:
        return f"difference of {self.differences.function.__name__}"


@dataclass(frozen=True)
class _Elementwise:
    """The jvp rule of an elementwise function, in JAX code."""

    differences: Differences

    def __call__(self, primals: Any, tangents: Any) -> Any:
        return self._along(None, primals, tangents)

    def where(self, mask: Any) -> Callable[..., Any]:
        """The rule of a function with a mask."""
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
