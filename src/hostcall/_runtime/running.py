"""What this process is doing now: its running calls, and its threads' stacks."""

from __future__ import annotations

import sys
import traceback
from typing import Any, NamedTuple

from hostcall import _native
from hostcall._core.source import Place
from hostcall._runtime import workers


class Running(NamedTuple):
    """A running call, as plain values that can be sent to another process."""

    name: str
    place: Place
    seconds: float
    row: tuple[int, ...]
    thread: int
    stack: str


def running() -> list[Running]:
    """The running calls and the running tap, oldest first."""
    frames = sys._current_frames()
    calls = []
    for info, thread, seconds, row in _native.active():
        (thread,) = workers.delegates.get(thread) or [thread]
        name = info.callback.tag or info.name
        calls.append(
            Running(
                name, info.place, seconds, row or (), thread, _stack(frames, thread)
            )
        )
    return sorted(calls, key=lambda call: -call.seconds)


def stack_of(thread: int) -> str:
    """The stack of a thread, by its `threading.get_ident()`."""
    return _stack(sys._current_frames(), thread)


def _stack(frames: dict[int, Any], thread: int) -> str:
    frame = frames.get(thread)
    return "".join(traceback.format_stack(frame)) if frame else ""
