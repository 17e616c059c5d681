"""Keeps a process out of later collectives, once a program over several has failed.

The danger, which plain JAX has too:

  1. Step 1 fails in this process before it reaches a collective (psum, all_gather).
  2. The other processes wait in that collective.
  3. This process goes on to step 2, and reaches step 2's collective.
  4. The two collectives meet, and mix the values of two steps without an error.

So after such a failure this process refuses every program over several processes, for
the rest of its life. Programs over its own devices still run. A process that learns
that another one failed (peers.py) refuses them too: they could only hang.

A failure that reaches all processes by the program's own reduction is not told to the
others. They will raise it by themselves, and one that has not even started the program
must not refuse it: the failed process waits for it in the reduction.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import jax

from hostcall import _jax
from hostcall._core import failures
from hostcall._core.errors import HostcallError
from hostcall._runtime import peers
from hostcall._runtime.mail import Message

logger = logging.getLogger("hostcall")

_first: str | None = None  # the text of the first failure here
_elsewhere: str | None = None  # the first failure of another process
_lock = threading.Lock()


def failed(text: str, *, tell: bool = True) -> None:
    """Notes that a call of a program over several processes failed in this process.

    `tell`: the others do not learn it from the program itself.
    """
    global _first
    with _lock:
        is_first = _first is None
        if is_first:
            _first = text
    if is_first:
        _jax.refuse_programs_across(_refusal)
        if tell:
            peers.tell(text)


def _failed_elsewhere(failure: Message) -> None:
    global _elsewhere
    with _lock:
        _elsewhere = str(failure)
    _jax.refuse_programs_across(_refusal)


peers.on_failure(_failed_elsewhere)


def until_failure(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function of a call in such a program, to refuse it after a failure.

    The guard on dispatch is not enough: the program may already have been dispatched.
    Only failures here count: a program that another process's failure has not reached
    yet fails by its own reduction, with that failure's text.
    """

    @functools.wraps(function, updated=())
    def checked(*args: Any, **kwargs: Any) -> Any:
        # Without the lock: a call that reads None here began before the failure was
        # noted, as if it had been made earlier.
        if _first is not None:
            raise _refusal()
        return function(*args, **kwargs)

    return checked


def keep_text(text: str) -> None:
    """Puts the text of a failure here where the other processes find it."""
    if _jax.job_size() == 1:
        return
    try:
        _jax.job_put(_key(_jax.job_rank()), failures.without_number(text), True)
    except jax.errors.JaxRuntimeError as error:
        logger.error("the other processes can't be told what failed here: %s", error)


def text_of(process: int) -> str:
    """The text of a failure of another process; empty if it can't be had."""
    if _jax.job_size() == 1:
        return ""
    try:
        return _jax.job_get(_key(process), _FETCHING) or ""
    except jax.errors.JaxRuntimeError:  # the service is gone, and the text with it
        return ""


_FETCHING = 2.0  # seconds; the text was put there before the failure could be known


def _key(process: int) -> str:
    return f"hostcall/text/{process}"


def _refusal() -> Exception:
    return HostcallError(
        "hostcall: a program over several processes failed in this process, which"
        " therefore refuses further ones. Other processes may still be waiting inside"
        " the failed program, and the values of the two programs would mix. End all"
        " processes of the job, and restart them from the last checkpoint. Programs"
        " over this process's own devices still run. The first failure was:"
        f" {_first}"
        if _first is not None
        else "hostcall: another process of the job has failed, so this one refuses"
        " further programs over several processes: they would wait for it for ever. End"
        " all processes of the job, and restart them from the last checkpoint. Programs"
        " over this process's own devices still run. The first failure was:"
        f" {_elsewhere}",
        code="hc-process",
    )
