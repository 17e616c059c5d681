"""What this process is doing now: its running calls, and its threads' stacks."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any

from hostcall import _native
from hostcall._core import config
from hostcall._core.errors import counted
from hostcall._core.source import Place
from hostcall._runtime import flights, workers

logger = logging.getLogger("hostcall")


@dataclass(frozen=True)
class ActiveCall:
    """A running call, as `hc.monitor.status()` found it.

    Attributes:
        name: the call's tag, or the function's name.
        place: the user's line that wrote the call.
        seconds: the time since the function was entered.
        row: the index of this row along each batch axis, or ().
        thread: `threading.get_ident()` of the thread that runs the call.
        stack: the stack of that thread, formatted as by `traceback.format_stack`.
    """

    name: str
    place: Place
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
class ProcessStatus:
    """What a process of the job is doing (`hc.monitor.status(processes="all")`).

    Attributes:
        process: its number in the job.
        answered: whether it answered in time. If not, it has ended, is stopped, has not
            run host code in a program over several processes yet, or its C code keeps
            the GIL.
        calls: its running calls and its running tap, oldest first.
        taps: how many taps it has queued.
        main: the stack of its main thread. A frame of JAX's at the end is a wait for a
            program.
        pid: the number that its operating system gives it, or None.
    """

    process: int
    answered: bool
    calls: tuple[ActiveCall, ...] = ()
    taps: int = 0
    main: str = ""
    pid: int | None = None

    def __str__(self) -> str:
        if not self.answered:
            return (
                f"process {self.process} did not answer: it has ended, is stopped, or"
                " has not run host code in a program over several processes yet"
            )
        calls = "\n".join(map(str, self.calls)) or "no call is running"
        return (
            f"process {self.process} (pid {self.pid}),"
            f" {counted(self.taps, 'tap')} queued: {calls}\n"
            f"Its main thread:\n{self.main}"
        )


def running() -> list[ActiveCall]:
    """The running calls and the running tap, oldest first."""
    frames = sys._current_frames()  # a call that begins later has no stack here
    calls = []
    for hooks, thread, seconds, row in _native.active():
        # The thread that runs the function, if the call's own waits for another. A list
        # without one: that has not begun yet.
        (thread,) = workers.delegates.get(thread) or [thread]
        call = ActiveCall(
            name=hooks.callback.shown,
            place=hooks.place,
            seconds=seconds,
            row=row or (),
            thread=thread,
            stack=_stack(frames, thread),
        )
        calls.append(call)
    return sorted(calls, key=lambda call: -call.seconds)


_RUNNING_AT_MOST = 8  # calls that are named


def log(why: str) -> None:
    """Logs the running calls, once for each reason.

    For what a program may use as ordinary control: the whole recorder would hide the
    program's own output.
    """
    if config.settings.flight == "off" or why in flights.logged:
        return
    flights.logged[why] = time.monotonic()  # before the look, which takes a moment
    calls = running()
    lines = [
        f"  {call.name}, for {call.seconds:.3f} s, called at {call.place}"
        for call in calls[:_RUNNING_AT_MOST]
    ]
    if len(calls) > _RUNNING_AT_MOST:
        lines.append(f"  and {len(calls) - _RUNNING_AT_MOST} more")
    text = (
        "%s. Running now:\n%s\nThis is said once. hc.monitor.status() shows the stacks"
        " of running calls, and hc.monitor.flight() the newest calls and taps"
    )
    logger.warning(text, why, "\n".join(lines) or "  no call")


def doing(process: int) -> ProcessStatus:
    """What this process, which has that number in its job, is doing."""
    # Also while it waits in a program: this runs on another thread.
    main_thread = threading.main_thread().ident or 0
    return ProcessStatus(
        process=process,
        answered=True,
        calls=tuple(running()),
        taps=_native.tap_queue()["pending"],
        main=_stack(sys._current_frames(), main_thread),
        pid=os.getpid(),
    )


def _stack(frames: dict[int, Any], thread: int) -> str:
    frame = frames.get(thread)
    if frame is None:  # the thread has ended, or began after the look
        return ""
    return "".join(traceback.format_stack(frame))
