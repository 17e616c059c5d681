"""A feed's source while it is iterated, and its position."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from hostcall._core.errors import FeedError

# How sources save and restore their state. grain's iterators have the first pair,
# torchdata's StatefulDataLoader and the data sets of Hugging Face the second.
_STATES = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


class _Stateful(NamedTuple):
    """What has the state of a source, and the names of its methods for it."""

    holder: Any
    save: str
    load: str


class Opened:
    """A source that is being iterated, with the state of its iterator or else its own.

    Attributes:
        epoch: the number of this epoch.
        item: how many items of it were pulled.
        iterator: gives the items.
    """

    def __init__(self, source: Any, epoch: int, again: bool) -> None:
        """`again` says whether the epoch can be started again."""
        if callable(getattr(source, "as_numpy_iterator", None)):  # a tf.data.Dataset
            source = source.as_numpy_iterator()
        self.epoch = epoch
        self.item = 0
        self._again = again
        try:
            self.iterator: Iterator[Any] = iter(source)
        except TypeError as error:
            if isinstance(source, Iterable):  # its own `__iter__` has raised this
                raise
            raise FeedError(
                f"hostcall: the function of a feed returned {source!r:.60}, which can't"
                " be iterated. It should return the items of an epoch: a generator"
                " function (yield item)",
                code="hc-feed-source",
            ) from error
        # The iterator's own state first: that of the source may be of its last epoch.
        self._stateful = _stateful(self.iterator) or _stateful(source)

    def position(self, saved: Any = None) -> dict[str, Any]:
        """The position after the item that was pulled last; `saved` is the state of the
        source there, if it is known.
        """
        position = {"epoch": self.epoch, "item": self.item}
        # An epoch that can be started again needs no state at its start, where that of
        # a source may be wrong: of the end of the last epoch.
        is_at_the_start = self.item == 0 and self._again
        if saved is None and self._stateful is not None and not is_at_the_start:
            saved = getattr(self._stateful.holder, self._stateful.save)()
        if saved is not None:  # a copy: the source may go on changing what it returned
            position["source"] = copy.deepcopy(saved)
        return position

    def restore(self, state: Any, name: str) -> None:
        """Puts such a state back, and goes on from there."""
        if self._stateful is None:
            raise FeedError(
                f"hostcall: the state for the feed `{name}` holds a state of its"
                " source, and the source can't take one: it has neither set_state nor"
                " load_state_dict. Make the feed with the source that it had when the"
                " state was saved"
            )
        holder = self._stateful.holder
        load = getattr(holder, self._stateful.load)
        load(copy.deepcopy(state))  # a copy: it may change what it got
        # A source is iterated anew, from the state that it has now. An iterator is its
        # own iterator, and nothing changes.
        self.iterator = iter(holder)


def _stateful(holder: Any) -> _Stateful | None:
    for save, load in _STATES:
        methods = (getattr(holder, save, None), getattr(holder, load, None))
        if all(map(callable, methods)):
            return _Stateful(holder, save, load)
    return None


def once(name: str, refused: str) -> str:
    """The message for a source that is an iterator where it can't be one."""
    return (
        f"hostcall: the source of the feed `{name}` is an iterator, which can be"
        f" iterated only once: {refused}. Give a function that returns a new iterator,"
        " hc.feed(lambda: make_iterator())"
    )
