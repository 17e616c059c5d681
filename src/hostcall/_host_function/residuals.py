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

Threads: callbacks use the store on any thread, and a dying array may drop a residual in
the middle of any line here, if the garbage collector runs there. There is no lock: each
use of a dictionary is one step in Python, and the order of two of them never matters.
At worst a residual is dropped too early, which is right, or a moment late.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import deque
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


class ResidualStore:
    """The newest residuals, by number."""

    def __init__(self) -> None:
        # By number: the residual, and whether it is never taken out. Oldest first.
        self._kept: dict[int, tuple[Tree, bool]] = {}
        self._dropped: deque[int] = deque(maxlen=_REMEMBERED)
        # Functions, by name and source, for which the log says that a rule runs again.
        self._logged: dict[tuple[str, str], object] = {}
        # Starts anywhere in 62 bits, so that a handle from another process, or from
        # this one before a fork, finds nothing.
        self._numbers = itertools.count(randbits(62))

    def put(self, residual: Tree) -> np.ndarray:
        """Keeps a residual and returns its handle."""
        number = next(self._numbers)
        self._keep(number, residual, sticky=False)
        return np.frombuffer(number.to_bytes(8, "little"), HANDLE.dtype)

    def get(self, handle: np.ndarray, take: bool) -> tuple[Tree, bool]:
        """Returns (the residual of a handle, whether there was one).

        Args:
            handle: what `put` returned.
            take: whether this looks like the last use.
        """
        number = number_of(handle)
        kept = self._kept.get(number)
        if kept is None:
            return None, False
        residual, is_sticky = kept
        if take and not is_sticky:
            self._kept.pop(number, None)
        return residual, True

    def put_back(self, handle: np.ndarray, residual: Tree) -> None:
        """Keeps a residual that had to be computed again, and never takes it out."""
        self._keep(number_of(handle), residual, sticky=True)

    def warn(self, handle: np.ndarray, name: str, source: str, place: Place) -> None:
        """Logs, once for each function, that a residual that was dropped to make room
        for newer ones is computed again.
        """
        was_dropped = number_of(handle) in self._dropped.copy()  # others may add to it
        if not was_dropped:
            return
        # In one step: of several threads, the one whose mark is stored logs it.
        mark = object()
        if self._logged.setdefault((name, source), mark) is not mark:
            return
        logger.warning(
            "`%s` left more than %d residuals on the host before its backward rule used"
            " them: the oldest were dropped, and its forward rule runs again for each"
            " of those (differentiated at %s). hostcall.configure(residuals=...) keeps"
            " more; with residuals= of defvjp they are arrays of the program",
            name,
            config.settings.residuals,
            place,
        )

    def forget_with(self, array: jax.Array) -> None:
        """Drops the residual of a handle when `array`, which holds the handle, dies."""
        number = number_of(_jax.to_numpy(array))
        # At exit nothing has to be dropped: the process's memory goes anyway.
        weakref.finalize(array, self._kept.pop, number, None).atexit = False

    def _keep(self, number: int, residual: Tree, sticky: bool) -> None:
        limit = config.settings.residuals
        self._kept[number] = residual, sticky
        extra = len(self._kept) - limit
        if extra <= 0:
            return
        # A copy of all numbers is one step; a walk through some isn't.
        oldest = list(self._kept)[:extra]
        for old in oldest:
            is_dropped_here = self._kept.pop(old, None) is not None
            if is_dropped_here and limit:
                self._dropped.append(old)


def number_of(handle: np.ndarray) -> int:
    return int.from_bytes(np.asarray(handle).tobytes(), "little")


store = ResidualStore()
