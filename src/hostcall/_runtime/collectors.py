"""The collectors that see tagged taps as they are delivered (hc.testing.collect)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from hostcall._core.spec import Template


class Collector(Protocol):
    def take(self, name: str, args: Any, kwargs: Any) -> None: ...


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


def seen_by(
    name: str | None, template: Template, whole: Callable[..., Any]
) -> Callable[..., Any]:
    """Wraps `whole` so that the active collectors see its arguments first.

    A tap without a tag is seen by none. Reads `_active` without the lock: `add` and
    `remove` replace the tuple.
    """

    if name is None:
        return whole

    def call(*leaves: Any) -> None:
        for collector in _active:
            collector.take(name, *template.fill(leaves))
        whole(*leaves)

    return call
