"""The hand-over from the worker that delivers taps to the recorder's writer.

Guarantees:

- Deliveries are taken in the order in which they were put, each once.
- A delivery is taken at most `patience` seconds after it was put, if the writer is not
  busy, and at once if `flush` or `close` asks for it or `ENOUGH` bytes wait.
- `put` waits only if `MOST` bytes wait, that is if the disk is slower than the program.
  Then the queue of taps fills, and the device waits, as `when_full="block"` says.

One lock protects everything here. Its parties are the worker of taps (`put`), the
writer (`batches`), and threads that flush or close. It is held for some appends
only. The writer works outside of it, so a slow disk does not delay a delivery.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from hostcall.errors import HostcallError

# Seconds. Waits return to Python this often, so that they can be interrupted.
_SLICE = 0.05
# Bytes. The writer does not wait for more than ENOUGH; `put` waits above MOST.
ENOUGH = 4 << 20
MOST = 256 << 20


class Inbox:
    def __init__(self, who: str, patience: float) -> None:
        self._who = who
        self._patience = patience
        self._changed = threading.Condition()
        self._items: list[Any] = []
        self._bytes = 0
        self._first = 0.0  # when the oldest item was put
        self._put = self._taken = self._done = 0  # items so far; `_done` are on disk
        self._wanted = 0  # a flush waits until `_done` reaches this
        self._closing = False
        self._error: BaseException | None = None

    def put(self, item: Any, size: int) -> None:
        """Called by the worker of taps. Drops the item if the writer has failed."""
        with self._changed:
            while self._bytes > MOST and not (self._error or self._closing):
                self._changed.wait(_SLICE)
            if self._error is not None:
                return  # told by the writer (errors.py)
            if self._closing:
                raise HostcallError(
                    f"hostcall: {self._who} is closed, and a program still records in"
                    " it. Close it after the last program that uses it",
                    code="hc-closed",
                )
            if not self._items:
                self._first = time.monotonic()
            self._items.append(item)
            self._put += 1
            self._bytes += size
            if len(self._items) == 1 or self._bytes > ENOUGH:
                self._changed.notify_all()

    def batches(self) -> Iterator[list[Any]]:
        """For the writer: all that came, until the end.

        What it has taken is on disk when it asks for more. If it ends with an error,
        it calls `fail`.
        """
        while items := self._take():
            yield items

    def _take(self) -> list[Any]:
        with self._changed:
            self._done = self._taken
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._items or self._closing)
            left = self._first + self._patience - time.monotonic()
            self._changed.wait_for(
                lambda: (
                    self._closing or self._wanted > self._done or self._bytes > ENOUGH
                ),
                min(max(left, 0.0), threading.TIMEOUT_MAX),
            )
            items, self._items, self._bytes = self._items, [], 0
            self._taken += len(items)
            self._changed.notify_all()  # `put` may go on
            return items

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._items.clear()
            self._changed.notify_all()

    def flush(self) -> None:
        """Waits until everything that has been put is on disk."""
        with self._changed:
            self._wanted = mark = self._put
            self._changed.notify_all()
            while self._done < mark and self._error is None:
                self._changed.wait(_SLICE)
            if self._error is not None:
                raise HostcallError(
                    f"hostcall: {self._who} could not write, and records nothing more",
                    code="hc-record",
                ) from self._error

    def close(self) -> None:
        """Accepts nothing more. The writer takes the rest and ends."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
