"""Limits of time inside the package that no test can wait for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hostcall._core import wait
from hostcall._runtime import delivery, flights


def log_waits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait, "SLOW", 0.0)


def log_flights_again() -> None:
    """Each reason is logged once in 10 s."""
    flights.logged.clear()


def of_tap_failures(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only the test moves: `clock[0]` is the time."""
    now = [0.0]
    monkeypatch.setattr(delivery, "clock", lambda: now[0])
    return now


def while_tap_failures_are_counted(
    monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]
) -> None:
    """Calls `then()` on each thread that is counting failures of taps."""
    monkeypatch.setattr(delivery, "clock", lambda: then() or 0.0)
