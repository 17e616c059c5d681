"""State that belongs to one process, and what a forked child may not do.

A child has a copy of its parent's memory, and none of its threads: a lock may be held
by a thread that does not exist, and the end of an object may close what the parent
still uses. So a child makes its own state, and keeps its parent's for ever. If the
parent had started JAX, a program in the child would wait for JAX's threads for ever:
such work is refused.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import ClassVar, TypeVar

from hostcall import _native
from hostcall._core.errors import HostcallError

logger = logging.getLogger("hostcall")

T = TypeVar("T", bound="PerProcess")
Made = TypeVar("Made")


class PerProcess:
    """State of one process, which a forked child starts anew.

    By default `__init__`, which takes nothing, makes all of it again; a kind whose
    `__init__` takes arguments, or that keeps something, has an `after_fork` of its own.
    """

    # By id. A dict is changed, and its values are copied, in single steps, with the GIL
    # and without: no lock, which a fork could leave locked.
    _living: ClassVar[dict[int, weakref.ref[PerProcess]]] = {}

    def __init__(self) -> None:
        """Called last, by the `__init__` of each kind: others may look at it now."""
        number = id(self)
        living = PerProcess._living  # a module's names are None at the end
        living[number] = weakref.ref(self, lambda _: living.pop(number, None))

    def after_fork(self) -> None:
        """Called in a forked child, by the one hook that hostcall has for forks."""
        # Never destroyed: the end of an object may close what the parent still uses.
        _native.keep_for_ever(vars(self).copy())
        vars(self).clear()
        type(self).__init__(self)


class Guarded(PerProcess):
    """Has a lock, which a forked child makes anew; the rest of the state stays.

    It is reentrant, since a signal handler may come while this thread holds it.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        super().__init__()

    def after_fork(self) -> None:
        # A thread that does not exist here may have held the parent's.
        self.lock = threading.RLock()


def living(kind: type[T]) -> list[T]:
    """What there is of a kind in this process, the oldest first."""
    owners = [reference() for reference in list(PerProcess._living.values())]
    return [owner for owner in owners if isinstance(owner, kind)]


def call_after_fork() -> None:
    """Calls `after_fork` of all state, in a forked child (_runtime/lifecycle.py).

    One that fails is logged: the others must not keep locks of the parent's for it.
    """
    for owner in living(PerProcess):
        try:
            owner.after_fork()
        except Exception:
            logger.exception("a forked child could not start %r anew", owner)


# Its lock is held by a thread that starts something: two programs may be lowered at
# once. What is started starts other things.
starting = Guarded()


def once(make: Callable[[], Made]) -> Callable[[], Made]:
    """Calls `make()` the first time, and returns what it returned ever after.

    If it raises, the next time is the first one.
    """
    first: list[Made] = []

    @functools.cache  # once there is a value, no call waits for the lock
    @functools.wraps(make)
    def get() -> Made:
        with starting.lock:
            if not first:
                value = make()
                # A signal handler may have started it meanwhile, on this thread.
                first[:] = first or [value]
            assert len(first) == 1, "what is started once is one thing"
            return first[0]

    return get


def refusal(work: str) -> HostcallError:
    """The error for work that a forked child may not do; `work` is a clause."""
    return HostcallError(
        f"hostcall: {work} in a process that was forked from one that had started JAX."
        " JAX's threads do not exist here. Start workers with multiprocessing's 'spawn'"
        " or 'forkserver' method",
        code="hc-process",
    )
