"""What a feed's thread knows of its source."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

# grain's iterators have the first pair, torchdata's StatefulDataLoader and the data
# sets of Hugging Face the second.
_STATES = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


class Opened:
    """A source that is being iterated, with the state of its iterator or else its own.

    Attributes:
        iterator: gives the items.
        save: returns the source's own state; None if it has none.
    """

    save: Callable[[], Any] | None = None
    load: Callable[[Any], Any] | None = None

    def __init__(self, made: Any) -> None:
        self.iterator: Iterator[Any] = iter(made)
        for holder in (self.iterator, made):
            for save, load in _STATES:
                if callable(getattr(holder, save, None)) and hasattr(holder, load):
                    self._holder = holder
                    self.save, self.load = getattr(holder, save), getattr(holder, load)
                    return

    def restore(self, state: Any) -> None:
        """Puts such a state back, and goes on from there."""
        assert self.load is not None
        self.load(state)
        self.iterator = iter(self._holder)  # an iterator is its own


class Source:
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
        again: bool = True,
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
        return Opened(made)
