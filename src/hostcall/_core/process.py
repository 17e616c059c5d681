"""State that belongs to one process, and what a forked child may not do.

A child has a copy of its parent's memory, and none of its threads: a lock may be held
by a thread that does not exist, and the end of an object may close what the parent
still uses. So a child makes its own state, and keeps its parent's for ever. If the
parent had started JAX, a program in the child would wait for JAX's threads for ever:
such work is refused.
"""

from __future__ import annotations

import logging
import weakref
from typing import TypeVar

from hostcall import _native
from hostcall._core.errors import HostcallError

logger = logging.getLogger("hostcall")

T = TypeVar("T", bound="Owned")

# By id. A dict is changed, and its values are copied, in single steps: no lock, which a
# fork could leave locked.
_living: dict[int, weakref.ref[Owned]] = {}


class Owned:
    """All of its state is made by `__init__`, which takes nothing, or by `renew`."""

    def __init__(self) -> None:
        """Called last, by the `__init__` of each kind: others may look at it now."""
        number, living = id(self), _living  # a module's names are None at the end
        living[number] = weakref.ref(self, lambda _: living.pop(number, None))

    def renew(self) -> None:
        """Called in a forked child."""
        _native.keep_for_ever(vars(self).copy())
        vars(self).clear()
        type(self).__init__(self)


def living(kind: type[T]) -> list[T]:
    """What there is of a kind in this process, the oldest first."""
    owners = [reference() for reference in list(_living.values())]
    return [owner for owner in owners if isinstance(owner, kind)]


def renew_all() -> None:
    """Called in a forked child, by the end of the process (_runtime/lifecycle.py).

    One that fails is logged: the others must not keep locks of the parent's for it.
    """
    for owner in living(Owned):
        try:
            owner.renew()
        except Exception:
            logger.exception("a forked child could not start %r anew", owner)


def refusal(what: str) -> HostcallError:
    return HostcallError(
        f"hostcall: {what} in a process that was forked from one that had started JAX."
        " JAX's threads do not exist here. Start workers with multiprocessing's 'spawn'"
        " or 'forkserver' method",
        code="hc-process",
    )


def refuse(what: str) -> None:
    if _native.forked():
        raise refusal(what)
