"""The counters of calls and their costs, one set for each function definition."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hostcall._core.source import source_of
from hostcall._native import Counters

_counters: dict[str, Counters] = {}
_lock = threading.Lock()


def counters_of(fn: Callable[..., Any]) -> Counters:
    """The counters that all functions made by one `def` share.

    The key is the place in the source, not the function object: a program that makes a
    new lambda for each call must not use more and more memory.
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
