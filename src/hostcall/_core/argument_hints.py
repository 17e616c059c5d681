"""Compares the arguments of a call with their annotations.

A comparison gives sizes to names, so arguments are compared in the order of the
parameters: each adds the names that it has first (`hint_sizes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np

from hostcall._core.array_hints import ArrayHint, Hint, OneOf, TreeHint
from hostcall._core.errors import SpecError
from hostcall._core.hint_sizes import Sizes
from hostcall._core.result_rules import Tree, aval_of, is_aval, struct
from hostcall._core.spec import widened

tree = jax.tree_util


@dataclass(frozen=True)
class Comparison:
    """Compares arguments with their annotations, as far as these say something.

    Attributes:
        sizes: of names; each argument adds those that it has first.
        name: the function's, for messages.
        float64: whether floating arguments reach it as float64.
    """

    sizes: Sizes
    name: str
    float64: bool

    def compare(self, hint: Hint, value: Tree, words: str) -> None:
        """Compares one; `words` are what messages call it."""
        if isinstance(hint, TreeHint):
            for key, hint_of_part in hint.parts.items():
                inner = _part(value, key)
                if hint_of_part is not None and inner is not None:
                    self.compare(hint_of_part, inner, f"{words}, {key!r}")
            return
        aval = aval_of(value)  # a default is an array itself
        if not is_aval(aval):
            return  # a static argument
        kinds = hint.kinds if isinstance(hint, OneOf) else (hint,)
        reasons: list[str] = []
        for kind in kinds:
            bound_before = self.sizes.copied()
            why = self._why_not(kind, aval, words)
            if not why:
                return
            reasons.append(why)
            # What one type of a union has bound must not hold for the next one.
            self.sizes.restore(bound_before)
        raise SpecError(
            f"hostcall: {words} of `{self.name}` is {aval.dtype}{list(aval.shape)},"
            f" which is not {' or '.join(kind.shown for kind in kinds)}: {reasons[0]}",
            code="hc-arguments",
        )

    def _why_not(self, kind: ArrayHint, aval: jax.ShapeDtypeStruct, words: str) -> str:
        """What does not fit; "" if all does."""
        try:
            why = self.sizes.bind(kind, aval.shape, words)
        except Exception as error:  # of an expression, which may do anything
            no_meaning(
                kind=kind,
                words=words,
                name=self.name,
                error=error,
                sizes=self.sizes,
            )
        dtype = aval.dtype
        # Typed PRNG keys have no NumPy dtype, and are never converted.
        if self.float64 and isinstance(dtype, np.dtype):
            dtype = widened(dtype) or dtype
        if not why and not kind.allows(dtype, aval.weak_type):
            why = f"its dtype is {dtype}"
        return why


def resized(hint: Hint | None, value: Tree, sizes: Sizes) -> Tree:
    """An argument with the sizes that its annotation has now."""
    if isinstance(hint, ArrayHint) and is_aval(value):
        shape = sizes.resized(hint, value.shape)
        return struct(shape, value.dtype, value.weak_type)
    if not isinstance(hint, TreeHint):
        return value
    # By JAX's paths, since a class of the user's is put together by JAX alone.
    leaves, treedef = tree.tree_flatten_with_path(value)
    resized_leaves: list[Any] = []
    for path, leaf in leaves:
        hint_of_leaf: Hint | None = hint
        for step in path:
            if not isinstance(hint_of_leaf, TreeHint):
                hint_of_leaf = None
                break
            hint_of_leaf = hint_of_leaf.parts.get(_key(step))
        resized_leaves.append(resized(hint_of_leaf, leaf, sizes))
    return treedef.unflatten(resized_leaves)


def _key(step: Any) -> Any:
    """The number or name of a part in a path of JAX's."""
    # Of an attribute, of a key of a dict, and of an item of a sequence.
    for attribute in ("name", "key", "idx"):
        if hasattr(step, attribute):
            return getattr(step, attribute)
    return None


def _part(value: Tree, key: Any) -> Any:
    """The part of a tree; None if it has none such."""
    if isinstance(key, int):
        is_there = isinstance(value, tuple) and key < len(value)
        return value[key] if is_there else None
    if isinstance(value, Mapping):
        return value.get(key)
    return getattr(value, key, None)


def no_meaning(
    kind: ArrayHint, words: str, name: str, error: BaseException, sizes: Sizes
) -> NoReturn:
    """Refuses an annotation whose words could not be read or computed."""
    why = str(error).partition("\n")[0].rstrip(".")  # JAX's may be a page
    if isinstance(error, LookupError):
        why = f"{error} has no size"
    raise SpecError(
        f"hostcall: {words} of `{name}` is annotated {kind.shown}, which has no"
        f" meaning: {why}. The arguments name {sizes.names() or 'nothing'}. A result"
        " has names of arguments' axes, numbers, and expressions of both, as 'n-1' or"
        " '2*n'; or say with result= what the function returns",
        code="hc-result-spec",
    ) from error
