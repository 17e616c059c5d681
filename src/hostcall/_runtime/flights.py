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
    _native.tell_at_sigterm(config.settings.flight != "off")
    _native.watch_fatal_signals(config.settings.flight == "signals")


class Hang:
    """A reason why something hangs.

    Attributes:
        pause: seconds. A program whose calls all fail would otherwise log a table for
            each.
        logged: when the recorder was logged for this reason.
    """

    pause = 10.0

    def __init__(self, why: str) -> None:
        self._why, self.logged = why, -self.pause

    def log(self) -> None:
        """Logs the newest calls and taps, but not again within `pause`."""
        now = time.monotonic()
        if config.settings.flight != "off" and now - self.logged >= self.pause:
            self.logged = now
            text = _native.flight_text(self._why).decode(errors="replace")
            logger.warning("%s", text.rstrip())


LATE = Hang("a call takes longer than its timeout")
DEADLOCK = Hang("a callback would deadlock")
ENDING = Hang("a callback holds up the end of the process")
