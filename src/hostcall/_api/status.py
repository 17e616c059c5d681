"""What is under way, and what it has cost."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from typing import Any

from hostcall import _native
from hostcall._engine.counters import all_counters
from hostcall._runtime import workers


@dataclass(frozen=True)
class ActiveCall:
    """A call under way, as `hc.monitor.status()` saw it.

    Attributes:
        name: its tag, or the function's name.
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
    """What calls of one function have cost, over all programs (`hc.monitor.stats()`).

    Attributes:
        calls: times the function was entered.
        masked: rows, and taps, that `where` kept from it.
        dropped: taps that found the queue full.
        skipped: taps that `every=` or `sample=` left out.
        errors: programs (or eager calls) that it failed, or taps that failed.
        bytes_in: handed to it.
        bytes_out: taken from it.
        python_seconds: in the function and in conversions, waiting for nobody.
        gil_seconds: waiting to enter Python.
    """

    calls: int
    masked: int
    dropped: int
    skipped: int
    errors: int
    bytes_in: int
    bytes_out: int
    python_seconds: float
    gil_seconds: float


def status() -> list[ActiveCall]:
    """The calls, and the tap, under way, oldest first, with what each is doing.

    For a program that hangs: call it from another thread, or from a signal handler.
    Cost: none until asked; nothing is recorded but a pointer a call.
    """
    frames = sys._current_frames()
    calls = []
    for info, thread, seconds, row in _native.active():
        thread = workers.delegates.get(thread, thread)
        frame = frames.get(thread)
        stack = "".join(traceback.format_stack(frame)) if frame else ""
        name = info.callback.tag or info.name
        calls.append(ActiveCall(name, info.place, seconds, row or (), thread, stack))
    return sorted(calls, key=lambda call: -call.seconds)


def stats() -> dict[str, CallStats]:
    """What calls have cost so far, by `tag=` or by function (name and source line).

    Calls with one tag, and closures over one `def`, count together. Cost: two readings
    of the clock a call.
    """
    return {
        name: CallStats(
            c.calls,
            c.masked,
            c.dropped,
            c.skipped,
            c.errors,
            c.bytes_in,
            c.bytes_out,
            c.python_seconds,
            c.gil_seconds,
        )
        for name, c in all_counters().items()
    }


# --- Taps ----------------------------------------------------------------------------


@dataclass(frozen=True)
class TapQueue:
    """The queue of taps (`hc.monitor.tap_queue()`), over the life of the process.

    Attributes:
        pushed: taps that devices have queued.
        delivered: of those, taps whose function has run.
        dropped: taps that found the queue full, those dropped for newer ones included.
        nbytes: held by what is queued and being delivered.
        limit: of `nbytes`.
        blocked: devices that wait for space at this moment.
    """

    pushed: int
    delivered: int
    dropped: int
    nbytes: int
    limit: int
    blocked: int


def tap_queue() -> TapQueue:
    """What the queue of taps holds, and what became of the rest. Cost: microseconds."""
    state = _native.tap_queue()
    return TapQueue(
        state["pushed"],
        state["delivered"],
        state["dropped"],
        state["bytes"],
        state["limit"],
        state["blocked"],
    )


# --- Pinned memory -------------------------------------------------------------------


@dataclass(frozen=True)
class PinnedMemory:
    """A pool of pinned memory, through which values go to and from GPUs.

    Attributes:
        limit: bytes that it may have.
        allocated, in_use, peak: bytes now, of those in calls or taps, the most so far.
        pending: bytes that copies to a GPU are still reading.
        allocations, reuses: blocks taken from the driver, and given out again.
        waits: calls or taps that found it full.
        overruns: of those, how many went over the limit after a second in which
            nothing came back.
    """

    limit: int
    allocated: int
    in_use: int
    pending: int
    peak: int
    allocations: int
    reuses: int
    waits: int
    overruns: int


def pinned_memory() -> dict[str, PinnedMemory]:
    """The pools of "calls" and "taps", where GPUs have used them."""
    pools = zip(("calls", "taps"), _native.pinned_pools(), strict=True)
    return {name: PinnedMemory(**state) for name, state in pools if state is not None}
