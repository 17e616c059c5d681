"""A program over several processes that failed in this one, and what follows.

Other processes may wait in a collective that this one never came to. Whatever it ran
over several processes next would meet them there, and the values of two steps would be
mixed, without an error (in plain JAX too). So this process takes no further part.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from hostcall import _jax
from hostcall._core.errors import HostcallError

_first: str | None = None  # what failed first
_lock = threading.Lock()


def failed(text: str) -> None:
    """A call of a program over several processes failed here."""
    global _first
    with _lock:
        if _first is not None:
            return
        _first = text
    _jax.refuse_programs_across(_refusal)


def until_failure(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a call in such a program: refused after a failure, since its
    program may have been dispatched before.
    """

    @functools.wraps(function, updated=())
    def checked(*args: Any, **kwargs: Any) -> Any:
        if _first is not None:
            raise _refusal()
        return function(*args, **kwargs)

    return checked


def _refusal() -> Exception:
    return HostcallError(
        "hostcall: a program over several processes failed in this process, so it may"
        " not run another one. Other processes may still wait for it inside the"
        " program that failed, and would mix that one's values with the next one's. End"
        " all processes of the job, and start them again from the last checkpoint."
        " Programs over this process's own devices still run. What failed first:"
        f" {_first}"
    )
