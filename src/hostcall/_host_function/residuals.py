"""What a forward rule leaves on the host for its backward rule.

A residual may be any Python object, so the program carries a handle in its place: a
number that no other residual of the process has or will have. JAX may run the forward
call once and the backward one never, twice, in another program, or for each row of a
batch; it may merge two equal forward calls, repeat one, save handles in a loop and read
them in reverse. Nobody can say when a handle is read for the last time, so no scheme in
which the store *owns* residuals is both right and free of leaks.

Hence the store is only a cache. The backward call is handed the handle *and* the
arguments of the forward call, which are ordinary residual arrays that JAX keeps as long
as they are needed. Who finds nothing under the handle runs the forward rule again: it
is pure, so that gives the same residual. Then every eviction is right, and what remains
is to let go early, and of the right one:

- A backward call in a compiled program takes its residual out. Nearly always it is the
  only one. Where it wasn't, the next computes it again and puts it back for good
  (`sticky`): it has shown that it is read more than once.
- A backward call whose rows share the residual (jax.jacrev) leaves it in.
- An eager backward call (a pullback from jax.vjp, which may be called again) leaves it
  in too, and it goes when the handle's array does: nobody can ask any more.
- More than `hc.configure(residuals=)`, 1024, drop the oldest. A backward pass reads in
  reverse, so the newest are the ones to have. Those that were dropped are remembered
  for a while, so that it can be said why a forward rule runs again.

The lock's parties are callbacks on any thread and the garbage collector, which may run
`forget` on a thread that holds the lock. So `forget` only notes the number, and whoever
has the lock, or gets it at once, clears up.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from secrets import randbits
from typing import Any

import jax
import numpy as np

from hostcall import _jax
from hostcall._core import config

HANDLE_SHAPE = (2,)  # 64 bits, which JAX has in two halves
HANDLE_DTYPE = np.dtype(np.uint32)


# How many of those that were dropped are remembered.
_REMEMBERED = 1024


class Store:
    """Residuals by number, the newest of them.

    Args:
        limit: gives how many.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self.limit = limit
        self.missed = 0  # how many were computed again
        self._kept: OrderedDict[int, tuple[Any, bool]] = OrderedDict()
        self._dropped: OrderedDict[int, None] = OrderedDict()
        # From anywhere in 62 bits: a handle that was saved by another process, or by
        # this one before it was forked, finds nothing.
        self._next = randbits(62)
        self._dead: deque[int] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        self._clear_up()
        return len(self._kept)

    def put(self, residual: Any) -> np.ndarray:
        """Keeps a residual; gives its handle."""
        with self._lock:
            number = self._next
            self._next += 1
        self._keep(number, residual, sticky=False)
        return np.frombuffer(number.to_bytes(8, "little"), HANDLE_DTYPE)

    def get(self, handle: Any, take: bool) -> tuple[Any, bool]:
        """(the residual of a handle, whether it is still there).

        Args:
            handle: what `put` gave.
            take: this looks like the last use.
        """
        number = number_of(handle)
        self._clear_up()
        with self._lock:
            found = self._kept.get(number)
            if found is not None and take and not found[1]:
                del self._kept[number]
        return (None, False) if found is None else (found[0], True)

    def had_to_go(self, handle: Any) -> bool:
        """Whether newer residuals took the place of this one."""
        with self._lock:
            return number_of(handle) in self._dropped

    def put_back(self, handle: Any, residual: Any) -> None:
        """Keeps what was computed again, because it wasn't there."""
        self.missed += 1
        self._keep(number_of(handle), residual, sticky=True)

    def forget_with(self, array: jax.Array) -> None:
        """Drops the residual of a handle when this array, which holds it, dies."""
        number = number_of(_jax.to_numpy(array))
        weakref.finalize(array, self._forget, number).atexit = False

    def clear(self) -> None:
        with self._lock:
            dropped, self._kept = self._kept, OrderedDict()
            self._dropped.clear()
        dropped.clear()

    def _keep(self, number: int, residual: Any, sticky: bool) -> None:
        self._clear_up()
        dropped = []  # they die after the lock is open: their end may run anything
        limit = self.limit()
        with self._lock:
            self._kept[number] = residual, sticky
            while len(self._kept) > limit:
                dropped.append(self._kept.popitem(last=False))
                if limit:
                    self._dropped[dropped[-1][0]] = None
            while len(self._dropped) > _REMEMBERED:
                self._dropped.popitem(last=False)

    def _forget(self, number: int) -> None:
        self._dead.append(number)
        self._clear_up()

    def _clear_up(self) -> None:
        if not self._dead:
            return
        dropped = []
        while self._dead and self._lock.acquire(blocking=False):
            try:
                while self._dead:
                    dropped.append(self._kept.pop(self._dead.popleft(), None))
            finally:
                self._lock.release()
        del dropped


def number_of(handle: Any) -> int:
    return int.from_bytes(np.asarray(handle).tobytes(), "little")


store = Store(config.residuals)
