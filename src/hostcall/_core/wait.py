"""Waiting in slices, so that every wait can be interrupted.

Ctrl-C and the end of the process raise KeyboardInterrupt in a thread that runs a call.
Python raises it between two instructions, and a wait for a lock is one instruction,
however long it takes. So no wait of hostcall's is longer than a slice.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any, TypeVar

T = TypeVar("T")

logger = logging.getLogger("hostcall")

SLICE = 0.05  # seconds
SLOW = 5.0  # seconds after which a wait that may have no end is named in the log


# Waits for so many seconds at most, as `threading.Event.wait` does, and says whether
# what is waited for has come.
Done = Callable[[float], object]


def wait(
    done: Done,
    seconds: float | None = None,
    look: Callable[[], object] | None = None,
    slow: Callable[[], str] | None = None,
) -> bool:
    """Waits until `done(slice)` is true; returns False if it isn't after `seconds`.

    Args:
        done: `until_result`, `until_thread_ends` and `until_true` make one.
        seconds: the limit; None for no limit.
        look: called after each slice; raises if `done` can't become true any more.
        slow: what is logged, once, if this takes long; "" for nothing so far.
    """
    began = time.monotonic()
    now = began
    until = math.inf if seconds is None else began + seconds
    # With no seconds at all, `done` is asked once.
    while not done(min(SLICE, max(0.0, until - now))):
        now = time.monotonic()
        if now >= until:
            return False
        if look is not None:
            look()
        if slow is not None and now - began > SLOW and (text := slow()):
            slow = None
            logger.warning("%s", text)
    return True


def until_result(future: futures.Future[Any]) -> Done:
    """For `wait`: whether a future has a value or an error."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    return done.wait


def result_of(future: futures.Future[T]) -> T:
    """The result of one that has ended. `Future.result` would lose an error whose truth
    is False, as that of one which counts what is wrong may be.
    """
    error = future.exception()
    if error is None:
        return future.result()
    try:
        raise error
    finally:
        del error, future  # breaks the cycle error -> this frame -> error


def until_thread_ends(thread: threading.Thread) -> Done:
    """For `wait`: whether a thread has ended."""

    def done(seconds: float) -> bool:
        thread.join(seconds)
        return not thread.is_alive()

    return done


def until_true(look: Callable[[], object], pause: float | None = None) -> Done:
    """For `wait`: whether `look()` is true, which wakes nobody when it becomes so.

    `pause` is the time between two looks, if they are dear. It may be longer than a
    slice on the main thread only, whose sleep Ctrl-C ends.
    """

    def done(seconds: float) -> bool:
        if look():
            return True
        time.sleep(pause or seconds)
        return False

    return done
