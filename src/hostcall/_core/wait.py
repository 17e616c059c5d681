"""Waiting in slices, so that every wait can be interrupted.

Ctrl-C and the end of the process raise KeyboardInterrupt in a thread that runs a call.
Python raises it between two instructions, and a wait for a lock is one instruction,
however long it takes. So no wait of hostcall's is longer than a slice.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SLICE = 0.05  # seconds


def wait(done: Callable[[float], object], seconds: float | None = None) -> bool:
    """Waits until `done(slice)` is true; returns False if it isn't after `seconds`.

    Args:
        done: waits for so many seconds at most, as `threading.Event.wait` does.
        seconds: the limit; None for no limit.
    """
    until = None if seconds is None else time.monotonic() + seconds
    while not done(slice_of(until)):
        if until is not None and time.monotonic() >= until:
            return False
    return True


def slice_of(until: float | None) -> float:
    """How long one wait may be that ends at `until` (`time.monotonic`), if not None."""
    if until is None:
        return SLICE
    return min(SLICE, max(0.0, until - time.monotonic()))
