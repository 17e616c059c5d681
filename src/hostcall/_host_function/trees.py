"""One way of calling a function: its arguments' and results' trees, flat and whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._errors import DerivativeError
from hostcall._host_function.primitive import Arrays, Tangents
from hostcall._spec import Results, Static, Template

tree = jax.tree_util


@dataclass(frozen=True)
class Trees:
    """How flat arrays become what rules are called with, and back.

    Attributes:
        name: the function's, for messages.
        template: of its arguments.
        in_avals: of their arrays.
        results: of what it returns.
        nondiff: positions of arguments without a derivative.
    """

    name: str
    template: Template
    in_avals: tuple[Any, ...]
    results: Results
    nondiff: tuple[int, ...]

    # --- Which arrays have derivatives ---------------------------------------------

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Of each array: the argument that it is in."""
        whole = self.template.treedef.unflatten(range(len(self.template.leaves)))
        flat, _ = tree.tree_flatten_with_path(whole)
        return tuple(
            path[1].idx
            for (path, _), leaf in zip(flat, self.template.leaves, strict=True)
            if not isinstance(leaf, Static)
        )

    @cached_property
    def diff(self) -> tuple[bool, ...]:
        """Of each array among the arguments: whether it has a tangent."""
        return tuple(
            position not in self.nondiff and jnp.issubdtype(aval.dtype, jnp.inexact)
            for position, aval in zip(self.positions, self.in_avals, strict=True)
        )

    @cached_property
    def out_diff(self) -> tuple[bool, ...]:
        return tuple(jnp.issubdtype(a.dtype, jnp.inexact) for a in self.results.avals)

    @cached_property
    def diff_positions(self) -> tuple[int, ...]:
        """Arguments that have a tangent in any part."""
        found = {p for p, flag in zip(self.positions, self.diff, strict=True) if flag}
        return tuple(sorted(found))

    @cached_property
    def out_avals(self) -> tuple[Any, ...]:
        """Of those results that have a tangent."""
        return tuple(pick(self.results.avals, self.out_diff))

    @cached_property
    def argument_trees(self) -> tuple[Any, ...]:
        """The treedef of each argument, with static leaves."""
        return tuple(self.template.treedef.children()[0].children())

    # --- Whole ---------------------------------------------------------------------

    def arguments(self, arrays: Arrays) -> tuple[Any, ...]:
        """For JAX code: with typed keys."""
        leaves = [
            x if key is None else _jax.wrap_key(x, key)
            for x, key in zip(arrays, self.template.keys, strict=True)
        ]
        return self.template.fill(leaves)[0]

    def result(self, leaves: Arrays) -> Any:
        leaves = [
            x if key is None else _jax.wrap_key(x, key)
            for x, key in zip(leaves, self.results.keys, strict=True)
        ]
        return self.results.treedef.unflatten(leaves)

    def tangents(self, shapes: Sequence[Any], tangents: Tangents, zeros: Any) -> Any:
        """As the arguments: zeros where there is no tangent, float0 for integers,
        None for what is static and for the arguments in `nondiff`.
        """
        rest = iter(zip(shapes, tangents, self.diff, strict=True))
        leaves: list[Any] = []
        for leaf in self.template.leaves:
            if isinstance(leaf, Static):
                leaves.append(None)
                continue
            like, tangent, diff = next(rest)
            if tangent is not None:
                leaves.append(tangent)
            elif diff:
                leaves.append(zeros(like))
            else:
                leaves.append(np.zeros(np.shape(like), jax.dtypes.float0))
        args, _ = self.template.treedef.unflatten(leaves)
        return tuple(
            None if position in self.nondiff else arg
            for position, arg in enumerate(args)
        )

    def cotangents(self, cotangents: Arrays) -> Any:
        """As the result, from those of results that have one."""
        rest = iter(cotangents)
        leaves = [
            next(rest) if flag else np.zeros(aval.shape, jax.dtypes.float0)
            for aval, flag in zip(self.results.avals, self.out_diff, strict=True)
        ]
        return self.results.treedef.unflatten(leaves)

    # --- Flat ----------------------------------------------------------------------

    def out_leaves(self, value: Any, what: str) -> Arrays:
        """Of something in the structure of the result."""
        try:
            return list(self.results.treedef.flatten_up_to(value))
        except (ValueError, TypeError) as error:
            raise DerivativeError(
                f"hostcall: {what} of `{self.name}` should return the structure of the"
                f" result, {self.results.treedef}, got {_structure(value)}"
            ) from error

    def is_pair(self, value: Any) -> bool:
        """Whether a jvp rule gave (out, tangent), and not the tangent alone."""
        if not isinstance(value, tuple) or len(value) != 2:
            return False
        treedef = self.results.treedef
        if tree.tree_structure(value) == treedef:
            return False
        try:
            for part in value:
                treedef.flatten_up_to(part)
        except (ValueError, TypeError):
            return False
        return True

    def argument_leaves(self, value: Any, positions: Sequence[int], what: str) -> Any:
        """One entry an array of the arguments, from one value an argument in
        `positions`; None for an argument that has None, and for all others.
        """
        if not isinstance(value, tuple) or len(value) != len(positions):
            n = len(positions)
            got = f"{len(value)} values" if isinstance(value, tuple) else repr(value)
            raise DerivativeError(
                f"hostcall: {what} of `{self.name}` should return a tuple of {n}, one"
                f" value for each of the arguments {list(positions)} (None for zero),"
                f" got {got if len(got) < 80 else type(value).__name__}"
            )
        of = dict(zip(positions, value, strict=True))
        leaves: list[Any] = []
        for position, treedef in enumerate(self.argument_trees):
            part = of.get(position)
            if part is None:
                leaves += [None] * treedef.num_leaves
                continue
            try:
                leaves += treedef.flatten_up_to(part)
            except (ValueError, TypeError) as error:
                raise DerivativeError(
                    f"hostcall: {what} of `{self.name}` should return for argument"
                    f" {position} the structure of that argument, {treedef}, got"
                    f" {_structure(part)}"
                ) from error
        marks = self.template.leaves
        return [
            x for x, m in zip(leaves, marks, strict=True) if not isinstance(m, Static)
        ]

    def jacobian_leaves(self, value: Any) -> Arrays:
        """Blocks, by result and then by array of the arguments, of those that have
        derivatives.
        """
        what, blocks = "the Jacobian rule", []
        outs = pick(self.out_leaves(value, what), self.out_diff)
        for out in outs:
            entry = out if len(self.diff_positions) != 1 else (out,)
            leaves = self.argument_leaves(entry, self.diff_positions, what)
            blocks += pick(leaves, self.diff)
        return blocks

    @cached_property
    def jacobian_avals(self) -> tuple[Any, ...]:
        return tuple(
            out.update(shape=out.shape + aval.shape)
            for out in self.out_avals
            for aval in pick(self.in_avals, self.diff)
        )

    def fitting(self, values: Arrays, avals: Sequence[Any], what: str) -> Arrays:
        """What JAX code returned, with the shapes and dtypes that it must have."""
        fitted = []
        for value, aval in zip(values, avals, strict=True):
            if value is None:
                fitted.append(jnp.zeros(aval.shape, aval.dtype))
                continue
            array = jnp.asarray(value)
            if array.shape != aval.shape:
                raise DerivativeError(
                    f"hostcall: {what} of `{self.name}` returned"
                    f" {array.dtype}{list(array.shape)} where"
                    f" {aval.dtype}{list(aval.shape)} is wanted"
                )
            fitted.append(array.astype(aval.dtype))
        return fitted


def pick(values: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    return [v for v, flag in zip(values, flags, strict=True) if flag]


def spread(values: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    """`values` where the flags are True, None elsewhere."""
    rest = iter(values)
    return [next(rest) if flag else None for flag in flags]


def _structure(value: Any) -> str:
    return str(tree.tree_structure(value))
