"""What is under way, and what it has cost."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from typing import Any

from hostcall import _native, _workers
from hostcall._callback import all_counters


@dataclass(frozen=True)
class ActiveCall:
    """A call under way, as `hc.status()` saw it.

    Attributes:
        name: the function's.
        place: the user's line that wrote the call.
        seconds: since it was entered.
        row: its place in the batch, or ().
        thread: `threading.get_ident()` of the thread that runs it.
        stack: what that thread is doing, as `traceback.format_stack` writes it.
    """

    name: str
    place: Any
    seconds: float
    row: tuple[int, ...]
    thread: int
    stack: str

    def __str__(self) -> str:
        row = f" row {self.row}" if self.row else ""
        return (
            f"{self.name}{row}, for {self.seconds:.3f} s, called at {self.place}\n"
            f"{self.stack}"
        )


@dataclass(frozen=True)
class CallStats:
    """What calls of one function have cost, over all programs (`hc.stats()`).

    Attributes:
        calls: times the function was entered.
        masked: rows that `where` kept from it.
        errors: programs (or eager calls) that it failed.
        bytes_in: handed to it.
        bytes_out: taken from it.
        python_seconds: in the function and in conversions, waiting for nobody.
        gil_seconds: waiting to enter Python.
    """

    calls: int
    masked: int
    errors: int
    bytes_in: int
    bytes_out: int
    python_seconds: float
    gil_seconds: float


def status() -> list[ActiveCall]:
    """The calls under way, oldest first, with what each is doing.

    For a program that hangs: call it from another thread, or from a signal handler.
    Cost: none until asked; nothing is recorded but a pointer a call.
    """
    frames = sys._current_frames()
    calls = []
    for info, thread, seconds, row in _native.active():
        thread = _workers.delegates.get(thread, thread)
        frame = frames.get(thread)
        stack = "".join(traceback.format_stack(frame)) if frame else ""
        calls.append(
            ActiveCall(info.name, info.place, seconds, row or (), thread, stack)
        )
    return sorted(calls, key=lambda call: -call.seconds)


def stats() -> dict[str, CallStats]:
    """What calls have cost so far, by function: name and source line.

    Closures over one `def` count together. Cost: two readings of the clock a call.
    """
    return {
        name: CallStats(
            c.calls,
            c.masked,
            c.errors,
            c.bytes_in,
            c.bytes_out,
            c.python_ns * 1e-9,
            c.gil_wait_ns * 1e-9,
        )
        for name, c in all_counters().items()
    }
