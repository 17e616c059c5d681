"""`feed.at(i)`: items by their number, from sources with `__getitem__`.

A lock lets one thread at a time into the source. What was read is kept, the least
recently used goes first. If the numbers that are asked for have a constant stride, a
thread reads the next ones ahead. The thread holds this object only while it reads, so
that an unused one is collected.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from hostcall._core.errors import FeedError

# Bytes of items that are kept, beside the newest.
_KEPT_BYTES = 64 << 20

Leaves = list[np.ndarray]


class Indexed:
    """Reads items by number."""

    def __init__(
        self, get: Callable[[int], Any], read: Callable[[Any, int], Leaves], ahead: int
    ) -> None:
        self._get, self._read, self._ahead = get, read, ahead
        self._lock = threading.Lock()  # guards the source and all below
        self._kept: OrderedDict[int, Leaves] = OrderedDict()
        self._bytes = 0
        self._last = self._stride = 0
        self._wanted: queue.SimpleQueue[int | None] | None = None
        self.closed = ""

    def gather(self, numbers: np.ndarray) -> tuple[np.ndarray, ...]:
        """The items of these numbers, stacked along the axes of `numbers`."""
        flat = [int(n) for n in numbers.reshape(-1)]
        rows = [self._item(n) for n in flat]
        self._expect(flat)
        return tuple(
            np.stack(leaf).reshape(numbers.shape + leaf[0].shape)
            for leaf in zip(*rows, strict=True)
        )

    def close(self, why: str) -> None:
        self.closed = why
        if self._wanted is not None:
            self._wanted.put(None)

    def _item(self, number: int) -> Leaves:
        with self._lock:
            if self.closed:
                raise FeedError(f"hostcall: the feed {self.closed}")
            found = self._kept.get(number)
            if found is None:
                found = self._read(self._get(number), number)
                self._kept[number] = found = [leaf.copy() for leaf in found]
                self._bytes += sum(leaf.nbytes for leaf in found)
                while self._bytes > _KEPT_BYTES and len(self._kept) > 1:
                    _, gone = self._kept.popitem(last=False)
                    self._bytes -= sum(leaf.nbytes for leaf in gone)
            else:
                self._kept.move_to_end(number)
            return found

    def _expect(self, flat: list[int]) -> None:
        """Asks the thread for the next items, if the numbers go on as before."""
        if not flat:
            return
        with self._lock:
            stride, before = flat[-1] - self._last, self._stride
            self._last, self._stride = flat[-1], stride
            # A batch goes on by its own length, at its own steps.
            step = flat[-1] - flat[-2] if len(flat) > 1 else stride
            if stride != before or stride == 0 or step == 0 or self.closed:
                return
            if self._wanted is None:
                self._wanted = queue.SimpleQueue()
                threading.Thread(
                    target=_read_ahead,
                    args=(weakref.ref(self), self._wanted),
                    daemon=True,
                    name="hostcall-feed at",
                ).start()
            if self._wanted.empty():  # else the thread is behind, and helps nobody
                for i in range(1, self._ahead * len(flat) + 1):
                    self._wanted.put(flat[-1] + i * step)

    def _read_if_there(self, number: int) -> None:
        try:
            if number >= 0:
                self._item(number)
        except Exception:
            return  # beyond the end, perhaps; a program that asks for it gets the error

    def __del__(self) -> None:
        if self._wanted is not None:
            self._wanted.put(None)


def _read_ahead(
    reader: weakref.ref[Indexed], wanted: queue.SimpleQueue[int | None]
) -> None:
    while (number := wanted.get()) is not None:
        there = reader()
        if there is None:
            return
        there._read_if_there(number)
        del there
