"""The worker thread that delivers taps, waiting for it, and what taps have raised.

The queue and the worker's loop are native (native/queue/tap_queue.h and
native/invoke/taps.h). Python makes the thread, so that it has a name in
debuggers, `hc.monitor.status()` and tracebacks.

A tap that fails does not stop its program, and so may fail a million times. The first
three failures of each tap are logged in full. After that, one line a second says how
many more there were, with the newest one; the end of each wait for taps logs such a
line too. The next barrier raises a few of the exceptions, one of those that are equal,
and says how many there were.

Guarantees
  * The log, or a barrier, names each failure or counts it, also at the end.
  * A barrier raises the first KEPT_TAP_ERRORS failures that differ, and the first one
    of each further tap, up to four times as many. It holds these exceptions itself: the
    ledger (_core/failures.py) may release its own before.
  * What two barriers raise has nothing in common.

The worker adds failures while other threads log counts or take the exceptions: `lock`
keeps a tap's counts and the exceptions in step. Logging, which may run the user's
code, is done outside it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hostcall import _native
from hostcall._core import config, errors, failures
from hostcall._core.daemon import Service
from hostcall._core.errors import HostcallError, counted
from hostcall._core.process import PerProcess, starting
from hostcall._core.source import inspect_callable, name_of
from hostcall._core.wait import wait
from hostcall._runtime import lifecycle, workers
from hostcall._runtime.lifecycle import Phase

logger = logging.getLogger("hostcall")


class _Taps(PerProcess):
    """
    Attributes:
        at_barrier: called at each barrier, by a forked child too.
        collectors: see tagged taps as they are delivered (hc.testing.collect). A list
            is changed and copied in single steps, with the GIL and without: no lock.
        lock: protects the rest. It is reentrant, since a handler of a signal may wait
            for taps while this thread holds it.
        tallies: by the names of the tap's function and its place, not by its tag: no
            more than lines that tap.
        unreported: the exceptions that the next barrier raises, by the number of the
            failure.
    """

    at_barrier: ClassVar[list[Callable[[bool], object]]] = []
    collectors: ClassVar[list[Callable[[str, Any, Any], object]]] = []

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.tallies: dict[tuple[str, Any], _Count] = {}
        self.unreported: dict[int, BaseException] = {}
        super().__init__()


state = _Taps()

# --- The worker -----------------------------------------------------------------------

worker = Service("hostcall-taps", _native.run_tap_worker, "a tap")


def start() -> None:
    """Starts the worker, once. Does nothing in a forked child, which takes no taps, and
    after the end, where the thread that taps delivers.
    """
    if worker.thread is not None or _native.closed():
        return
    with starting.lock:
        _native.set_tap_limit(config.settings.tap_queue_bytes)
        try:
            worker.start()
        except HostcallError:
            # Python starts no thread any more. Without a worker, the thread that taps
            # delivers.
            _native.stop_taps()


def refuse_inside_a_tap(face: str) -> None:
    if _native.on_tap_worker() or workers.in_tap.get():
        raise HostcallError(
            f"hostcall: {face} inside a tap would wait for the tap itself. Call it"
            " where the program is called",
            code="hc-deadlock",
        )


def flush(timeout: float | None = None, *, reached_only: bool = False) -> bool:
    """Waits until all taps are delivered that programs have sent so far.

    Not inside a tap: see `refuse_inside_a_tap`.

    Args:
        timeout: the limit in seconds, after which this returns False.
        reached_only: does not wait for the taps of a GPU that has not reached all of
            them: it may need what the caller does next. A call that has waited for its
            GPU finds the taps before it reached.
    """
    if worker.thread is None:
        return True  # no tap was ever lowered, so none can be queued
    mark: int | None = None

    def delivered(seconds: float) -> bool:
        nonlocal mark
        if mark is None:
            # The mark is set once all have been put there: only those before it count,
            # so a program that taps for ever does not hold up this wait.
            if not _native.await_taps_of_gpus(seconds, reached_only):
                return False
            mark = _native.tap_mark()
        return _native.flush_taps(mark, seconds)

    if not wait(delivered, timeout):
        return False
    _log_counts()
    return True


def stop() -> None:
    """Delivers the queued taps and ends the worker. Nobody may push taps any more."""
    _native.stop_taps()
    worker.join()
    count = _log_counts()
    if take() is not None:
        logger.error(
            "%s failed, and no barrier() raised that (see the log above)",
            counted(count, "tap"),
        )


def flush_streams() -> None:
    """Writes what stdout and stderr hold, before an end that would lose it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, broken, or not a stream
            stream.flush()


