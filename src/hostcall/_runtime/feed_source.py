"""What a feed's thread knows of its source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass
class Opened:
    """A source that is being iterated.

    Attributes:
        iterator: gives the items.
        save: returns the source's own state, or None if it has none.
        load: puts such a state back; returns the iterator that goes on from there.
    """

    iterator: Iterator[Any]
    save: Callable[[], Any] | None = None
    load: Callable[[Any], Iterator[Any]] | None = None


class Source(Protocol):
    """Where items come from (_api/feed/sources.py)."""

    @property
    def again(self) -> bool:
        """Whether it can be iterated a second time."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held for each item, if others read items by their numbers meanwhile."""

    def open(self, epoch: int) -> Opened: ...
