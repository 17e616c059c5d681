"""Waiting for programs and taps."""

from __future__ import annotations

import contextlib
import threading
import time

import jax

from hostcall import _jax, _native
from hostcall._core import failures
from hostcall._runtime import delivery, tap_failures


def barrier(timeout: float | None = None, *, programs: bool = True) -> bool:
    """Waits for JAX, then for all taps, and raises what taps have raised meanwhile.

    It waits for the effects that this thread has dispatched, for every array that is
    alive, and for the queue. Ctrl-C ends the wait, and loses no tap and no error.

    Args:
        timeout: seconds, or None for no limit.
        programs: False waits only for the taps that are queued now, and raises nothing:
            programs go on, and what taps raised stays for the next barrier.

    Returns:
        Whether everything ended in time. If not, nothing is raised, and nothing is
        lost: the next barrier waits for the rest. `hc.monitor.status()` shows what is
        under way, `hc.monitor.discard_taps()` drops what is queued.

    Raises:
        BaseException: what a tap raised, the object itself; of several an
            ExceptionGroup, which has the first of them and says how many there were.
        jax.errors.JaxRuntimeError: a program whose callback failed, before that; what
            taps raised then stays for the next barrier.
        HostcallError: called from inside a tap.
    """
    delivery.refuse_inside_a_tap("hc.barrier()")
    if not programs:
        return delivery.flush(timeout, "hc.barrier()")
    end = None if timeout is None else time.monotonic() + timeout
    if timeout is not None and not _programs_end_in(timeout):
        return False
    failed = delivery.reports  # kept where Ctrl-C or the limit ends the wait
    failed += failures.failures_of_effects()
    for error in failures.failures_of_arrays():
        # Its reader will see it too; only what hostcall knows is told here.
        if failures.number_in(error):
            failed.append(error)
    left = None if end is None else max(0.0, end - time.monotonic())
    if not delivery.flush(left, "hc.barrier()"):
        return False
    if failed:  # what taps raised stays for the next barrier
        first = failed[0]
        failed.clear()
        failures.tell(failures.number_in(first))
        raise first
    raised = tap_failures.take_as_one()
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
        with failures.looking():
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
    They count as dropped in `hc.monitor.tap_queue()` and `hc.monitor.stats()`. Cost:
    microseconds and 0.1 us a tap.
    """
    _native.discard_taps()
