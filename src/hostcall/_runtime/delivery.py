"""The worker thread that delivers taps, and waiting for it.

The queue and the worker's loop are native (native/queue/tap_queue.h and
native/invoke/taps.h). Python makes the thread, so that it has a name in
debuggers, `hc.monitor.status()` and tracebacks.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any, ClassVar

from hostcall import _native
from hostcall._core import config, daemon
from hostcall._core.errors import HostcallError, counted
from hostcall._core.process import Owned, starting
from hostcall._core.source import look
from hostcall._core.wait import over, wait
from hostcall._runtime import tap_failures, workers

logger = logging.getLogger("hostcall")


class _Taps(Owned):
    """
    Attributes:
        at_barrier: called at each barrier, by a forked child too.
        collectors: see tagged taps as they are delivered (hc.testing.collect). A list
            is changed and copied in single steps, with the GIL and without: no lock.
        thread: the worker. It is set once, so a look at it needs no lock.
        reports: failures of programs, for the barrier to raise.
    """

    at_barrier: ClassVar[list[Callable[[bool], object]]] = []
    collectors: ClassVar[list[Callable[[str, Any, Any], object]]] = []

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.reports: list[BaseException] = []
        super().__init__()


state = _Taps()


def start() -> None:
    """Starts the worker, once. Does nothing in a forked child, which takes no taps, and
    after the end, where the thread that taps delivers.
    """
    if state.thread is not None or _native.closed():
        return
    with starting.lock:
        _native.set_tap_limit(config.settings.tap_queue_bytes)
        try:
            daemon.start_of(state, "hostcall-taps", _native.run_tap_worker, "a tap")
        except HostcallError:
            # Without a worker, the thread that taps delivers.
            _native.stop_taps()


def at_barrier(fn: Callable[[bool], object]) -> None:
    """Calls `fn(ending)` at each `hc.barrier()`, and at the end of the process.

    For tools that have to know when programs are over. `fn` is called on the thread
    that waits, after its programs have ended and their taps have been delivered. A
    barrier with programs=False does not call it.

    Args:
        fn: called with True at the end of the process, else with False. What it raises
            is logged and raised like the error of a tap. There is no way to remove it.
    """
    state.at_barrier.append(fn)


def call_at_barrier(*, ending: bool) -> None:
    """Calls what `at_barrier` has been given."""
    if _native.forked():  # a child may not tap
        return
    for fn in list(state.at_barrier):
        try:
            fn(ending)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if not (ending or isinstance(error, Exception)):
                raise
            seen = look(fn)
            tap_failures.failed(seen.name, seen.place, error, ())


def refuse_inside_a_tap(who: str) -> None:
    if _native.on_tap_worker() or workers.in_tap.get():
        raise HostcallError(
            f"hostcall: {who} inside a tap would wait for the tap itself. Call it where"
            " the program is called",
            code="hc-deadlock",
        )


def flush(timeout: float | None = None, *, queued_only: bool = False) -> bool:
    """Waits until all taps are delivered that programs have sent so far.

    Not inside a tap: see `refuse_inside_a_tap`.

    Args:
        timeout: the limit in seconds, after which this returns False.
        queued_only: does not wait for taps that a GPU has been given, but has not put
            into the queue yet: it may not have reached them.
    """
    if state.thread is None:
        return True  # no tap was ever lowered, so none can be queued
    mark = _native.tap_mark() if queued_only else None

    def delivered(seconds: float) -> bool:
        nonlocal mark
        if mark is None:
            if not _native.await_taps_of_gpus(seconds):
                return False
            mark = _native.tap_mark()
        return _native.flush_taps(mark, seconds)

    if not wait(delivered, timeout):
        return False
    tap_failures.tell_counts()
    return True


def is_worker(thread: int) -> bool:
    """Whether this is the identifier of the worker."""
    return state.thread is not None and state.thread.ident == thread


def stop() -> None:
    """Delivers the queued taps and ends the worker. Nobody may push taps any more."""
    _native.stop_taps()
    if state.thread is None:
        return
    wait(over(state.thread))
    tap_failures.tell_counts()
    errors, more = tap_failures.take()
    if errors:
        logger.error(
            "%s failed, and no barrier() raised that (see the log above)",
            counted(len(errors) + more, "tap"),
        )


def flush_streams() -> None:
    """Writes what stdout and stderr hold, before an end that would lose it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, broken, or not a stream
            stream.flush()
