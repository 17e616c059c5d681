"""Refuses work in a forked child of a process that had started JAX.

The child has a copy of JAX's memory, but none of its threads: a program would wait for
them forever.
"""

from __future__ import annotations

from hostcall import _native
from hostcall._core.errors import HostcallError


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
