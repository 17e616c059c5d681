"""Keeps a process out of later collectives, once a program over several has failed.

The danger, which plain JAX has too:

  1. Step 1 fails in this process before it reaches a collective (psum, all_gather).
  2. The other processes wait in that collective.
  3. This process goes on to step 2, and reaches step 2's collective.
  4. The two collectives meet, and mix the values of two steps without an error.

So after such a failure this process refuses every program over several processes.
Programs over its own devices still run.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from hostcall import _jax
from hostcall._core.errors import HostcallError

_first: str | None = None  # the text of the first failure
_lock = threading.Lock()


def failed(text: str) -> None:
    """Notes that a call of a program over several processes failed in this process."""
    global _first
    with _lock:
        if _first is not None:
            return
        _first = text
    _jax.refuse_programs_across(_refusal)


def until_failure(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function of a call in such a program, to refuse it after a failure.

    The guard on dispatch is not enough: the program may already have been dispatched.
    """

    @functools.wraps(function, updated=())
    def checked(*args: Any, **kwargs: Any) -> Any:
        # Without the lock: `_first` is set once. A call that reads None here began
        # before the failure was noted, as if it had been made earlier.
        if _first is not None:
            raise _refusal()
        return function(*args, **kwargs)

    return checked


def _refusal() -> Exception:
    return HostcallError(
        "hostcall: a program over several processes failed in this process, which"
        " therefore refuses further ones. Other processes may still be waiting inside"
        " the failed program, and the values of the two programs would mix. End all"
        " processes of the job, and restart them from the last checkpoint. Programs"
        " over this process's own devices still run. The first failure was:"
        f" {_first}"
    )
