"""The items of a feed: their spec, and the check of each one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hostcall import _jax
from hostcall._core import coerce
from hostcall._core.errors import ResultError, SpecError
from hostcall._core.spec import Results, is_numeric, parse_result


def spec_of(item: Any, name: str) -> Any:
    """The spec of items like this one, with the dtypes that JAX gives their leaves."""

    def describe(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        array = np.asarray(_readable(leaf))
        if not is_numeric(array.dtype):
            raise SpecError(
                f"hostcall: item 0{jax.tree_util.keystr(path)} of the feed `{name}` is"
                f" a {type(leaf).__name__} ({array.dtype}), which JAX arrays can't"
                " hold. Let the source leave it out, or turn it into numbers",
                code="hc-feed-source",
            )
        native = array.dtype.newbyteorder("=")  # files may have the other order
        return jax.ShapeDtypeStruct(array.shape, _jax.canonical_dtype(native))

    return jax.tree_util.tree_map_with_path(describe, item)


def parse_spec(spec: Any, name: str) -> Results:
    """What `spec` declares."""
    results = parse_result(spec, name)
    if not results.avals:
        raise SpecError(
            f"hostcall: the items of the feed `{name}` have no leaves. Does the source"
            " give None?",
            code="hc-feed-source",
        )
    return results


def reader(
    results: Results, name: str, inferred: bool
) -> Callable[[Any, int], list[np.ndarray]]:
    """A function that checks an item, and returns its leaves as arrays.

    Args:
        results: what the items should be.
        name: of the feed.
        inferred: whether `results` describes the first item, for want of a spec=.
    """
    treedef, avals = results.treedef, results.avals
    paths = [path.removeprefix("result") for path in results.paths()]
    of = f"of the feed `{name}`"
    if inferred:
        of += ", which without spec= has the shapes and dtypes of its first item,"

    def read(value: Any, item: int) -> list[np.ndarray]:
        try:
            leaves = treedef.flatten_up_to(value)
        except (ValueError, TypeError) as error:
            raise ResultError(
                f"hostcall: item {item} of the feed `{name}` has another structure than"
                f" spec=. Expected {_words(treedef)}, got"
                f" {_words(jax.tree.structure(value))}"
            ) from error
        return [
            _array(leaf, aval, f"item {item}{path} {of}")
            for leaf, aval, path in zip(leaves, avals, paths, strict=True)
        ]

    return read


def _array(leaf: Any, aval: Any, where: str) -> np.ndarray:
    hint = functools.partial(_hint, aval)
    return coerce.coerce(_readable(leaf), aval.dtype, aval.shape, lambda: where, hint)


def _hint(aval: Any, shape: tuple[int, ...]) -> str:
    if shape[1:] == aval.shape[1:] and (0,) < shape[:1] < aval.shape[:1]:
        return (
            "Is it the last batch, which is not full? Items can't differ in size: let"
            " the source leave it out (drop_last=True), or fill it up"
        )
    return "Change what the source gives, or spec="


def _readable(leaf: Any) -> Any:
    """What NumPy can read in place of tensors of torch and TensorFlow.

    The iterator of a `tf.data.Dataset` gives eager tensors, unlike the data set itself,
    which a feed asks for arrays. NumPy can't read those of bfloat16.
    """
    if hasattr(leaf, "detach"):
        return leaf.detach()
    is_tensorflows = type(leaf).__module__.partition(".")[0] == "tensorflow"
    return leaf.numpy() if is_tensorflows and hasattr(leaf, "numpy") else leaf


def _words(treedef: Any) -> str:
    return str(treedef).removeprefix("PyTreeDef(").removesuffix(")")
