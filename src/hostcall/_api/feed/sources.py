"""Reads what users give as the source of a feed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hostcall._core.arguments import check_count, of_a_number
from hostcall._core.counted import counted
from hostcall._core.errors import SpecError
from hostcall._runtime.feed_source import Source


def read_source(source: Any, batch: int | None, name: str) -> Source:
    """The source of `hc.feed(source, batch=batch)`."""
    if batch is not None:
        check_count("batch", f"the feed `{name}`", batch, "a number of rows")
        columns = _columns(source, name)
        items = _rows_of(columns, batch, name) // batch

        def cut(number: int) -> Any:
            if not 0 <= number < items:
                raise IndexError(f"item {number} of {items}")
            rows = slice(number * batch, (number + 1) * batch)
            return jax.tree.map(lambda column: column[rows], columns)

        return Source(lambda _: map(cut, range(items)), get=cut, size=lambda: items)
    if isinstance(source, type) and not hasattr(type(source), "__iter__"):
        return Source(_by_epoch(source, name))  # its objects iterate
    if hasattr(source, "__next__"):
        return Source(lambda _: source, again=False)
    if _is_table(source):
        raise SpecError(
            f"hostcall: the source `{name}` is a {type(source).__name__}, and iterating"
            " it does not give its rows. Say how many rows an item has: batch=32",
            code="hc-feed-source",
        )
    if hasattr(source, "__iter__") or hasattr(source, "as_numpy_iterator"):
        numbered = not isinstance(source, dict)
        get = getattr(source, "__getitem__", None) if numbered else None
        return Source(lambda _: source, get=get, size=lambda: len(source))
    if callable(source):
        return Source(_by_epoch(source, name))
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        at = source.__getitem__
        return Source(
            lambda _: map(at, range(len(source))), get=at, size=lambda: len(source)
        )
    raise SpecError(
        f"hostcall: the source of a feed should be an iterable, an iterator, or a"
        f" function that returns one, got {source!r}",
        code="hc-feed-source",
    )


def _by_epoch(function: Callable[..., Any], name: str) -> Callable[[int], Any]:
    """Calls the function with the number of the epoch, if it wants an argument."""
    return of_a_number(
        function,
        lambda needed: (
            f"hostcall: the source `{name}` of a feed should require no argument, or"
            f" only the number of the epoch, but it requires {needed}. Write"
            " hc.feed(lambda: ...) or hc.feed(lambda epoch: ...)"
        ),
    )


# --- Arrays and tables ---------------------------------------------------------------


def _is_table(source: Any) -> bool:
    """Whether this is a data frame of pandas or a table of pyarrow."""
    kinds = {f"{c.__module__.split('.')[0]}.{c.__name__}" for c in type(source).__mro__}
    return bool(kinds & {"pandas.DataFrame", "pyarrow.Table", "pyarrow.RecordBatch"})


def _columns(source: Any, name: str) -> Any:
    """A pytree of NumPy arrays whose first axis are the rows."""
    if _is_table(source):
        if hasattr(source, "to_pydict"):
            # A Table's columns take no such option, and a RecordBatch's need it.
            is_batch = type(source).__name__ == "RecordBatch"
            how = {"zero_copy_only": False} if is_batch else {}
            names = source.schema.names
            return {key: source.column(key).to_numpy(**how) for key in names}
        return {str(key): source[key].to_numpy() for key in source.columns}
    if callable(source) or hasattr(source, "__next__"):
        raise SpecError(
            f"hostcall: the feed `{name}` has batch=, which is for arrays and tables,"
            f" and its source is a {type(source).__name__}. Leave out batch=, and let"
            " the source give batches",
            code="hc-feed-source",
        )
    return jax.tree.map(np.asarray, source)


def _rows_of(columns: Any, batch: int, name: str) -> int:
    leaves = jax.tree.leaves(columns)
    sizes = {int(leaf.shape[0]) if leaf.ndim else -1 for leaf in leaves}
    if len(sizes) != 1 or -1 in sizes:
        raise SpecError(
            f"hostcall: the arrays of the feed `{name}` should have the rows as their"
            " first axis, and equally many, got the shapes"
            f" {', '.join(str(leaf.shape) for leaf in leaves)}",
            code="hc-feed-source",
        )
    (rows,) = sizes
    if rows < batch:
        raise SpecError(
            f"hostcall: the feed `{name}` has batch={batch}, and only"
            f" {counted(rows, 'row')}",
            code="hc-feed-source",
        )
    return rows
