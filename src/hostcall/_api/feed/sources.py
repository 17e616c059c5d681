"""What users give as the source of a feed, and what its items are.

source                          items of an epoch          again?
iterator                        its own                    no
with batch=: arrays, a table    slices of their rows       yes
iterable, tf.data.Dataset       those of a new iterator    yes
function, class                 of what it returns         yes
__getitem__ and __len__         by their number            yes
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from hostcall import _jax
from hostcall._core import coerce
from hostcall._core.array_values import is_numeric
from hostcall._core.errors import ResultError, SpecError, counted
from hostcall._core.mistakes import of_a_number
from hostcall._core.spec import Key, Results, parse_result
from hostcall._jax.types import Aval


def read_source(
    source: Any, batch: int | None, name: str
) -> tuple[Callable[[int], Any], bool]:
    """(makes what gives the items of an epoch, whether it can do so again), for
    `hc.feed(source, batch=batch)`.
    """
    # A class has the methods of its objects as attributes, and is no iterator. (An
    # enum.Enum is a class that iterates, by its metaclass.)
    is_class = isinstance(source, type) and not hasattr(type(source), "__iter__")
    is_iterator = hasattr(source, "__next__") and not is_class
    if batch is not None:
        if callable(source) or is_iterator:
            raise _refused(
                f"the feed `{name}` has batch=, which is for arrays and tables, and its"
                f" source is a {type(source).__name__}. Leave out batch=, and let the"
                " source give batches"
            )
        return _batches(source, batch, name), True
    if is_iterator:
        return lambda _: source, False
    if _is_table(source):
        raise _refused(
            f"the source `{name}` is a {type(source).__name__}, and iterating it does"
            " not give its rows. Say how many rows an item has: batch=32"
        )
    iterates = hasattr(source, "__iter__") or hasattr(source, "as_numpy_iterator")
    if iterates and not is_class:
        return lambda _: source, True
    if callable(source):  # a function, or a class whose objects iterate
        subject = f"the source `{name}` of a feed"
        return of_a_number(source, subject, "the number of the epoch", "epoch"), True
    # A data set of torch, which raises no IndexError at its end as lists do.
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return lambda _: map(source.__getitem__, range(len(source))), True
    raise _refused(
        "the source of a feed should be an iterable, an iterator, or a function that"
        f" returns one, got {source!r}"
    )


def _refused(why: str) -> SpecError:
    return SpecError(f"hostcall: {why}", code="hc-feed-source")


# --- Arrays and tables ---------------------------------------------------------------


def _is_table(source: Any) -> bool:
    """Whether this is a data frame of pandas or a table of pyarrow.

    By name, since neither package may be imported for it.
    """
    for kind in type(source).__mro__:
        package, _, _ = kind.__module__.partition(".")
        if f"{package}.{kind.__name__}" in _TABLES:
            return True
    return False


_TABLES = ("pandas.DataFrame", "pyarrow.Table", "pyarrow.RecordBatch")


def _batches(source: Any, batch: int, name: str) -> Callable[[int], Any]:
    if _is_table(source):
        is_arrow = hasattr(source, "to_pydict")
        names = source.schema.names if is_arrow else source.columns
        source = {str(key): source[key] for key in names}
    columns = jax.tree.map(np.asarray, source)
    shapes = [leaf.shape for leaf in jax.tree.leaves(columns)]
    lengths = {shape[:1] for shape in shapes}  # () for one without axes
    if len(lengths) != 1 or () in lengths:
        raise _refused(
            f"the arrays of the feed `{name}` should have the rows as their first axis,"
            f" and equally many, got the shapes {', '.join(map(str, shapes))}"
        )
    ((rows,),) = lengths
    if rows < batch:
        has = counted(rows, "row")
        raise _refused(f"the feed `{name}` has batch={batch}, and only {has}")

    def epoch(_: int) -> Iterator[Any]:
        # Rows at the end that do not fill an item are left out.
        for end in range(batch, rows + 1, batch):
            rows_of_item = slice(end - batch, end)
            yield jax.tree.map(operator.itemgetter(rows_of_item), columns)

    return epoch


# --- Items ---------------------------------------------------------------------------


def spec_of(item: Any, name: str) -> Any:
    """The spec of items like this one, with the dtypes that JAX gives their leaves."""

    def describe(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        array = np.asarray(_readable(leaf))
        if not is_numeric(array.dtype):
            raise _refused(
                f"item 0{jax.tree_util.keystr(path)} of the feed `{name}` is a"
                f" {type(leaf).__name__} ({array.dtype}), which JAX arrays can't hold."
                " Let the source leave it out, or turn it into numbers"
            )
        native = array.dtype.newbyteorder("=")  # files may have the other order
        return jax.ShapeDtypeStruct(array.shape, _jax.canonical_dtype(native))

    return jax.tree_util.tree_map_with_path(describe, item)


def parse_spec(spec: Any, name: str) -> Results:
    """What `spec` declares."""
    results = parse_result(spec, name)
    if not results.avals:
        raise _refused(
            f"the items of the feed `{name}` have no leaves. Does the source give None?"
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
    treedef = results.treedef
    avals = results.avals
    paths = [path.removeprefix("result") for path in results.paths()]
    of = f"of the feed `{name}`"
    if inferred:
        of += ", which without spec= has the shapes and dtypes of its first item,"

    def read(value: Any, item: int) -> list[np.ndarray]:
        try:
            # Not `flatten`: a leaf may be a pytree to JAX, such as a list of numbers
            # that NumPy reads as one array.
            leaves = treedef.flatten_up_to(value)
        except (ValueError, TypeError) as error:
            raise ResultError(
                f"hostcall: item {item} of the feed `{name}` has another structure than"
                f" spec=. Expected {_words(treedef)}, got"
                f" {_words(jax.tree.structure(value))}"
            ) from error
        arrays = []
        for leaf, aval, key, path in zip(
            leaves, avals, results.keys, paths, strict=True
        ):
            which = f"item {item}{path} {of}"
            arrays.append(_array(leaf, aval, key, which))
        return arrays

    return read


def _array(leaf: Any, aval: Aval, key: Key, which: str) -> np.ndarray:
    return coerce.coerce(
        _readable(leaf),
        dtype=aval.dtype,
        shape=aval.shape,
        which=lambda: which,
        hint=functools.partial(_hint, aval),
        key=key,
    )


def _hint(aval: Aval, shape: tuple[int, ...]) -> str:
    """What to do about a leaf with another shape."""
    is_short = (0,) < shape[:1] < aval.shape[:1]  # (rows,), or () without axes
    if is_short and shape[1:] == aval.shape[1:]:
        return (
            "Is it the last batch, which is not full? Items can't differ in size: let"
            " the source leave it out (drop_last=True), or fill it up"
        )
    return "Change what the source gives, or spec="


def _readable(leaf: Any) -> Any:
    """What NumPy can read in place of tensors of torch and TensorFlow."""
    if hasattr(leaf, "detach"):
        return leaf.detach()  # torch refuses to hand out a tensor with a gradient
    # The iterator of a `tf.data.Dataset` gives eager tensors, unlike the data set
    # itself, which a feed asks for arrays. NumPy can't read those of bfloat16.
    package, _, _ = type(leaf).__module__.partition(".")
    if package == "tensorflow" and hasattr(leaf, "numpy"):
        return leaf.numpy()
    return leaf


def _words(treedef: Any) -> str:
    return str(treedef).removeprefix("PyTreeDef(").removesuffix(")")
