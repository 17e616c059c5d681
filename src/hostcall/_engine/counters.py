"""What calls have cost, for each function definition."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hostcall._core.source import source_of
from hostcall._native import Counters

# --- Costs, kept per function definition -------------------------------------------

_counters: dict[str, Counters] = {}
_lock = threading.Lock()


def counters_of(fn: Callable[..., Any]) -> Counters:
    """The counters that all calls of functions from one `def` share.

    Keyed by source, not by object: a fresh lambda a call must not grow memory.
    """
    key = source_of(fn)
    with _lock:
        found = _counters.get(key)
        if found is None:
            found = _counters[key] = Counters()
        return found


def all_counters() -> dict[str, Counters]:
    with _lock:
        return dict(_counters)
