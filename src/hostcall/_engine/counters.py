"""The counters of calls and their costs, for each tag or function definition."""

from __future__ import annotations

import threading

from hostcall._core.source import source_of
from hostcall._engine.params.call import Callback
from hostcall._native import Counters

_counters: dict[str, Counters] = {}
_lock = threading.Lock()


def counters_of(callback: Callback) -> Counters:
    """The counters of all calls with one tag, or of all functions made by one `def`.

    The key is the place in the source, not the function object: a program that makes a
    new lambda for each call must not use more and more memory.
    """
    key = callback.tag or source_of(callback.function)
    with _lock:
        found = _counters.get(key)
        if found is None:
            found = _counters[key] = Counters()
        return found


def all_counters() -> dict[str, Counters]:
    with _lock:
        return dict(_counters)
