"""A feed's source while it is iterated, and its positions.

The position after each item that devices have not taken yet is kept, so the position of
the last item that was taken is known, whatever has been pulled ahead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
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


class Positions:
    """The position after each item that was pulled, from the last that devices took on.

    If devices have taken 7 items and 9 were pulled, these are (7, the position after
    the 7th), (8, ...), (9, ...).

    The thread alone changes it. Others copy the list in a single step, and look at the
    copy.
    """

    def __init__(self) -> None:
        # (how many items devices have taken there, the position), one more at each.
        self._after: list[tuple[int, dict[str, Any]]] = [(0, {"epoch": 0, "item": 0})]

    def begin(self, position: dict[str, Any]) -> None:
        """The position before the first item, once the source is open."""
        self._after[0] = (0, position)

    def add(self, position: dict[str, Any], taken: int) -> None:
        """The position after the newest item. Drops those before the last taken one."""
        newest, _ = self._after[-1]
        self._after.append((newest + 1, position))
        oldest, _ = self._after[0]
        assert oldest <= taken <= newest + 1, "devices take what was pulled, in order"
        del self._after[: taken - oldest]

    def restart(self, position: dict[str, Any], taken: int) -> None:
        """All items that were pulled are taken or forgotten."""
        self._after = [(taken, position)]

    def after(self, count_taken: Callable[[], int]) -> dict[str, Any]:
        """The position after the last item that was taken."""
        # Copied before the count is read: then devices have taken its first item, and
        # the count leads to one of the copy.
        positions = self._after[:]
        oldest, _ = positions[0]
        # Unless a restart is under way, which may have begun to count again.
        index = max(0, min(count_taken() - oldest, len(positions) - 1))
        _, position = positions[index]
        # The caller gets its own: a state of the source may be a dict or an array.
        return copy.deepcopy(position)


def once(name: str, refused: str) -> str:
    """The message for a source that is an iterator where it can't be one."""
    return (
        f"hostcall: the source of the feed `{name}` is an iterator, which can be"
        f" iterated only once: {refused}. Give a function that returns a new iterator,"
        " hc.feed(lambda: make_iterator())"
    )
