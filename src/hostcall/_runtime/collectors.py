"""The collectors that see tagged taps as they are delivered (hc.testing.collect)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from hostcall._core.spec import Template


class Collector(Protocol):
    def take(self, tag: str, args: Any, kwargs: Any) -> None: ...


class _Collectors:
    def __init__(self) -> None:
        # A list is changed and copied in single steps, with the GIL and without it: no
        # lock.
        self.active: list[Collector] = []

    def seen_by(
        self, tag: str, template: Template, whole: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Wraps `whole` so that the active collectors see its arguments first."""

        def call(*leaves: Any) -> None:
            for collector in self.active.copy():
                collector.take(tag, *template.fill(leaves))
            whole(*leaves)

        return call


collectors = _Collectors()
