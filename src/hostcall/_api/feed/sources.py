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
    if callable(source):  # the objects of a class iterate
        what = f"the source `{name}` of a feed"
        return of_a_number(source, what, "the number of the epoch", "epoch"), True
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
    """Whether this is a data frame of pandas or a table of pyarrow."""
    kinds = {f"{c.__module__.split('.')[0]}.{c.__name__}" for c in type(source).__mro__}
    return bool(kinds & {"pandas.DataFrame", "pyarrow.Table", "pyarrow.RecordBatch"})


def _batches(source: Any, batch: int, name: str) -> Callable[[int], Any]:
    if _is_table(source):
        is_arrow = hasattr(source, "to_pydict")
        names = source.schema.names if is_arrow else source.columns
        source = {str(key): source[key] for key in names}
    columns = jax.tree.map(np.asarray, source)
    shapes = [leaf.shape for leaf in jax.tree.leaves(columns)]
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or () in lengths:
        raise _refused(
            f"the arrays of the feed `{name}` should have the rows as their first axis,"
            f" and equally many, got the shapes {', '.join(map(str, shapes))}"
        )
    ((rows,),) = lengths
    if rows < batch:
        has = counted(rows, "row")
        raise _refused(f"the feed `{name}` has batch={batch}, and only {has}")

    def cut(end: int) -> Any:
        return jax.tree.map(lambda column: column[end - batch : end], columns)

    return lambda _: map(cut, range(batch, rows + 1, batch))
