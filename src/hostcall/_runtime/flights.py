"""Prints the flight recorder when something hangs.

The recorder itself is native (native/base/flight.h). At SIGTERM and at fatal signals
the signal handler prints it, since Python can't run then.
"""

from __future__ import annotations

import logging
import math
import time

from hostcall import _native
from hostcall._core import config

logger = logging.getLogger("hostcall")


def apply() -> None:
    """Puts `hc.configure(flight=)` into effect. In a forked child nothing changes."""
    if _native.forked():  # its engine is closed: the handlers stay as the parent's
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
    if config.settings.flight == "off":
        return
    now = time.monotonic()
    if now - logged.get(why, -math.inf) < PAUSE:
        return
    logged[why] = now
    # A tag may have been cut in the middle of a character: lines have a limit.
    text = _native.flight_text(why).decode(errors="replace")
    logger.warning("%s", text.rstrip())
