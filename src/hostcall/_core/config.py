"""Settings of the process, as opposed to arguments of a call.

The environment sets them at import; `hc.configure` changes some of them later.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


def _whole(variable: str, default: str | int) -> int:
    return int(float(os.environ.get(variable, default)))


# Seconds to wait at exit for running calls before interrupting them.
EXIT_TIMEOUT = float(os.environ.get("HOSTCALL_EXIT_TIMEOUT", "10"))

# How many of the newest exceptions that callbacks raised are kept for `reraise`, and
# how many of the last seconds: a thread of a busy server may not run for some time
# slices, while each of the others fails hundreds of times. Only the newest exception
# has values in its frames, but any may have some in its `args` or attributes.
KEPT_ERRORS = 32
MOST_KEPT_ERRORS = 1024
KEPT_SECONDS = 60.0

# How many exceptions that taps raised are kept for the next `barrier`. The first
# exception of each further tap that fails is kept beyond this number, up to four times
# as many (_runtime/delivery.py).
KEPT_TAP_ERRORS = 16

# Threads in the pool that runs vmap_method="parallel" if there is no `executor=`.
POOL_WORKERS = _whole("HOSTCALL_WORKERS", max(8, (os.cpu_count() or 1) + 4))

FLIGHTS = ("sigterm", "signals", "off")
FAILS = ("together", "alone")


@dataclass
class Settings:
    """What `hc.configure` changes.

    Attributes:
        residuals: how many residuals of forward rules the host keeps for their backward
            rules. Older ones are dropped and computed again
            (_host_function/residuals.py).
        pinned_bytes: how many bytes of pinned memory calls on GPUs may hold.
        tap_queue_bytes: how many the taps that wait for delivery may hold.
        flight: when the flight recorder is printed, one of FLIGHTS.
        fail: where a call over several processes raises if it fails, one of FAILS.
        loop: the user's event loop for coroutine functions; None for hostcall's own.
    """

    residuals: int = _whole("HOSTCALL_RESIDUALS", "1024")
    pinned_bytes: int = _whole("HOSTCALL_PINNED_BYTES", "1e9")
    tap_queue_bytes: int = _whole("HOSTCALL_TAP_QUEUE_BYTES", "256e6")
    flight: str = os.environ.get("HOSTCALL_FLIGHT", FLIGHTS[0])
    fail: str = "alone"
    loop: Any = None

    def __post_init__(self) -> None:
        if self.flight not in FLIGHTS:
            self.flight = FLIGHTS[0]

    def change(self, changes: Mapping[str, Any]) -> None:
        """Sets these fields to values that were checked."""
        for name, value in changes.items():
            setattr(self, name, value)


settings = Settings()


def debug() -> bool:
    """Whether programs that are lowered now check for mistakes that are slow to detect.

    Read at each lowering, so that a test or a notebook can switch it on.
    """
    return os.environ.get("HOSTCALL_DEBUG", "0") not in ("", "0")
