"""State that belongs to one process, and what a forked child may not do.

A child has a copy of its parent's memory, and none of its threads: a lock may be held
by a thread that does not exist, and the end of an object may close what the parent
still uses. So a child makes its own state, and keeps its parent's for ever. If the
parent had started JAX, a program in the child would wait for JAX's threads for ever:
such work is refused.
"""

from __future__ import annotations

import weakref
from typing import Any

from hostcall import _native
from hostcall._core.errors import HostcallError

_living: weakref.WeakSet[Owned] = weakref.WeakSet()
_parents: list[dict[str, Any]] = []


class Owned:
    """All of its state is made by `__init__`, which takes nothing, or by `renew`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        _living.add(made)
        return made

    def renew(self) -> None:
        """Called in a forked child."""
        _parents.append(vars(self).copy())
        vars(self).clear()
        type(self).__init__(self)


def renew_all() -> None:
    """Called in a forked child, by the end of the process (_runtime/lifecycle.py)."""
    for owner in list(_living):
        owner.renew()


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
