"""Reads what users give as the source of a feed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

from hostcall._core.arguments import of_a_number
from hostcall._core.counted import counted
from hostcall._core.errors import SpecError
from hostcall._runtime.feed_source import Opened


class OpenSource:
    """A source as a feed's thread sees it.

    Attributes:
        again: whether it can be iterated a second time.
        get: the item of a number, or None if the source has no numbers.
        size: how many numbers there are; it may raise TypeError.
        lock: held by who asks the source for an item. Without numbers only the feed's
            thread does, and the lock is none.
    """

    def __init__(
        self,
        make: Callable[[int], Any],
        again: bool,
        get: Callable[[int], Any] | None = None,
        size: Callable[[], int] | None = None,
    ) -> None:
        self._make, self.again, self.get, self.size = make, again, get, size
        self.lock: AbstractContextManager[Any] = (
            nullcontext() if get is None else threading.Lock()
        )

    def open(self, epoch: int) -> Opened:
        made = self._make(epoch)
        if callable(getattr(made, "as_numpy_iterator", None)):  # a tf.data.Dataset
            made = made.as_numpy_iterator()
        return _opened(made)


def _opened(made: Any) -> Opened:
    """Iterates `made`, with the state of its iterator or else its own.

    grain's iterators have get_state and set_state, torchdata's StatefulDataLoader and
    the data sets of Hugging Face have state_dict and load_state_dict.
    """
    iterator = iter(made)
    for holder in (iterator, made):
        for save, load in _STATES:
            if callable(getattr(holder, save, None)) and hasattr(holder, load):
                again = made if holder is made else iterator
                return Opened(
                    iterator,
                    getattr(holder, save),
                    _loader(getattr(holder, load), again),
                )
    return Opened(iterator)


def _loader(load: Callable[[Any], Any], again: Any) -> Callable[[Any], Iterator[Any]]:
    def restored(state: Any) -> Iterator[Any]:
        load(state)
        return iter(again)  # an iterator is its own

    return restored


_STATES = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


def read_source(source: Any, batch: int | None, name: str) -> OpenSource:
    """The source of `hc.feed(source, batch=batch)`."""
    if batch is not None:
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise SpecError(
                f"hostcall: batch= of the feed `{name}` should be a number of rows, an"
                f" int of 1 or more, got {batch!r}",
                code="hc-option",
            )
        columns = _columns(source, name)
        rows = _rows_of(columns, batch, name)
        return OpenSource(
            lambda epoch: _slices(columns, rows, batch),
            again=True,
            get=lambda number: _slice(columns, rows, batch, number),
            size=lambda: rows // batch,
        )
    if isinstance(source, type) and not hasattr(type(source), "__iter__"):
        return OpenSource(_by_epoch(source, name), again=True)  # its objects iterate
    if hasattr(source, "__next__"):
        return OpenSource(lambda epoch: source, again=False)
    if _is_table(source):
        raise SpecError(
            f"hostcall: the source `{name}` is a {type(source).__name__}, and iterating"
            " it does not give its rows. Say how many rows an item has: batch=32",
            code="hc-feed-source",
        )
    if hasattr(source, "__iter__") or hasattr(source, "as_numpy_iterator"):
        get = None if isinstance(source, dict) else getattr(source, "__getitem__", None)
        return OpenSource(
            lambda epoch: source, again=True, get=get, size=lambda: len(source)
        )
    if callable(source):
        return OpenSource(_by_epoch(source, name), again=True)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return OpenSource(
            lambda epoch: (source[i] for i in range(len(source))),
            again=True,
            get=source.__getitem__,
            size=lambda: len(source),
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
            return {
                key: source.column(key).to_numpy(zero_copy_only=False)
                if type(source).__name__ == "RecordBatch"
                else source.column(key).to_numpy()
                for key in source.schema.names
            }
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


def _slices(columns: Any, rows: int, batch: int) -> Iterator[Any]:
    """The batches. Rows at the end that do not fill one are left out."""
    for number in range(rows // batch):
        yield _slice(columns, rows, batch, number)


def _slice(columns: Any, rows: int, batch: int, number: int) -> Any:
    if not 0 <= number < rows // batch:
        raise IndexError(f"item {number} of {rows // batch}")
    return jax.tree.map(lambda c: c[number * batch : (number + 1) * batch], columns)
