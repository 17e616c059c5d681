"""The collectors that see tagged taps as they are delivered (hc.testing.collect)."""

from __future__ import annotations

from typing import Any, Protocol


class Collector(Protocol):
    def take(self, name: str, args: Any, kwargs: Any) -> None: ...


class _Collectors:
    def __init__(self) -> None:
        # A list is changed and copied in single steps, with the GIL and without it: no
        # lock.
        self.active: list[Collector] = []


collectors = _Collectors()
