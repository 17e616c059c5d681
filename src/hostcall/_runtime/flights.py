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

# Seconds. A program whose calls all fail would otherwise log a table for each.
_PAUSE = 10.0

_told: dict[str, float] = {}


def apply() -> None:
    """Puts `hc.configure(flight=)` into effect. In a forked child nothing changes."""
    if _native.forked():
        return
    _native.tell_at_sigterm(config.settings.flight != "off")
    _native.watch_fatal_signals(config.settings.flight == "signals")


def tell(why: str) -> None:
    """Logs the newest calls and taps, at most once in 10 s for each reason."""
    now = time.monotonic()
    if config.settings.flight == "off" or now - _told.get(why, -_PAUSE) < _PAUSE:
        return
    _told[why] = now
    text = _native.flight_text(why).decode(errors="replace")
    logger.warning("%s", text.rstrip())
