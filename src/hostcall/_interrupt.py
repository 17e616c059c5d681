"""Ctrl-C while the main thread waits inside JAX for a callback on another thread.

Python raises KeyboardInterrupt on the main thread, between two instructions. While that
thread waits in XLA there is none. If it doesn't move after a Ctrl-C, the interrupt is
raised in the callbacks that run on threads of XLA's: their programs fail, the main
thread comes back, and KeyboardInterrupt comes out. A callback that is itself inside a
blocking C function ends that first.
"""

from __future__ import annotations

import signal
import sys
import threading
import time

from hostcall import _native

# How long the main thread has to move by itself, and how long callbacks are looked for.
_PATIENCE = 0.05
_SEARCH = 2.0


def watch() -> None:
    """Starts watching, where Ctrl-C has Python's usual meaning."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    if _native.watch_interrupts():
        threading.Thread(target=_watch, daemon=True, name="hostcall-ctrl-c").start()


def _watch() -> None:
    while True:
        _native.wait_interrupt()
        _after_interrupt()


def _after_interrupt() -> None:
    before = _where_main_is()
    end = time.monotonic() + _SEARCH
    time.sleep(_PATIENCE)
    while _where_main_is() == before and time.monotonic() < end:
        # A program that waits for space in the queue of taps waits for the one that
        # is being delivered.
        full = _native.tap_queue()["blocked"] > 0
        if _native.interrupt_calls(taps=full):
            return
        time.sleep(_PATIENCE)


def _where_main_is() -> tuple[int, int] | None:
    """Frame and instruction of the main thread.

    One that has acted on the interrupt already, and is blocked in something else now,
    looks the same as one that waits in JAX (which has no frames of its own while its
    C++ fetches a value). Then the callbacks are interrupted too: somebody did ask.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return None if frame is None else (id(frame), frame.f_lasti)
