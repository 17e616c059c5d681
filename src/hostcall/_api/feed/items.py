"""The items of a feed: their spec, and the check of each one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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
        if hasattr(leaf, "detach"):  # a torch tensor
            leaf = leaf.detach()
        array = np.asarray(_of_tensorflow(leaf))
        if not is_numeric(array.dtype):
            raise SpecError(
                f"hostcall: item 0{jax.tree_util.keystr(path)} of the feed `{name}` is"
                f" a {type(leaf).__name__} ({array.dtype}), which JAX arrays can't"
                " hold. Let the source leave it out, or turn it into numbers",
                code="hc-feed-source",
            )
        return jax.ShapeDtypeStruct(array.shape, _native_order(array.dtype))

    return jax.tree_util.tree_map_with_path(describe, item)


def parse_spec(spec: Any, name: str) -> Results:
    """What `spec` declares, and one bool: whether there is an item."""
    results = parse_result(jax.tree.map(_in_native_order, spec), name)
    if not results.avals:
        raise SpecError(
            f"hostcall: the items of the feed `{name}` have no leaves. Does the source"
            " give None?",
            code="hc-feed-source",
        )
    return results


def _native_order(dtype: Any) -> Any:
    """JAX's dtype for this one. Its bytes may be in another order, as in some files."""
    return _jax.canonical_dtype(np.dtype(dtype).newbyteorder("="))


def _in_native_order(leaf: Any) -> Any:
    dtype = getattr(leaf, "dtype", None)
    if not isinstance(dtype, np.dtype) or dtype.isnative:
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, dtype.newbyteorder("="))


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

    def read(value: Any, item: int) -> list[np.ndarray]:
        try:
            leaves = treedef.flatten_up_to(value)
        except (ValueError, TypeError) as error:
            got = jax.tree.map(lambda _: 0, value)
            raise ResultError(
                f"hostcall: item {item} of the feed `{name}` has another structure than"
                f" spec=. Expected {_words(treedef)}, got"
                f" {_words(jax.tree.structure(got))}"
            ) from error
        return [
            _leaf(
                _of_tensorflow(leaf),
                aval,
                f"item {item}{path} of the feed `{name}`",
                inferred,
            )
            for leaf, aval, path in zip(leaves, avals, paths, strict=True)
        ]

    return read


def _of_tensorflow(leaf: Any) -> Any:
    """The array of one of TensorFlow's eager tensors; anything else as it is.

    The iterator of a `tf.data.Dataset` gives such tensors, unlike the data set itself,
    which a feed asks for arrays. NumPy can't read those of bfloat16.
    """
    if type(leaf).__module__.partition(".")[0] != "tensorflow":
        return leaf
    return leaf.numpy() if hasattr(leaf, "numpy") else leaf


def _leaf(leaf: Any, aval: Any, where: str, inferred: bool) -> np.ndarray:
    shape = getattr(leaf, "shape", None)
    keys = isinstance(leaf, jax.Array) and _jax.is_key_dtype(leaf.dtype)
    if shape is not None and tuple(shape) != aval.shape and not keys:
        text = (
            f"hostcall: {where} should have the shape {list(aval.shape)}, got"
            f" {list(shape)}"
        )
        if tuple(shape[1:]) == aval.shape[1:] and 0 < shape[0] < aval.shape[0]:
            text += (
                ". Is it the last batch, which is not full? Items can't differ in size:"
                " let the source leave it out (drop_last=True), or fill it up"
            )
        raise ResultError(text)
    try:
        return coerce.coerce(leaf, aval.dtype, aval.shape, lambda: where, _of_shape)
    except ResultError as error:
        if not inferred or error.code != "hc-result-dtype":
            raise
        wider = _wider(leaf, aval, where)
        if wider is None:  # a value is out of its range
            raise
        have, wider = wider
        raise ResultError(
            f"hostcall: {where} should be {aval.dtype}, as the first item was, got"
            f" {have}. Without spec= the first item says what all items are. Give"
            f" spec=, with jax.ShapeDtypeStruct({aval.shape}, '{wider}') here, or let"
            f" the source give {wider} from the first item on",
            code="hc-result-dtype",
        ) from None


def _wider(leaf: Any, aval: Any, where: str) -> tuple[Any, Any] | None:
    """The dtype of an item, and one that holds it and the first item; None if there is
    no other one.
    """
    try:
        have = spec_of(np.asarray(leaf), where).dtype
        wider = jnp.promote_types(have, aval.dtype)
    except Exception:  # the error that was found first says enough
        return None
    return None if wider == aval.dtype else (have, wider)


def _of_shape(_: tuple[int, ...]) -> str:
    return "Change what the source gives, or spec="


def _words(treedef: Any) -> str:
    return str(treedef).removeprefix("PyTreeDef(").removesuffix(")")
