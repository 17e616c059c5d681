"""One thread that acts where the main thread can't: Ctrl-C, SIGTERM, the end.

**Ctrl-C.** Python raises KeyboardInterrupt on the main thread, between two
instructions. While that thread waits in XLA there is none. If it does not move after a
Ctrl-C, the interrupt is raised in the callbacks that run on XLA's threads, and in the
programs that wait for space in the queue of taps: they fail, the main thread comes
back, and KeyboardInterrupt comes out. A callback that is itself inside a blocking C
function ends that first.

**SIGTERM**, if nobody has given it a handler, ends a process at once, and what taps
have queued is lost. Here the taps are delivered first, within HOSTCALL_EXIT_TIMEOUT;
then the signal does what it does. A second one does it at once.

**The end of the process** (`_lifecycle`) waits for programs, taps and calls. One that
has taken HOSTCALL_EXIT_TIMEOUT since the end began is named and interrupted. The main
thread can't do that: it may be inside JAX, waiting for a program that waits for a tap.

**Programs that were dropped** may die on a thread that must not wait for the GIL. What
they held is let go here.

The thread is a daemon, told to stop and joined before the interpreter ends: a thread
that Python finds inside C++ then takes the process down.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time

from hostcall import _native
from hostcall._core import config, failures
from hostcall._runtime import delivery

logger = logging.getLogger("hostcall")

# native/base/signals.h
_INTERRUPT, _TERMINATE, _ENDING, _STOP, _BURY = 1, 2, 4, 8, 16

# How long the main thread has to move by itself, and how long callbacks are looked for.
_PATIENCE = 0.05
_SEARCH = 2.0

_thread: threading.Thread | None = None
_calls_too = threading.Event()


def start() -> None:
    """Starts the thread, and watches the signals that have their usual meaning."""
    global _thread
    _thread = threading.Thread(target=_watch, daemon=True, name="hostcall-watcher")
    _thread.start()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _native.watch_sigint()
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _native.watch_sigterm()


def watch_the_end() -> None:
    """From here on a tap that hangs is named, and interrupted."""
    _native.post_signal(_ENDING)


def watch_calls_too() -> None:
    """From here on calls as well: the engine takes no more, and waits for these."""
    _calls_too.set()


def stop() -> None:
    """Ends the thread. A handler may still wake it; nobody waits any more."""
    if _thread is None:
        return
    _native.post_signal(_STOP)
    _thread.join()


def after_fork() -> None:
    """In a forked child there is no such thread."""
    global _thread
    _thread = None


def _watch() -> None:
    end: _End | None = None
    while True:
        events = _native.wait_signal(3600.0 if end is None else _PATIENCE)
        if events & _INTERRUPT:
            events |= _after_interrupt()
        if events & _STOP:
            return
        if events & _BURY:
            _native.bury()
        if events & _TERMINATE:
            _after_terminate()
        if events & _ENDING:
            end = _End()
        if end is not None:
            end.look()


# --- Ctrl-C --------------------------------------------------------------------------


def _after_interrupt() -> int:
    """Gives the events that came meanwhile."""
    before = _where_main_is()
    until = time.monotonic() + _SEARCH
    events = _native.wait_signal(_PATIENCE)
    while _where_main_is() == before and time.monotonic() < until:
        if events & _STOP:
            break
        # A program that waits for space in the queue waits for the tap that is being
        # delivered, and for those before it.
        full = _native.tap_queue()["blocked"] > 0
        if full:
            _native.interrupt_pushes(_text_of_interrupt())
        if _native.interrupt_calls(taps=full) or full:
            break
        events |= _native.wait_signal(_PATIENCE)
    return events & ~_INTERRUPT


def _text_of_interrupt() -> str:
    number = failures.keep(KeyboardInterrupt())
    return (
        "KeyboardInterrupt: while a program waited for space in the queue of taps"
        f" [hostcall error {number}]"
    )


def _where_main_is() -> tuple[int, int] | None:
    """Frame and instruction of the main thread.

    One that has acted on the interrupt already, and is blocked in something else now,
    looks the same as one that waits in JAX (which has no frames of its own while its
    C++ fetches a value). Then the callbacks are interrupted too: somebody did ask.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return None if frame is None else (id(frame), frame.f_lasti)


# --- SIGTERM -------------------------------------------------------------------------


def _after_terminate() -> None:
    """The action of the signal is the default again: it ends the process."""
    if not delivery.flush(config.EXIT_TIMEOUT, "SIGTERM"):
        logger.warning(
            "SIGTERM ends the process, and %d taps are lost: what is being delivered"
            " has taken %g s",
            delivery.pending(),
            config.EXIT_TIMEOUT,
        )
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os.kill(os.getpid(), signal.SIGTERM)


# --- The end -------------------------------------------------------------------------


class _End:
    """Names and interrupts what has taken EXIT_TIMEOUT since the end began."""

    def __init__(self) -> None:
        self._patience = config.EXIT_TIMEOUT
        self._next_tap = time.monotonic() + self._patience
        self._next_call: float | None = None

    def look(self) -> None:
        now = time.monotonic()
        if now >= self._next_tap:
            self._tap(now)
        if self._next_call is None and _calls_too.is_set():
            self._next_call = now + self._patience
        if self._next_call is not None and now >= self._next_call:
            self._next_call = now + self._patience
            self._calls()

    def _tap(self, now: float) -> None:
        for info, thread, age, _ in _native.active():
            if not delivery.is_worker(thread) or age < self._patience:
                continue
            # At once, or the next tap is hit. Then it has time to clean up.
            _native.interrupt_taps()
            self._next_tap = now + self._patience
            logger.warning(
                "the process wants to end, and waits for the tap `%s`, which has"
                " taken %.0f s and is interrupted (Ctrl-C ends all at once)",
                info.name,
                age,
            )
            return

    def _calls(self) -> None:
        stuck = [
            f"{info.name} ({age:.0f} s)"
            for info, thread, age, _ in _native.active()
            if not delivery.is_worker(thread)
        ]
        if not stuck:
            return
        logger.warning(
            "the process wants to end, and waits for these callbacks, which are"
            " interrupted (Ctrl-C ends it at once): %s",
            ", ".join(stuck),
        )
        _native.interrupt_calls()
