"""A thread that acts when the main thread can't: on Ctrl-C, on SIGTERM, at the end.

The idea: Python handles signals on the main thread, between two instructions. While
that thread waits inside XLA it executes none. So a signal handler in C also wakes this
thread (native/base/signals.h), which does what the main thread can't.

**Ctrl-C**

  1. The handler sets Python's own flag, and wakes the watcher. A program that has
     installed a handler of its own keeps it: the watcher does nothing then.
  2. The watcher notes at which instruction the main thread is, and waits 50 ms.
  3. If the main thread has moved on, it has raised KeyboardInterrupt. Done.
  4. Else it waits in XLA for a program. The watcher raises KeyboardInterrupt in the
     callbacks that run on XLA's threads, and fails programs that wait for space in the
     queue of taps. It looks for such callbacks for 2 s.
  5. The program fails, XLA returns to the main thread, and KeyboardInterrupt is raised
     there.

A callback that is inside a blocking C function is interrupted when that returns.

**SIGTERM** would end the process at once and lose the queued taps, if it has no
handler. Here the flight recorder is printed and the taps are delivered first, within
HOSTCALL_EXIT_TIMEOUT. Then the signal ends the process. A second SIGTERM ends it at
once.

**The end of the process** (_runtime/lifecycle.py) waits for programs, taps and calls.
Taps and calls that have taken HOSTCALL_EXIT_TIMEOUT since the end began are named in
the log and interrupted. The main thread can't do that itself: it may be inside JAX,
waiting for a program that waits for a tap.

**Programs that JAX drops** may be destroyed on a thread that must not wait for the GIL.
The Python objects that they held are released on this thread.

The thread is a daemon, but it is told to stop and is joined before the interpreter
ends. Python would otherwise end it inside C++ code, which aborts the process.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import signal
import sys
import threading
import time
from types import MethodType

from hostcall import _native
from hostcall._core import config, failures
from hostcall._core.daemon import Service
from hostcall._core.errors import counted
from hostcall._core.wait import SLICE
from hostcall._native import Signal
from hostcall._runtime import delivery, flights, lifecycle
from hostcall._runtime.lifecycle import Phase

logger = logging.getLogger("hostcall")

_SEARCH = 2.0  # seconds to look for callbacks that a Ctrl-C interrupts


def start() -> None:
    """Starts the thread, once, for SIGINT and, if it has the default action, SIGTERM.

    A signal handler may come here between any two steps, or end them.
    """
    _service.start()
    flights.apply()
    _watch_interrupt()
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _native.watch_sigterm()


def watch_the_end() -> None:
    """From now on, names and interrupts a tap that hangs; a call, too, once the engine
    is closed and waits for it.
    """
    _native.post_signal(Signal.ENDING)


def stop() -> None:
    """Ends the thread. A signal that comes later wakes nobody, and does no harm."""
    _native.post_signal(Signal.STOP)
    _service.join()


def _watch() -> None:
    """The thread: does what each event asks for, until STOP."""
    end: _Ending | None = None
    while True:
        # An event wakes it. At the end of the process it looks at the clock, too.
        events = _native.wait_signal(3600.0 if end is None else SLICE)
        if events & Signal.INTERRUPT:
            events |= _after_interrupt()
        if events & Signal.UNWATCHED:
            _watch_interrupt()
        if events & Signal.STOP:
            return
        if events & Signal.BURY:
            _native.bury()
        if events & Signal.TERMINATE:
            _after_terminate()
        if events & Signal.ENDING:
            end = _Ending()
        if end is not None:
            end.look()


_service = Service("hostcall-watcher", _watch, "the engine")

lifecycle.at_end(Phase.SCRIPT, watch_the_end)
lifecycle.at_end(Phase.WATCHER, stop)


# --- Ctrl-C --------------------------------------------------------------------------


def _watch_interrupt() -> None:
    """Puts the engine's handler before Python's, if Python handles SIGINT."""
    if callable(signal.getsignal(signal.SIGINT)):
        _native.watch_sigint()


def _raises() -> bool:
    """Whether Ctrl-C raises KeyboardInterrupt on the main thread.

    Python's handler does, and so does asyncio.run's, which cancels the main task first.
    """
    handler = signal.getsignal(signal.SIGINT)
    if type(handler) is not functools.partial or type(handler.func) is not MethodType:
        return handler is signal.default_int_handler
    asyncio = sys.modules.get("asyncio")  # whoever runs it has imported it
    return asyncio is not None and type(handler.func.__self__) is asyncio.Runner


def _after_interrupt() -> Signal:
    """Handles a Ctrl-C; returns the other events that came meanwhile."""
    if not _raises():  # the program has a handler of its own, which decides
        return Signal(0)
    position = _where_main_is()
    until = time.monotonic() + _SEARCH
    events = _native.wait_signal(SLICE)
    while _where_main_is() == position and time.monotonic() < until:
        if events & Signal.STOP:
            break
        # If a program waits for space in the queue, the tap that is being delivered
        # blocks it, so that tap is interrupted too.
        # A program that is between two waits at this moment is met at the next look.
        is_full = _interrupt_pushes()
        if _native.interrupt_calls(taps=is_full) or is_full:
            break
        events |= _native.wait_signal(SLICE)
    return events & ~Signal.INTERRUPT


def _interrupt_pushes() -> bool:
    """Fails programs that wait for space in the queue of taps, if there are any."""
    if _native.tap_queue()["blocked"] == 0:
        return False
    text = failures.numbered(
        KeyboardInterrupt(),
        "KeyboardInterrupt: while a program waited for space in the queue of taps",
    )
    return _native.interrupt_pushes(text)


def _where_main_is() -> tuple[int, int] | None:
    """The main thread's frame and instruction.

    A main thread that has handled the interrupt and is now blocked in something else
    looks the same as one that waits in JAX, whose C++ shows no Python frames while it
    fetches a value. Callbacks are then interrupted too, which the user did ask for.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return None if frame is None else (id(frame), frame.f_lasti)


