"""Reads what users give as the source of a feed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hostcall._core.arguments import of_a_number
from hostcall._core.counted import counted
from hostcall._core.errors import SpecError


def read_source(
    source: Any, batch: int | None, name: str
) -> tuple[Callable[[int], Any], bool]:
    """(makes what gives the items of an epoch, whether it can do so again), for
    `hc.feed(source, batch=batch)`.
    """
    if batch is not None:
        return _batches(source, batch, name), True
    if isinstance(source, type) and not hasattr(type(source), "__iter__"):
        return _by_epoch(source, name), True  # its objects iterate
    if hasattr(source, "__next__"):
        return lambda _: source, False
    if _is_table(source):
        raise SpecError(
            f"hostcall: the source `{name}` is a {type(source).__name__}, and iterating"
            " it does not give its rows. Say how many rows an item has: batch=32",
            code="hc-feed-source",
        )
    if hasattr(source, "__iter__") or hasattr(source, "as_numpy_iterator"):
        return lambda _: source, True
    if callable(source):
        return _by_epoch(source, name), True
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return lambda _: map(source.__getitem__, range(len(source))), True
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


def _batches(source: Any, batch: int, name: str) -> Callable[[int], Any]:
    columns = _columns(source, name)
    ends = range(batch, _rows_of(columns, batch, name) + 1, batch)

    def cut(end: int) -> Any:
        return jax.tree.map(lambda column: column[end - batch : end], columns)

    return lambda _: map(cut, ends)


def _is_table(source: Any) -> bool:
    """Whether this is a data frame of pandas or a table of pyarrow."""
    kinds = {f"{c.__module__.split('.')[0]}.{c.__name__}" for c in type(source).__mro__}
    return bool(kinds & {"pandas.DataFrame", "pyarrow.Table", "pyarrow.RecordBatch"})


def _columns(source: Any, name: str) -> Any:
    """A pytree of NumPy arrays whose first axis are the rows."""
    if _is_table(source):
        is_arrow = hasattr(source, "to_pydict")
        names = source.schema.names if is_arrow else source.columns
        return {str(key): np.asarray(source[key]) for key in names}
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
