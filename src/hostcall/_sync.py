"""What is under way, and what it has cost."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any

import jax

from hostcall import (
    _config,
    _delivery,
    _errors,
    _jax,
    _native,
    _tap_failures,
    _workers,
)
from hostcall._callback import all_counters
from hostcall._errors import SpecError


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
    """The queue of taps (`hc.tap_queue()`), over the life of the process.

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


def flush(timeout: float | None = None) -> bool:
    """Waits until the taps that are queued now have been delivered.

    Does not wait for programs that are still running: `hc.barrier` does.

    Args:
        timeout: seconds, or None for no limit.

    Returns:
        Whether all were delivered in time. What they raised stays for `hc.barrier`.

    Raises:
        HostcallError: called from inside a tap.
    """
    return _delivery.flush(timeout, "hc.flush()")


def barrier(timeout: float | None = None) -> bool:
    """Waits for JAX, then for all taps, and raises what taps have raised meanwhile.

    It waits for the effects that this thread has dispatched, for every array that is
    alive, and for the queue. Ctrl-C ends the wait, and loses no tap and no error.

    Args:
        timeout: seconds, or None for no limit.

    Returns:
        Whether everything ended in time. If not, nothing is raised, and nothing is
        lost: the next barrier waits for the rest. `hc.status()` shows what is under
        way, `hc.discard_taps()` drops what is queued.

    Raises:
        BaseException: what a tap raised, the object itself; of several an
            ExceptionGroup, which has the first of them and says how many there were.
        jax.errors.JaxRuntimeError: a program whose callback failed, before that; what
            taps raised then stays for the next barrier.
        HostcallError: called from inside a tap.
    """
    _delivery.refuse_inside_a_tap("hc.barrier()")
    end = None if timeout is None else time.monotonic() + timeout
    if timeout is not None and not _programs_end_in(timeout):
        return False
    failures = _delivery.reports  # kept where Ctrl-C or the limit ends the wait
    failures += _errors.failures_of_effects()
    for error in _errors.failures_of_arrays():
        # Its reader will see it too; only what hostcall knows is told here.
        if _errors.number_in(error):
            failures.append(error)
    left = None if end is None else max(0.0, end - time.monotonic())
    if not _delivery.flush(left, "hc.barrier()"):
        return False
    if failures:  # what taps raised stays for the next barrier
        first = failures[0]
        failures.clear()
        _errors.tell(_errors.number_in(first))
        raise first
    raised = _tap_failures.take_as_one()
    try:
        if raised is not None:
            raise raised
    finally:  # a cycle through this frame would keep what the exception holds
        del raised
    return True


def _programs_end_in(seconds: float) -> bool:
    """Whether what this thread has dispatched, and every live array, is ready in time.

    Tokens can't be asked whether they are, only waited for: by a thread, which waits
    on if this one does not.
    """
    waiting = [*_jax.tokens(), *jax.live_arrays()]

    def wait() -> None:
        with _errors.looking():
            for thing in waiting:
                with contextlib.suppress(BaseException):  # its own reader is told
                    thing.block_until_ready()

    thread = threading.Thread(target=wait, daemon=True, name="hostcall-barrier")
    thread.start()
    thread.join(max(seconds, 0.0))
    return not thread.is_alive()


def discard_taps() -> None:
    """Drops the taps that are queued, but for one that is being delivered.

    For a program that was interrupted, and a queue that would take minutes to deliver.
    They count as dropped in `hc.tap_queue()` and `hc.stats()`. Cost: microseconds and
    0.1 us a tap.
    """
    _native.discard_taps()


def configure(
    *,
    tap_queue_bytes: int | None = None,
    pinned_bytes: int | None = None,
    residuals: int | None = None,
) -> None:
    """Changes settings of the process.

    Args:
        tap_queue_bytes: how much taps may hold before they are delivered. Default
            256e6, or the environment variable HOSTCALL_TAP_QUEUE_BYTES. One value above
            it goes through alone. On GPUs as much again of pinned memory.
        pinned_bytes: how much pinned memory calls on GPUs may hold. Default 1e9, or
            the environment variable HOSTCALL_PINNED_BYTES.
        residuals: how many Python objects that forward rules of `defvjp` left may wait
            for their backward rules. For those that had to go, the forward rule runs
            again; the log says so once for each function. 0: none are kept. Default
            1024, or the environment variable HOSTCALL_RESIDUALS. Fewer than before: the
            oldest go when the next one comes.

    Raises:
        SpecError: for what is no such number. Then nothing is changed.
    """
    if residuals is not None and not _is_count(residuals):
        raise SpecError(
            "hostcall: residuals should be a number of objects, 0 or more, got"
            f" {residuals!r}"
        )
    if pinned_bytes is not None:
        pinned_bytes = _bytes(pinned_bytes, "pinned_bytes")
    if tap_queue_bytes is not None:
        size = _bytes(tap_queue_bytes, "tap_queue_bytes")
        _config.set_tap_queue_bytes(size)
        if not _native.forked():
            _native.set_tap_limit(size)
    if pinned_bytes is not None:
        _config.set_pinned_bytes(pinned_bytes)
    if residuals is not None:
        _config.set_residuals(residuals)
    if not _native.forked():
        _native.limit_pinned(_config.pinned_bytes(), _config.tap_queue_bytes())


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _bytes(value: Any, name: str) -> int:
    size = int(value)
    if isinstance(value, bool) or size <= 0 or size != value:
        raise SpecError(
            f"hostcall: {name} should be a number of bytes above 0, got {value!r}"
        )
    return size


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
