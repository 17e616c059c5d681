"""Settings of the process, as opposed to arguments of a call.

The environment sets them at import; `hc.configure` changes some of them later.
"""

from __future__ import annotations

import os

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
# as many (_runtime/tap_failures.py).
KEPT_TAP_ERRORS = 16

# Threads in the pool that runs vmap_method="parallel" if there is no `executor=`.
POOL_WORKERS = int(
    os.environ.get("HOSTCALL_WORKERS", max(8, (os.cpu_count() or 1) + 4))
)

_residuals = int(os.environ.get("HOSTCALL_RESIDUALS", "1024"))

_cache_bytes = int(float(os.environ.get("HOSTCALL_CACHE_BYTES", "256e6")))

_pinned_bytes = int(float(os.environ.get("HOSTCALL_PINNED_BYTES", "1e9")))

FLIGHTS = ("sigterm", "signals", "off")
_flight = os.environ.get("HOSTCALL_FLIGHT", "sigterm")

_tap_queue_bytes = int(float(os.environ.get("HOSTCALL_TAP_QUEUE_BYTES", "256e6")))


FAILS = ("together", "alone")
_fail = "alone"


def debug() -> bool:
    """Whether programs that are lowered now check for mistakes that are slow to detect.

    Read at each lowering, so that a test or a notebook can switch it on.
    """
    return os.environ.get("HOSTCALL_DEBUG", "0") not in ("", "0")


def flight() -> str:
    """When the flight recorder is printed (`hc.configure(flight=)`), one of FLIGHTS."""
    return _flight if _flight in FLIGHTS else FLIGHTS[0]


def set_flight(when: str) -> None:
    global _flight
    _flight = when


def residuals() -> int:
    """How many residuals of forward rules the host keeps for their backward rules.

    Older ones are dropped and computed again (_host_function/residuals.py).
    """
    return _residuals


def set_residuals(number: int) -> None:
    global _residuals
    _residuals = number


def cache_bytes() -> int:
    """How many bytes the results in `cache="memory"` may hold, of all functions."""
    return _cache_bytes


def set_cache_bytes(size: int) -> None:
    global _cache_bytes
    _cache_bytes = size


def pinned_bytes() -> int:
    """How many bytes of pinned memory calls on GPUs may hold."""
    return _pinned_bytes


def set_pinned_bytes(size: int) -> None:
    global _pinned_bytes
    _pinned_bytes = size


def tap_queue_bytes() -> int:
    """How many bytes the taps that wait for delivery may hold."""
    return _tap_queue_bytes


def set_tap_queue_bytes(size: int) -> None:
    global _tap_queue_bytes
    _tap_queue_bytes = size


def fail() -> str:
    """Where a call over several processes raises if it fails, one of FAILS."""
    return _fail


def set_fail(how: str) -> None:
    global _fail
    _fail = how
