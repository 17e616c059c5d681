"""`hc.barrier` and `hc.monitor.discard_taps`: wait for taps, or drop them."""

from __future__ import annotations

import contextlib
import time

import jax

from hostcall import _jax, _native
from hostcall._core import dispatched, failures, mistakes
from hostcall._core.daemon import limited
from hostcall._core.wait import SLICE, until_result, wait
from hostcall._engine.counters import costs
from hostcall._runtime import delivery, workers


def barrier(timeout: float | None = None, *, programs: bool = True) -> bool:
    """Waits for programs and taps to finish, and raises what taps have raised.

    The barrier waits for the effects that this thread has dispatched, for every live
    array, and for the tap queue. On the main thread it also waits for the programs of
    threads that have ended. A program that has no effect (`hc.tap_through`) is waited
    for as long as its results are alive. Ctrl-C interrupts the wait without losing a
    tap or an error. Inside a host function it waits for taps only, since the program
    that made the call can't end meanwhile, and raises what taps raised. In a forked
    child there is no program to wait for.

    Args:
        timeout: the limit in seconds; None for no limit.
        programs: False waits only for the taps that are queued now, also of a GPU that
            has reached all its taps, and raises nothing: programs keep running, and the
            next barrier raises what taps raised.

    Returns:
        True if everything finished in time. If not, nothing is raised or lost, and the
        next barrier waits for the rest. A program whose results were deleted or donated
        before it ended is waited for only without a limit. `hc.monitor.status()` shows
        what is running; `hc.monitor.discard_taps()` empties the queue.

    Raises:
        BaseException: the exception object that a tap raised. If several taps failed,
            an ExceptionGroup of the first exceptions; its message gives the total.
        jax.errors.JaxRuntimeError: the callback of a program failed, or `WatchError` if
            a watch did. This error comes first: the next barriers raise those of other
            programs, one each, and then what taps raised. A failure that was raised
            before, here or where a result was read, is passed over. So is one of a
            program that another thread has dispatched, whose own wait raises it, unless
            that thread has ended and this is the main thread.
        HostcallError: the barrier was called from inside a tap.

    Cost: the wait itself, and one look at each live array.
    """
    delivery.refuse_inside_a_tap("hc.barrier()")
    mistakes.warn_if_traced(
        "hc.barrier() is called",
        "It waits only for what was before this program. Call it after the program",
    )
    start = _native.ticks()
    error: BaseException | None = None
    try:
        if not programs:
            return delivery.flush(timeout, reached_only=True)
        end = None if timeout is None else time.monotonic() + timeout
        failed = dispatched.reports()  # outlives a wait that Ctrl-C or the limit ends
        # The results of the program that made the call are among the live arrays, and
        # can't be waited for here.
        in_call = workers.in_call()
        if not in_call and not _native.forked():
            if timeout is not None and not _programs_end_in(timeout):
                return False
            failed += dispatched.failures_of_all(limited=timeout is not None)
        # Behind the programs, which have queued their last taps by now.
        seconds_left = None if end is None else max(0.0, end - time.monotonic())
        # A GPU may need what the program does after this call to reach its taps.
        if not delivery.flush(seconds_left, reached_only=in_call):
            return False
        delivery.call_at_barrier(ending=False)
        # What the thread dispatched before the program of a call is not the call's.
        if not in_call:
            error = _first(failed) or dispatched.first_unreported()
        # Only without a program's error: what is taken here would be lost otherwise.
        if error is None:
            error = delivery.take()
        if error is not None:
            raise error
        return True
    finally:
        error = None  # breaks the cycle error -> traceback -> this frame -> error
        costs.waited_in_barrier(start)


def _first(failed: list[BaseException]) -> BaseException | None:
    """Takes the first failure that nobody has heard of. Those behind it stay.

    Others are passed over: a printed traceback may keep failed arrays in its frames,
    for long.
    """
    while failed:
        error = failed.pop(0)
        number = failures.number_in(error)
        if not (number and failures.is_surely_reported(number)):
            failures.mark_reported(number)
            return failures.replacement(number) or error
    return None


def _programs_end_in(seconds: float) -> bool:
    """Whether this thread's effects and all live arrays are ready in time.

    The tokens of unordered effects can be waited for, but not polled. So a thread waits
    for everything, and keeps waiting after this function has given up.
    """
    waiting = [*dispatched.signs(), *_jax.tokens(), *jax.live_arrays()]

    def wait_for_all() -> None:
        with failures.not_reporting():
            for array in waiting:
                with contextlib.suppress(BaseException):  # its reader sees the error
                    array.block_until_ready()

    everything = limited.submit(wait_for_all)
    # A thread takes a moment, also without anything to wait for.
    return wait(until_result(everything), max(seconds, SLICE))


def discard_taps() -> None:
    """Drops all queued taps, except one that is being delivered.

    Use it after interrupting a program, if delivering the queue would take minutes.
    `hc.monitor.tap_queue()` and `hc.monitor.stats()` count the taps as dropped.

    Cost: some microseconds, and 0.1 us for each tap.
    """
    _native.discard_taps()
