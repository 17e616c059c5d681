"""`feed.at(i)`: items by their number, from sources with `__getitem__`.

The source's lock lets one thread at a time into it, also the feed's own. What was read
is kept, the least recently used goes first. If the numbers that are asked for have a
constant stride, a thread reads the next ones ahead. The thread holds this object only
while it reads, so that an unused one is collected.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hostcall import _jax
from hostcall._core.daemon import daemon
from hostcall._core.errors import FeedError
from hostcall._runtime import workers
from hostcall._runtime.feed_source import Source

# Bytes of items that are kept, beside the newest.
_KEPT_BYTES = 64 << 20

Leaves = list[np.ndarray]


class Indexed:
    """Reads items by number: the function of a call, which makes `feed.at`."""

    def __init__(
        self,
        source: Source,
        read: Callable[[Any, int], Leaves],
        avals: Sequence[Any],
        ahead: int,
        name: str,
    ) -> None:
        self._source, self._read, self._avals, self._ahead = source, read, avals, ahead
        self._name, self.__qualname__ = name, f"{name}.at"
        self._lock = threading.Lock()  # guards all below, for moments
        self._kept: OrderedDict[int, Leaves] = OrderedDict()
        self._bytes = 0
        self._last = self._stride = 0
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._reads_ahead = False
        self.closed = ""

    def __call__(self, numbers: np.ndarray) -> tuple[np.ndarray, ...]:
        """The items of these numbers, stacked along the axes of `numbers`."""
        flat = [int(n) for n in numbers.reshape(-1)]
        if not flat:  # a vmap over no rows
            return tuple(
                np.empty(numbers.shape + a.shape, a.dtype) for a in self._avals
            )
        rows = [self._item(n) for n in flat]
        self._expect(flat)
        return tuple(
            np.stack(leaf).reshape(numbers.shape + leaf[0].shape)
            for leaf in zip(*rows, strict=True)
        )

    def close(self, why: str) -> None:
        self.closed = why
        self._wanted.put(None)

    def _item(self, number: int) -> Leaves:
        if number < 0:
            raise IndexError(
                f"hostcall: feed.at({number}) of the feed `{self._name}`: items have"
                " numbers from 0. Add the length of the source, if you mean its end"
            )
        found = self._find(number)
        if found is None:
            with self._source.lock:
                found = self._find(number)  # another thread may have read it
                if found is None:
                    found = self._read(self._get(number), number)
                    found = [leaf.copy() for leaf in found]
                    self._keep(number, found)
        return found

    def _get(self, number: int) -> Any:
        assert self._source.get is not None
        try:
            return self._source.get(number)
        except (IndexError, KeyError) as error:
            try:
                size = self._source.size() if self._source.size else None
            except Exception:  # a source without a length
                size = None
            if size is None or number < size:
                raise
            numbers = (
                f"has the numbers 0 to {size - 1}. feed.at(i % {size}) begins again,"
                f" feed.at(jnp.minimum(i, {size - 1})) stays at the last one"
                if size
                else "has no items. Is its source empty, or not filled yet?"
            )
            raise IndexError(
                f"hostcall: feed.at({number}) of the feed `{self._name}`, which"
                f" {numbers}"
            ) from error

    def _find(self, number: int) -> Leaves | None:
        with self._lock:
            if self.closed:
                raise FeedError(f"hostcall: the feed `{self._name}` {self.closed}")
            if number in self._kept:
                self._kept.move_to_end(number)
            return self._kept.get(number)

    def _keep(self, number: int, item: Leaves) -> None:
        with self._lock:
            self._kept[number] = item
            self._bytes += sum(leaf.nbytes for leaf in item)
            while self._bytes > _KEPT_BYTES and len(self._kept) > 1:
                _, gone = self._kept.popitem(last=False)
                self._bytes -= sum(leaf.nbytes for leaf in gone)

    def _expect(self, flat: list[int]) -> None:
        """Asks the thread for the next items, if the numbers go on as before."""
        with self._lock:
            stride, before = flat[-1] - self._last, self._stride
            self._last, self._stride = flat[-1], stride
            # A batch goes on by its own length, at its own steps.
            step = flat[-1] - flat[-2] if len(flat) > 1 else stride
            if stride != before or stride == 0 or step == 0 or self.closed:
                return
            if not self._reads_ahead:
                self._reads_ahead = True
                # In a call of `feed.at`, whose settings the reader takes along.
                reader = (_read_ahead, weakref.ref(self), self._wanted)
                daemon("hostcall-feed at", *reader, _jax.traced_here()).start()
            if self._wanted.empty():  # else the thread is behind, and helps nobody
                for i in range(1, self._ahead * len(flat) + 1):
                    self._wanted.put(flat[-1] + i * step)

    def __del__(self) -> None:
        self._wanted.put(None)


def _read_ahead(
    reader: weakref.ref[Indexed],
    wanted: queue.SimpleQueue[int | None],
    traced: _jax.Traced | None,
) -> None:
    """The reader's thread. It does not hold the reader, which can then be collected."""
    host = False
    if traced is not None:
        traced.enter()  # for the life of the thread
    while (number := wanted.get()) is not None:
        host = host or workers.be_host_code()
        there = reader()
        if there is None:
            return
        # Beyond the end, perhaps; a program that asks for it gets the error.
        with contextlib.suppress(Exception):
            if number >= 0:
                there._item(number)
        del there
