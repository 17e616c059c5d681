"""Settings that are not an argument of a call."""

from __future__ import annotations

import os

# At exit, calls under way are waited for so long, in seconds, then interrupted.
EXIT_TIMEOUT = float(os.environ.get("HOSTCALL_EXIT_TIMEOUT", "10"))

# How many of the exceptions that callbacks raised are kept for `reraise`.
KEPT_ERRORS = 32

# How many of the exceptions that taps raised are kept for the next `barrier`: the
# first, and some more where other taps fail too.
KEPT_TAP_ERRORS = 16

# Threads of the pool that serves vmap_method="parallel" without an executor.
POOL_WORKERS = int(
    os.environ.get("HOSTCALL_WORKERS", max(8, (os.cpu_count() or 1) + 4))
)

_residuals = int(os.environ.get("HOSTCALL_RESIDUALS", "1024"))

_pinned_bytes = int(float(os.environ.get("HOSTCALL_PINNED_BYTES", "1e9")))

_tap_queue_bytes = int(float(os.environ.get("HOSTCALL_TAP_QUEUE_BYTES", "256e6")))


def debug() -> bool:
    """Whether programs that are lowered now look for mistakes that cost time to see."""
    return os.environ.get("HOSTCALL_DEBUG", "0") not in ("", "0")


def residuals() -> int:
    """Residuals of forward rules that may wait on the host for their backward rule
    (_host_function/residuals.py). Older ones are computed again.
    """
    return _residuals


def set_residuals(number: int) -> None:
    global _residuals
    _residuals = number


def pinned_bytes() -> int:
    """Pinned memory that calls on GPUs may hold."""
    return _pinned_bytes


def set_pinned_bytes(size: int) -> None:
    global _pinned_bytes
    _pinned_bytes = size


def tap_queue_bytes() -> int:
    """Bytes that taps may hold before they are delivered."""
    return _tap_queue_bytes


def set_tap_queue_bytes(size: int) -> None:
    global _tap_queue_bytes
    _tap_queue_bytes = size
