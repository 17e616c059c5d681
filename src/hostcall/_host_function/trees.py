"""One way of calling a function: from flat arrays to what rules see, and back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core.errors import DerivativeError
from hostcall._core.options import LOCAL_ONLY
from hostcall._core.source import Place
from hostcall._core.spec import Opaque, Results, Template
from hostcall._host_function.primitives import Arrays, DiffFunction, Operands, Tangents
from hostcall._host_function.ruled import Ruled
from hostcall._host_function.rules import (
    ADVICE,
    MISSING,
    RULES,
    Function,
    Kind,
    Tree,
    Trees,
)
from hostcall._jax.types import Aval, TreeDef

tree = jax.tree_util
T = TypeVar("T")
# Of some arguments; None for all of them.
Positions: TypeAlias = Sequence[int] | None


@dataclass(frozen=True)
class ArgumentLayout(DiffFunction):
    """How flat arrays become the arguments of rules, and rules' results flat arrays.

    `site.BoundHostCall` says how the derivatives of such a call are made.

    Attributes:
        function: the HostFunction, compared by identity.
        template: how the arguments are put together.
        in_avals: the avals of their arrays.
        results: what the function returns.
        nondiff: positions of arguments without a derivative.
        fills: the bytes of each result for a False mask; None if there is no mask. A
            mask is one more bool array behind the others, which is in no argument.
        place: the user's line.
    """

    function: Ruled = field(metadata=LOCAL_ONLY)
    template: Template
    in_avals: tuple[Aval, ...]
    results: Results
    nondiff: tuple[int, ...]
    fills: tuple[bytes | None, ...] | None
    place: Place = field(compare=False, metadata=LOCAL_ONLY)

    @property
    def name(self) -> str:
        """By which messages call it."""
        return self.function.__name__

    @cached_property
    def avals(self) -> tuple[Aval, ...]:  # type: ignore[override]
        """Of the results."""
        return self.results.avals

    @property
    def masked(self) -> bool:
        """Whether it has a mask."""
        return self.fills is not None

    @cached_property
    def n(self) -> int:
        """How many arrays its arguments have."""
        return len(self.in_avals) - self.masked

    @cached_property
    def out_diff(self) -> tuple[bool, ...]:
        """For each result, whether it has a tangent."""
        return tuple([jnp.issubdtype(a.dtype, jnp.inexact) for a in self.avals])

    @cached_property
    def out_avals(self) -> tuple[Aval, ...]:
        """The avals of the results that have a tangent."""
        return tuple(pick(self.avals, self.out_diff))

    def __repr__(self) -> str:
        return self.name

    def missing(self, key: str, **details: object) -> DerivativeError:
        """The error for a missing rule; `key` is a key of `MISSING`."""
        names = {"name": self.name, "place": self.place, **details}
        advice = self.function.advice
        if not advice and key in ADVICE:
            advice = ADVICE[key].format(**names)
        text = MISSING[key].format(**names, advice=advice)
        return DerivativeError(f"hostcall: {text}")

    # --- Which arrays have derivatives ---------------------------------------------

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """For each array, the position of the argument that holds it."""
        positions = list[int]()
        for position, (_, are_arrays) in enumerate(self.arguments):
            positions += [position] * sum(are_arrays)
        if self.masked:
            # The mask is in no argument, so its position is behind all of them.
            positions.append(len(self.arguments))
        return tuple(positions)

    @cached_property
    def diff(self) -> tuple[bool, ...]:
        """For each array of the arguments, whether it has a tangent."""
        diff: list[bool] = []
        for position, aval in zip(self.positions, self.in_avals, strict=True):
            has_tangent = position not in self.nondiff
            diff.append(has_tangent and jnp.issubdtype(aval.dtype, jnp.inexact))
        return tuple(diff)

    @property
    def diff_positions(self) -> list[int]:
        """The arguments that have a tangent in any of their arrays."""
        return sorted(set(pick(self.positions, self.diff)))

    @cached_property
    def arguments(self) -> tuple[tuple[TreeDef, list[bool]], ...]:
        """The treedef of each argument, and which of its leaves are arrays."""
        # The template is of (args, kwargs), and a HostFunction has no keywords.
        args, _ = self.template.treedef.children()
        marks = iter(self.template.leaves)
        arguments = []
        for treedef in args.children():
            of_argument = islice(marks, treedef.num_leaves)
            are_arrays = [not isinstance(mark, Opaque) for mark in of_argument]
            arguments.append((treedef, are_arrays))
        return tuple(arguments)

    # --- From arrays to trees ------------------------------------------------------

    def tangents(self, like: Operands, tangents: Tangents, zeros: Function) -> Trees:
        """Tangents in the structure of the arguments.

        Zeros stand for a tangent that is None, float0 zeros for integers, and None for
        static leaves and the arguments in `nondiff`.
        """
        complete = list[jax.Array]()
        # Not strict: a mask has no entry in `like`, and is the last of the others.
        for array, tangent, diff in zip(like, tangents, self.diff, strict=False):
            if tangent is None:
                tangent = zeros(array) if diff else _float0(array.shape)
            complete.append(tangent)
        remaining = iter(complete)
        by_argument = list[Tree]()
        for position, (treedef, are_arrays) in enumerate(self.arguments):
            # Those of `nondiff` are taken too, so that the next ones are their own.
            leaves = spread(remaining, are_arrays)
            is_fixed = position in self.nondiff
            by_argument.append(None if is_fixed else treedef.unflatten(leaves))
        return tuple(by_argument)

    def cotangents(self, cotangents: Operands) -> Tree:
        """Cotangents in the structure of the result; integers have float0 zeros."""
        leaves: list[Tree] = []
        of_results = spread(cotangents, self.out_diff)
        for cotangent, aval in zip(of_results, self.avals, strict=True):
            leaves.append(_float0(aval.shape) if cotangent is None else cotangent)
        return self.results.treedef.unflatten(leaves)

    # --- From trees to arrays ------------------------------------------------------

    def leaves_of(self, treedef: TreeDef, value: Tree, kind: Kind, form: str) -> Arrays:
        """The leaves of a value that a rule of this kind returned.

        `form` says which structure the value should have.
        """
        try:
            return list(treedef.flatten_up_to(value))
        except (ValueError, TypeError) as error:
            raise DerivativeError(
                f"hostcall: {RULES[kind].shown} of `{self.name}` should return {form},"
                f" {treedef}, got {tree.tree_structure(value)}",
                code="hc-rule",
            ) from error

    def out_leaves(self, value: Tree, kind: Kind) -> Arrays:
        """The leaves of a value in the structure of the result."""
        form = "the structure of the result"
        return self.leaves_of(self.results.treedef, value, kind, form)

    def argument_leaves(self, value: Tree, kind: Kind, of: Positions) -> Tangents:
        """One entry for each array of the arguments, from a tuple of values.

        The tuple has one value for each argument in `of`, or for each if that is None.
        The entries are None for an argument whose value is None, and for arguments not
        in `of`.
        """
        leaves = list[jax.Array | None]()
        positions = range(len(self.arguments)) if of is None else of
        n = len(positions)
        if not isinstance(value, tuple) or len(value) != n:
            form = (
                f"a tuple of {n}, one value for each of the arguments"
                f" {list(positions)} (None for zero), as in `return (x_bar,)`"
            )
            self.leaves_of(tree.tree_structure((0,) * n), value, kind, form)
        by_position = dict(zip(positions, value, strict=True))
        for position, (treedef, are_arrays) in enumerate(self.arguments):
            of_argument = by_position.get(position)
            if of_argument is None:
                leaves += [None] * sum(are_arrays)
                continue
            form = f"for argument {position} the structure of that argument"
            of_leaves = self.leaves_of(treedef, of_argument, kind, form)
            leaves += pick(of_leaves, are_arrays)  # static leaves have none
        return [*leaves, None] if self.masked else leaves

    def jacobian_leaves(self, value: Tree) -> tuple[jax.Array, ...]:
        """The blocks of a Jacobian, by result and then by array of the arguments, for
        those that have derivatives.
        """
        positions = self.diff_positions
        blocks = list[jax.Array]()
        for of_result in pick(self.out_leaves(value, "jacobian"), self.out_diff):
            # A rule of one differentiable argument returns no tuple.
            by_argument = of_result if len(positions) != 1 else (of_result,)
            leaves = self.argument_leaves(by_argument, "jacobian", positions)
            # An argument may have leaves without a derivative beside others.
            blocks += pick(leaves, self.diff)
        return tuple(blocks)

    @property
    def diagonal(self) -> bool:
        """Whether the blocks of its Jacobian are diagonal, and given as such."""
        rule = self.function.rules.jacobian
        return rule is not None and rule.diagonal

    @cached_property
    def jacobian_avals(self) -> tuple[Aval, ...]:
        in_avals = pick(self.in_avals, self.diff)
        avals: list[Aval] = []
        for out in self.out_avals:
            for aval in in_avals:
                # A diagonal has the shape of the result.
                axes = () if self.diagonal else aval.shape
                avals.append(out.update(shape=out.shape + axes))
        return tuple(avals)

    @cached_property
    def jacobian_paths(self) -> tuple[str, ...]:
        """For each block of the Jacobian what it derives, and by what."""
        outs = pick(self.results.paths(), self.out_diff)
        args = pick(self.template.paths(), self.unmasked(self.diff))
        paths: list[str] = []
        for out in outs:
            paths += [f"{out} by {arg}" for arg in args]
        return tuple(paths)

    def fitting(
        self,
        values: Sequence[jax.Array | None],
        avals: Sequence[Aval],
        kind: Kind,
        words: Sequence[tuple[str, str]],
    ) -> Arrays:
        """The arrays that JAX code returned, checked for shape and cast to dtype.

        `words` say of each what it is, and which shape it has; both may be empty.
        """
        fitted = []
        for value, aval, (subject, hint) in zip(values, avals, words, strict=True):
            array = None
            got = type(value).__name__
            # The result may be declared in 64 bits where JAX's mode has 32.
            with (
                contextlib.suppress(TypeError, ValueError),  # no array
                _jax.able_to_hold(aval.dtype),
            ):
                array = jnp.zeros(aval.shape) if value is None else jnp.asarray(value)
                got = f"{array.dtype.name}{list(array.shape)}"
                if _jax.is_key_dtype(array.dtype):
                    # Only a key may stand where a key's block is wanted.
                    is_block = aval.dtype == np.uint32
                    array = jax.random.key_data(array) if is_block else None
            if array is None or array.shape != aval.shape:
                explanation = f" for {subject}. {hint}" if subject else ""
                raise DerivativeError(
                    f"hostcall: {RULES[kind].shown} of `{self.name}` returned {got}"
                    f" where {aval.dtype}{list(aval.shape)} is wanted{explanation}",
                    code="hc-rule",
                )
            with _jax.able_to_hold(aval.dtype):
                fitted.append(array.astype(aval.dtype))
        return fitted

    def unmasked(self, values: Sequence[T]) -> Sequence[T]:
        """`values` has one entry per array of the arguments; drops the mask's."""
        return values[: self.n]


def is_pair(value: Tree, like: Tree) -> bool:
    """Whether a jvp rule returned (out, tangent) rather than the tangent alone.

    `like` has the structure of the result, and so of its tangent.
    """
    pair = tuple(value) if isinstance(value, tuple) else value  # may have names
    try:
        tree.tree_structure((like, like)).flatten_up_to(pair)
    except (ValueError, TypeError):
        return False
    return bool(tree.tree_structure(value) != tree.tree_structure(like))


def forward_halves(answer: Tree, name: str) -> tuple[Tree, Tree]:
    """(result, residual) of what the forward rule of the function `name` returned."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise DerivativeError(
            f"hostcall: the forward rule of `{name}` should return (out, residuals),"
            f" got {type(answer).__name__}",
            code="hc-rule",
        )
    return answer


def _float0(shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape, jax.dtypes.float0)


def pick(values: Iterable[T], flags: Sequence[int]) -> list[T]:
    return [v for v, flag in zip(values, flags, strict=True) if flag]


def spread(values: Iterable[T], flags: Sequence[bool]) -> list[T | None]:
    """`values` where the flags are True, None elsewhere."""
    rest = iter(values)
    return [next(rest) if flag else None for flag in flags]