# --- SIGTERM -------------------------------------------------------------------------


def _after_terminate() -> None:
    """Delivers the taps, then sends SIGTERM again. Its action is the default one by
    now, so it ends the process.
    """
    if not delivery.flush(config.EXIT_TIMEOUT):
        logger.warning(
            "SIGTERM ends the process. Not delivered within %g s, and lost: %s",
            config.EXIT_TIMEOUT,
            counted(_native.tap_queue()["pending"], "tap"),
        )
    delivery.flush_streams()
    os.kill(os.getpid(), signal.SIGTERM)


# --- The end -------------------------------------------------------------------------


class _Ending:
    """Names and interrupts what has taken EXIT_TIMEOUT since the end began."""

    def __init__(self) -> None:
        self._patience = config.EXIT_TIMEOUT
        self._next_tap = time.monotonic() + self._patience
        self._next_call = math.inf

    def look(self) -> None:
        now = time.monotonic()
        worker = delivery.worker.thread
        # While the engine is open, calls may take their time: the programs that make
        # them are waited for.
        if _native.closed() and self._next_call == math.inf:
            self._next_call = now + self._patience
        running_calls = []
        for hooks, thread, age, _ in _native.active():
            if worker is None or thread != worker.ident:
                running_calls.append(f"{hooks.name} ({age:.0f} s)")
            elif age >= self._patience and now >= self._next_tap:
                # Interrupt before logging, which takes time: the worker could have gone
                # on to the next tap. The next interrupt leaves this one time to clean
                # up.
                _native.interrupt_calls(calls=False, taps=True)
                logger.warning(
                    "the process is ending and waits for the tap `%s`, which has taken"
                    " %.0f s and is interrupted now (Ctrl-C ends the process at once)",
                    hooks.name,
                    age,
                )
                self._next_tap = now + self._patience
        if now < self._next_call:
            return
        self._next_call = now + self._patience
        if running_calls:
            logger.warning(
                "the process is ending and waits for these callbacks, which are"
                " interrupted now (Ctrl-C ends the process at once): %s",
                ", ".join(running_calls),
            )
            flights.log(flights.ENDING)
            _native.interrupt_calls()
