"""Garbage collection that has really run, also without the GIL.

There, an object is freed by the thread that made it, if another thread drops the last
reference: when that thread next runs Python code, or by the garbage collector.
`gc.collect()` returns at once while another thread collects, and that collection may
have passed the object already.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from typing import Any

_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()
_TRIES = 1000  # of a millisecond; a bound in case somebody clears gc.callbacks


class _OfThread(threading.local):
    has_collected = False


_thread = _OfThread()


def _note(phase: str, _: Any) -> None:
    if phase == "stop":
        _thread.has_collected = True


if not _GIL:
    gc.callbacks.append(_note)


def collect() -> None:
    """Collects on this thread, after a collection of another thread has ended."""
    _thread.has_collected = _GIL
    gc.collect()
    for _ in range(_TRIES):
        if _thread.has_collected:
            return
        time.sleep(0.001)
        gc.collect()
