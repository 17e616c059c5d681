"""A recorder's threads: its writer, and one for each sink.

Guarantees:

- Items are handed on in the order in which they were put, each once.
- An item is taken at most `patience` seconds after it was put, if the thread is not
  busy, and at once if `flush` or `close` asks for it or `ENOUGH` bytes wait.
- `put` waits only if `MOST` bytes wait, that is if the disk is slower than the program.
  Then the queue of taps fills, and the device waits, as `when_full="block"` says.
- An error ends the thread. It is logged at once and raised once: by the next barrier,
  or by `close` if the recorder's last barrier is over.

A thread and those that use it share one lock, which protects everything in the worker.
It is held for some appends only. The thread works outside of it, so a slow disk does
not delay a delivery.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from hostcall._core.daemon import daemon
from hostcall._core.wait import SLICE
from hostcall.errors import HostcallError
from hostcall.tools._values import failed

_logger = logging.getLogger("hostcall")

T = TypeVar("T")
Work = Callable[[Iterator[list[T]]], object]
Errors = deque[BaseException]  # each step of it is one for other threads

# Bytes. The thread does not wait for more than ENOUGH; `put` waits above MOST.
ENOUGH = 4 << 20
MOST = 256 << 20


class Worker(Generic[T]):
    """A thread that works for a recorder, from now on.

    Args:
        name: what threads of this kind are called.
        owner: what it works for, in messages: "the recorder of run".
        work: gets all that comes, in lists, until the end. What it has taken is done
            when it asks for more.
        errors: gets the error that ends the thread; the recorder raises it.
        patience: seconds.
    """

    def __init__(
        self,
        name: str,
        owner: str,
        work: Work[T],
        errors: Errors,
        patience: float = 0.0,
    ) -> None:
        self._owner = owner
        self._patience = patience
        self._changed = threading.Condition()
        self._items: list[T] = []
        self._bytes = 0
        # When the oldest item has waited long enough; 0 if somebody waits for it.
        self._due = 0.0
        self._count_put = 0  # items so far
        self._count_done = 0
        self._closing = False
        self._ended = False
        self._error: BaseException | None = None
        # The thread has these, not the worker: programs keep it after the end.
        daemon(name, self._run, work, errors).start()

    def put(self, item: T, size: int = 0) -> None:
        """Queues an item of so many bytes. Drops it if the thread has failed."""
        with self._changed:
            self._wait_until(lambda: self._bytes <= MOST or self._closing)
            if self._error is not None:  # it was logged, and a barrier raises it
                return
            if self._closing:
                raise HostcallError(
                    f"hostcall: {self._owner} is closed, and a program still records in"
                    " it. Close it after the last program that uses it, or trace the"
                    " program again with a new recorder",
                    code="hc-closed",
                )
            if not self._items:
                self._due = time.monotonic() + self._patience
            self._items.append(item)
            self._count_put += 1
            self._bytes += size
            # For others the thread need not wake: it sleeps until the first is due.
            if len(self._items) == 1 or self._bytes > ENOUGH:
                self._changed.notify_all()

    def flush(self) -> None:
        """Waits until everything that has been put is done."""
        with self._changed:
            mark = self._count_put
            self._due = 0.0
            self._changed.notify_all()
            self._wait_until(lambda: self._count_done >= mark or self._ended)
            if self._error is not None:
                complaint = f"{self._owner} could not write, and records nothing more"
                raise failed(complaint) from self._error

    def close(self) -> None:
        """Accepts nothing more, and waits until the rest is done, or has failed."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            # Not by Thread.join: after Ctrl-C in a join, Python before 3.13 believes
            # that the thread has ended.
            self._wait_until(lambda: self._ended)

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Called with the lock, which the wait gives back meanwhile."""
        # In slices, so that KeyboardInterrupt reaches a thread that waits.
        while not done():
            self._changed.wait(SLICE)

    def _run(self, work: Work[T], errors: Errors) -> None:
        raised: BaseException | None = None
        try:
            work(iter(self._take, []))  # an empty list ends it
        except BaseException as error:
            raised = error
            errors.append(error)
            # Last: who reads this expects the next barrier to raise.
            kind = type(error).__name__
            _logger.error("hostcall: %s failed: %s: %s", self._owner, kind, error)
        with self._changed:
            self._error = raised
            self._ended = True
            self._closing = True
            self._items.clear()
            self._changed.notify_all()

    def _is_urgent(self) -> bool:
        return self._closing or not self._due or self._bytes > ENOUGH

    def _take(self) -> list[T]:
        """The next items; none at the end. Asked for when the last ones are done."""
        with self._changed:
            self._count_done = self._count_put - len(self._items)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._items or self._closing)
            seconds_left = max(self._due - time.monotonic(), 0.0)
            # Python takes no longer waits. `patience` may be years.
            seconds_left = min(seconds_left, threading.TIMEOUT_MAX)
            self._changed.wait_for(self._is_urgent, seconds_left)
            items = self._items
            self._items = []
            self._bytes = 0
            self._changed.notify_all()  # `put` may go on
            return items
