"""Failures that nobody was told of.

A program that fails while it is dispatched raises there, and one with tokens raises
where those are waited for. A program without tokens (_jax/fast_dispatch.py) that XLA
has put behind others fails on a thread of XLA's. JAX raises it where a result is read:
nowhere, if the results were dropped. So the next wait for programs raises it.
"""

from __future__ import annotations

import sys
from collections import deque

from hostcall import _jax
from hostcall._core import failures

# Any thread adds one, and any takes them, in single steps: no lock, which a fork could
# leave locked.
_texts: deque[str] = deque(maxlen=1024)


def owe(text: str) -> None:
    """Notes a failure, if this is a thread of XLA's."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    # Else somebody has dispatched the program here, and the error is raised there. That
    # is so, too, if XLA's thread only helps the dispatching one, which tells of it.
    if str(frame.f_globals.get("__name__")).startswith("hostcall."):
        _texts.append(text)


def first_failure() -> BaseException | None:
    """What JAX would have raised for the oldest failure that nobody was told of.

    The caller raises it; those behind it stay.
    """
    while True:
        try:
            text = _texts.popleft()
        except IndexError:
            return None
        if not failures.is_told(failures.number_of(text)):
            return failures.told_as(f"INTERNAL: {text}")


def failures_of_programs() -> list[BaseException]:
    """Waits for the programs that this thread has dispatched. Returns the failures."""
    found = failures.failures_of_effects()
    while (error := first_failure()) is not None:
        found.append(error)
    return found


def _raise_first() -> None:
    error = first_failure()
    if error is not None:
        raise error


def forget() -> None:
    """For a forked child, which owes nothing."""
    _texts.clear()


_jax.when_waiting_for_effects(_raise_first)