# --- What is called at a barrier ------------------------------------------------------


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
    for fn in state.at_barrier.copy():  # one may add another
        try:
            fn(ending)
        except KeyboardInterrupt:  # it ends the barrier, or the process
            raise
        except BaseException as error:
            # SystemExit and the like end the thread that waits, but not the end of the
            # process, which has more to do.
            if not (ending or isinstance(error, Exception)):
                raise
            failed(name_of(fn), inspect_callable(fn).place, error, ())


# --- Failures -------------------------------------------------------------------------

IN_FULL = 3
SECONDS = 1.0  # between two lines for one tap

clock = time.monotonic  # tests replace it


@dataclass
class _Count:
    """The failures of one tap since the last barrier that raised.

    Attributes:
        name, place: the tap's.
        count: how many there were.
        logged: how many of them the log mentions.
        until: the earliest time of the next line in the log.
        newest: the newest failure, as a text.
        kept_texts: of those that are kept for the barrier.
    """

    name: str
    place: Any
    count: int = 0
    logged: int = 0
    until: float = 0.0
    newest: str = ""
    kept_texts: set[str] = field(default_factory=set)

    def log(self) -> None:
        """Logs how many there were since the last line."""
        with state.lock:
            count = self.count
            unlogged = count - self.logged
            self.logged = count
            self.until = clock() + SECONDS
        if unlogged:
            logger.error(
                "tap `%s`, written at %s, failed %s (%d in all). Last error: %s",
                self.name,
                self.place,
                counted(unlogged, "more time"),
                count,
                self.newest,
            )


def failed(name: str, place: Any, error: BaseException, row: tuple[int, ...]) -> None:
    """Logs the exception of a tap, and keeps it for the next barrier."""
    number = failures.store(error)
    text = errors.without_code(failures.summary(error))[:500]
    with state.lock:
        tally = state.tallies.setdefault((name, place), _Count(name, place))
        tally.count += 1
        count = tally.count
        # The first failure of a tap, or a KeyboardInterrupt, is kept even if other taps
        # have filled the list.
        has_priority = count == 1 or not issubclass(type(error), Exception)
        limit = config.KEPT_TAP_ERRORS * (4 if has_priority else 1)
        if text not in tally.kept_texts and len(state.unreported) < limit:
            state.unreported[number] = error
            tally.kept_texts.add(text)
        tally.newest = text
        if count <= IN_FULL:
            tally.logged = count
            tally.until = clock() + SECONDS
    # Outside of the lock, since a handler of the log may be the user's code.
    with failures.beside_a_failure("logging it"):
        if count <= IN_FULL:
            in_row = f", row {row[0] if len(row) == 1 else row}" if row else ""
            last = ""
            if count == IN_FULL:
                last = " (its further failures are only counted here)"
            logger.error(
                "tap `%s`%s, written at %s, failed; the program goes on%s",
                name,
                in_row,
                place,
                last,
                exc_info=error,
            )
        elif clock() >= tally.until:
            tally.log()


def _log_counts() -> int:
    """Logs the failures that have only been counted so far; returns how many taps have
    failed.
    """
    tallies = list(state.tallies.values())
    for tally in tallies:
        tally.log()
    return sum(tally.count for tally in tallies)


def take() -> BaseException | None:
    """What taps have raised since the last call: the object, or a group of some."""
    with state.lock:  # a handler of a signal may take the errors in between
        tallies = state.tallies
        state.tallies = {}
        unreported = state.unreported
        state.unreported = {}
    if not unreported:
        return None
    for number, error in unreported.items():
        failures.mark_reported(number)
        failures.hand_over(error)  # the user gets the object, whose frames must stay
    raised = list(unreported.values())
    # A signal handler on the thread that adds a failure may take its count before: the
    # lock is reentrant. Then the exceptions count themselves.
    count = max(len(raised), sum(tally.count for tally in tallies.values()))
    if count == 1:
        return raised[0]
    text = f"{counted(count, 'tap')} failed"
    if count > len(raised):
        text += (
            f"; the errors here are different ones ({len(raised)}), and the log counts"
            " the rest"
        )
    return BaseExceptionGroup(text, raised)


def _call_at_the_end() -> None:
    call_at_barrier(ending=True)


lifecycle.at_end(Phase.TAPS, flush)
lifecycle.at_end(Phase.CLOSING, _call_at_the_end)
lifecycle.at_end(Phase.LAST_TAPS, stop)
lifecycle.at_ctrl_c(flush_streams)
