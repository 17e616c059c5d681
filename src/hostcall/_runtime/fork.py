"""Refuses work in a forked child of a process that had started JAX.

The child has a copy of JAX's memory, but none of its threads: a program would wait for
them forever.
"""

from __future__ import annotations

from hostcall import _jax, _native
from hostcall._core import owed
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


def after_fork() -> None:
    """Runs in the child. If the parent had not started JAX, the child may use it."""
    if not _jax.back_ends_started():
        return
    _native.after_fork()
    owed.forget()
    _jax.refuse_programs(lambda: refusal("a JAX program is compiled or run"))
