"""Prints the flight recorder when something hangs.

The recorder itself is native (native/base/flight.h). At SIGTERM and at fatal signals
the signal handler prints it, since Python can't run then.
"""

from __future__ import annotations

import logging
import time

from hostcall import _native
from hostcall._core import config

logger = logging.getLogger("hostcall")


def apply() -> None:
    """Puts `hc.configure(flight=)` into effect. In a forked child nothing changes."""
    if _native.forked():
        return
    _native.write_flight_at_sigterm(config.settings.flight != "off")
    _native.watch_fatal_signals(config.settings.flight == "signals")


LATE = "a call takes longer than its timeout"
DEADLOCK = "a callback would deadlock"
ENDING = "a callback holds up the end of the process"

# Seconds between two tables of one reason: a program whose calls all fail would
# otherwise log a table for each.
PAUSE = 10.0

logged: dict[str, float] = {}  # when, by the reason


def log(why: str) -> None:
    """Logs the newest calls and taps, but not again within `PAUSE` for one reason."""
    now = time.monotonic()
    if config.settings.flight != "off" and now - logged.get(why, -PAUSE) >= PAUSE:
        logged[why] = now
        text = _native.flight_text(why).decode(errors="replace")
        logger.warning("%s", text.rstrip())
