"""The checks that options of several public functions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hostcall._core.errors import SpecError


def wrong(option: str, of: str, wanted: str, got: Any, more: str = "") -> SpecError:
    """The error for `option=` of `of`, which should be `wanted`."""
    return SpecError(
        f"hostcall: {option}= of {of} should be {wanted}, got {got!r}{more}",
        code="hc-option",
    )


def conflict(of: str, what: str) -> SpecError:
    """The error for options of `of` that do not go together."""
    return SpecError(f"hostcall: {of} has {what}", code="hc-conflict")


def one_of(option: str, of: str, value: Any, allowed: Sequence[Any]) -> None:
    if value not in allowed:
        raise wrong(option, of, choices(allowed), value)


def choices(allowed: Sequence[Any]) -> str:
    return f"one of {', '.join(map(repr, allowed))}"


def check_count(option: str, of: str, value: Any, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise wrong(option, of, f"{what}, an int of 1 or more", value)


def check_seconds(option: str, of: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or not value > 0:
        raise wrong(option, of, "a number of seconds above 0", value)


def of_all_processes(processes: Any, limit: Any, who: str, alone: str) -> bool:
    """Whether all processes take part; refuses wrong options. `alone` is the remedy."""
    if processes is None:
        return False
    if processes != "all":
        raise wrong("processes", who, "'all'", processes, f". Leave it out for {alone}")
    check_seconds("limit", who, limit)
    return True
