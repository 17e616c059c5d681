"""What a forward rule leaves on the host for its backward rule.

The idea: the store is only a cache. A residual may be any Python object, so the program
carries a handle for it: a number that no other residual of the process has or will
have. The backward call gets the handle *and* the arguments of the forward call, which
are ordinary residual arrays that JAX keeps as long as they are needed. If it finds
nothing under the handle, it runs the forward rule again. That rule is pure, so it gives
the same residual.

Why the store can't own residuals: JAX may run the forward call once and the backward
call never, twice, in another program, or for each row of a batch. It may merge two
equal forward calls, repeat one, or save handles in a loop and read them in reverse.
Nobody can say when a handle is read for the last time, so a store that owns residuals
either leaks or drops one that is still needed.

Guarantees: every eviction is right, since it costs at most one more run of the forward
rule. At most `hc.configure(residuals=)` residuals are kept, 1024 by default.

What remains is to let go early, and of the right one:

- A backward call in a compiled program takes its residual out, because it is nearly
  always the only one. If it was not, the next one computes the residual again and puts
  it back for good (`sticky`): that residual has shown that it is read more than once.
- A backward call whose rows share the residual (jax.jacrev) leaves it in.
- An eager backward call (a pullback from jax.vjp, which may be called again) leaves it
  in too. The residual goes when the array that holds its handle dies, since nothing can
  ask for it any more.
- Beyond the limit, the oldest goes first: a backward pass reads in reverse, so the
  newest are needed soonest. The numbers of dropped residuals are remembered for a
  while, so that a message can say why a forward rule runs again.

Locking: the lock guards both dictionaries against callbacks on any thread, and against
the garbage collector, which may run `_forget` on a thread that already holds the lock.
So `_forget` only notes the number, and whichever thread next gets the lock without
waiting clears up.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from secrets import randbits

import jax
import numpy as np

from hostcall import _jax
from hostcall._core import config
from hostcall._core.source import Place
from hostcall._host_function.rules import Tree

logger = logging.getLogger("hostcall")

# A handle has 64 bits in two halves, since JAX has no uint64 by default.
HANDLE = _jax.ShapedArray((2,), np.dtype(np.uint32))

# How many dropped residuals are remembered.
_REMEMBERED = 1024


class Store:
    """The newest residuals, by number.

    Args:
        limit: returns how many to keep.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self.limit = limit
        self.missed = 0  # how often a residual was computed again
        self._kept: OrderedDict[int, tuple[Tree, bool]] = OrderedDict()
        self._dropped: OrderedDict[int, None] = OrderedDict()
        self._said = set[tuple[str, str]]()
        # Starts anywhere in 62 bits, so that a handle from another process, or from
        # this one before a fork, finds nothing.
        self._next = randbits(62)
        self._dead: deque[int] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        self._clear_up()
        return len(self._kept)

    def put(self, residual: Tree) -> np.ndarray:
        """Keeps a residual and returns its handle."""
        with self._lock:
            number = self._next
            self._next += 1
        self._keep(number, residual, sticky=False)
        return np.frombuffer(number.to_bytes(8, "little"), HANDLE.dtype)

    def get(self, handle: np.ndarray, take: bool) -> tuple[Tree, bool]:
        """Returns (the residual of a handle, whether there was one).

        Args:
            handle: what `put` returned.
            take: whether this looks like the last use.
        """
        number = number_of(handle)
        self._clear_up()
        with self._lock:
            found = self._kept.get(number)
            if found is not None and take and not found[1]:
                del self._kept[number]
        return (None, False) if found is None else (found[0], True)

    def put_back(self, handle: np.ndarray, residual: Tree) -> None:
        """Keeps a residual that had to be computed again, and never takes it out."""
        self.missed += 1
        self._keep(number_of(handle), residual, sticky=True)

    def say_that_it_runs_again(
        self, handle: np.ndarray, name: str, source: str, place: Place
    ) -> None:
        """Logs, once for each function (by name and source), that a residual that was
        dropped to make room for newer ones is computed again.
        """
        with self._lock:
            new = (name, source) not in self._said
            if not new or number_of(handle) not in self._dropped:
                return
            self._said.add((name, source))
        logger.warning(
            "`%s` left more than %d residuals on the host before its backward rule used"
            " them: the oldest were dropped, and its forward rule runs again for each"
            " of those (differentiated at %s). hostcall.configure(residuals=...) keeps"
            " more; with residuals= of defvjp they are arrays of the program",
            name,
            self.limit(),
            place,
        )

    def forget_with(self, array: jax.Array) -> None:
        """Drops the residual of a handle when `array`, which holds the handle, dies."""
        number = number_of(_jax.to_numpy(array))
        # At exit nothing has to be dropped: the process's memory goes anyway.
        weakref.finalize(array, self._forget, number).atexit = False

    def clear(self) -> None:
        with self._lock:
            dropped, self._kept = self._kept, OrderedDict()
            self._dropped.clear()
        dropped.clear()

    def _keep(self, number: int, residual: Tree, sticky: bool) -> None:
        self._clear_up()
        # What is dropped dies after the lock is released: a finalizer may run any code.
        dropped = []
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
        # The outer loop closes a gap: a thread may note a number after our inner loop
        # has ended, and find the lock still taken. We look again after the release.
        while self._dead and self._lock.acquire(blocking=False):
            try:
                while self._dead:
                    dropped.append(self._kept.pop(self._dead.popleft(), None))
            finally:
                self._lock.release()
        del dropped


def number_of(handle: np.ndarray) -> int:
    return int.from_bytes(np.asarray(handle).tobytes(), "little")


store = Store(lambda: config.settings.residuals)
