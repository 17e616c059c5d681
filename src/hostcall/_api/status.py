"""Which calls are running, what calls have cost, and how full the queue is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, overload

from hostcall import _native
from hostcall._core.mistakes import of_all_processes
from hostcall._engine.counters import costs
from hostcall._runtime.running import ActiveCall, ProcessStatus, running


@dataclass(frozen=True)
class CallStats:
    """The cost of one function's calls, over all programs (`hc.monitor.stats()`).

    Attributes:
        calls: how often the function was entered.
        masked: rows and taps that `where` left out.
        dropped: taps that were dropped because the queue was full.
        skipped: taps that `every=` or `sample=` left out.
        errors: programs and eager calls that the function failed, or taps that failed.
        bytes_in: bytes of the arguments.
        bytes_out: bytes of the results.
        python_seconds: time in the function and in conversions, without waits for the
            GIL or for other devices.
        gil_seconds: time spent waiting for the GIL before the function was entered.
        wait_seconds: time that devices waited with a tap for space in the full queue.
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
    wait_seconds: float


@overload
def status() -> list[ActiveCall]: ...
@overload
def status(*, processes: Literal["all"], limit: float = 5.0) -> list[ProcessStatus]: ...
def status(*, processes: Literal["all"] | None = None, limit: float = 5.0) -> Any:
    """The running calls and the running tap, oldest first, each with its stack.

    If a program hangs, call this function from another thread or from a signal handler.

    Args:
        processes: "all": asks all processes of the job (`jax.distributed`), each of
            which answers on a thread of its own, also while its main thread waits in a
            program. None: this process only.
        limit: seconds to wait for the other processes' answers.

    Returns:
        An `ActiveCall` for each call; with processes="all" a `ProcessStatus` for each
        process, those that do not answer too.

    Raises:
        SpecError: an argument is invalid.
        jax.errors.JaxRuntimeError: the job's service, in the first process, is gone.

    Cost: nothing until it is called, except one stored pointer per call; then the time
    to format the stacks. In a job of several processes a thread looks for questions
    twice a second, so their answers take up to half a second.
    """
    face = "hc.monitor.status"
    if not of_all_processes(processes, limit, face, "this process only"):
        return running()
    # Imported here: a job of one process does without this wing.
    from hostcall._job import job

    return job.ask(limit)


def stats() -> dict[str, CallStats]:
    """What calls and taps have cost so far, keyed by `tag=`.

    Without a tag, the key is the function's name and source line. Calls with one tag
    are counted together, and so are closures made by one `def`.

    Cost: two readings of the clock for each call.
    """
    # A copy: programs that are lowered meanwhile add counters.
    counters = costs.counters.copy()
    return {name: CallStats(**counter.read()) for name, counter in counters.items()}


# --- Taps ----------------------------------------------------------------------------


@dataclass(frozen=True)
class TapQueue:
    """The queue of taps (`hc.monitor.tap_queue()`), over the life of the process.

    Attributes:
        pushed: taps that devices have queued.
        delivered: of those, taps whose function has run.
        dropped: taps that were dropped because the queue was full (the new tap or an
            older one), or by `hc.monitor.discard_taps()`.
        nbytes: bytes of the taps that are queued or being delivered.
        limit: the limit of `nbytes` (`hc.configure(tap_queue_bytes=)`).
        blocked: devices that are waiting for space right now.
    """

    pushed: int
    delivered: int
    dropped: int
    nbytes: int
    limit: int
    blocked: int


def tap_queue() -> TapQueue:
    """What the queue of taps holds, and how many it has handled. Cost: microseconds."""
    state = _native.tap_queue()
    return TapQueue(
        pushed=state["pushed"],
        delivered=state["delivered"],
        dropped=state["dropped"],
        nbytes=state["bytes"],
        limit=state["limit"],
        blocked=state["blocked"],
    )


# --- Pinned memory -------------------------------------------------------------------


@dataclass(frozen=True)
class PinnedMemory:
    """A pool of pinned memory, through which values are copied to and from GPUs.

    Attributes:
        limit: how many bytes the pool may allocate.
        allocated: bytes that it has allocated now.
        in_use: bytes that calls or taps use now.
        pending: bytes that copies to a GPU are still reading.
        peak: the highest `allocated` so far.
        allocations: blocks allocated from the driver.
        reuses: requests served with a recycled block.
        waits: requests that found the pool full and waited.
        overruns: requests that exceeded the limit, after a second in which no block was
            returned.
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
    """The pools of "calls" and "taps", as far as GPUs have used them."""
    calls, taps = _native.pinned_pools()
    pools = {"calls": calls, "taps": taps}
    return {
        name: PinnedMemory(**state)
        for name, state in pools.items()
        if state is not None  # no GPU has used it
    }
