"""Merges calls that come at about the same time into one call (`hc.call(coalesce=)`).

Calls of one place, by any device, thread or program, meet in a `_Batch`. The thread
that opens a batch is its leader. It waits for others, at most `wait` seconds, and then
calls the function with all entries; the others wait for the outcome.

Guarantees
  * A batch has at most `size` entries. A call with more rows (a vmap) fills several.
  * A batch that is full is called at once; no call joins a batch that has been closed.
  * A batch is open only while its leader waits for others, not while the leader makes
    another call. So a function may run programs that call itself.
  * An error goes to every thread that has entries in the batch.
  * A thread that is interrupted (Ctrl-C) leaves; its entries are still computed. If the
    leader is interrupted, the others are too, since nobody is left to make the call.

Memory and threads: a place's lock protects its open batch, and entries are added under
it. It is held for these few steps only. Once closed, a batch belongs to its leader,
which writes the outcome before it sets `done`; the others read it after that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from hostcall._core.wait import wait

# Takes the entries of a batch, and returns one result for each.
Together = Callable[[list[Any]], Sequence[Any]]


class _Batch:
    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.full = threading.Event()
        self.done = threading.Event()
        self.values: Sequence[Any] = ()
        self.error: BaseException | None = None

    def finish(self, together: Together) -> None:
        try:
            self.values = together(self.entries)
        except BaseException as error:
            self.error = error
        finally:
            self.entries = []
            self.done.set()
            del self  # the error's traceback holds this frame


class Meeting:
    """Where the calls of one place meet.

    Args:
        size: how many entries a batch has at most.
        wait: how many seconds a call waits for others.
    """

    def __init__(self, size: int, wait: float) -> None:
        self._size, self._wait = size, wait
        self._lock = threading.Lock()  # protects `_open` and its entries
        self._open: _Batch | None = None

    def call(self, entries: Sequence[Any], together: Together) -> list[Any]:
        """Adds entries to batches; returns their results when all have been called.

        Args:
            entries: what the batches gather, one for each row.
            together: makes the call. Any of the threads in a batch may be the one that
                uses its own.

        Raises:
            BaseException: what `together` raised, for the first batch that failed.
        """
        parts: list[tuple[_Batch, range]] = []
        leads: list[_Batch] = []
        try:
            # One batch after the other: a batch is open only while its leader waits.
            while entries:
                entries = self._join(entries, parts, leads)
                if leads and not leads[-1].done.is_set():
                    self._lead(leads[-1], together)
        finally:
            if leads and not leads[-1].done.is_set():  # this thread was interrupted
                self._leave(leads[-1])
        values, error = _gathered(parts)
        if error is None:
            return values
        try:
            raise error
        finally:  # breaks the cycle error -> traceback -> this frame -> error
            del error, leads, parts

    def _join(
        self,
        entries: Sequence[Any],
        parts: list[tuple[_Batch, range]],
        leads: list[_Batch],
    ) -> Sequence[Any]:
        """Puts entries into the open batch. Returns those that it has no room for.

        Args:
            entries: what is left of the call's.
            parts: gets the batch, and where the entries are in it.
            leads: gets the batch if this thread leads it, before others can join it: an
                interrupt may come at any time.
        """
        with self._lock:
            batch = self._open
            if batch is None:
                batch = _Batch()
                leads.append(batch)
                self._open = batch
            start = len(batch.entries)
            taken = entries[: self._size - start]
            batch.entries += taken
            parts.append((batch, range(start, len(batch.entries))))
            if len(batch.entries) == self._size:
                self._open = None
                batch.full.set()
        return entries[len(taken) :]

    def _lead(self, batch: _Batch, together: Together) -> None:
        wait(batch.full.wait, self._wait)
        self._close(batch)
        batch.finish(together)

    def _leave(self, batch: _Batch) -> None:
        self._close(batch)
        batch.error = batch.error or KeyboardInterrupt()
        batch.done.set()

    def _close(self, batch: _Batch) -> None:
        with self._lock:
            if self._open is batch:
                self._open = None


def _gathered(
    parts: list[tuple[_Batch, range]],
) -> tuple[list[Any], BaseException | None]:
    """Waits for the batches; the results of these entries, or the first error."""
    values: list[Any] = []
    for batch, mine in parts:
        wait(batch.done.wait)
        if batch.error is not None:
            return [], batch.error
        values += batch.values[mine.start : mine.stop]
    return values, None
