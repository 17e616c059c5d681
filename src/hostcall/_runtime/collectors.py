"""The collectors that see tagged taps as they are delivered (hc.testing.collect)."""

from __future__ import annotations

import threading
from typing import Any, Protocol


class Collector(Protocol):
    def take(self, tag: str, args: Any, kwargs: Any) -> None: ...


_lock = threading.Lock()
_active: tuple[Collector, ...] = ()


def add(collector: Collector) -> None:
    global _active
    with _lock:
        _active = (*_active, collector)


def remove(collector: Collector) -> None:
    global _active
    with _lock:
        _active = tuple(c for c in _active if c is not collector)


def shown(tag: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """(args, kwargs), which the active collectors have seen.

    Reads `_active` without the lock: `add` and `remove` replace the tuple.
    """
    for collector in _active:
        collector.take(tag, args, kwargs)
    return args, kwargs
