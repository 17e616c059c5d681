"""Numbers of things in messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """The number with its noun: "1 tap", "3 taps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
