"""Limits of the tests, and waits within them. A limit only has to catch hangs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import pytest

# The limit for one test on a busy machine. On an idle one, the slowest take 20 s.
HANG_SECONDS = 240
# The limit for programs that tests run.
PROGRAM_SECONDS = 180


def holds_in_time(condition: Callable[[], bool]) -> bool:
    """Whether a condition becomes true while garbage is collected again and again.

    After a program's results are ready, a thread of XLA may hold it for a moment, and
    hostcall's watcher may still be freeing what it held.
    """
    from hostcall import _native  # after platforms.set_up

    limit = time.monotonic() + HANG_SECONDS / 4
    while time.monotonic() < limit:
        gc.collect()
        _native.bury()
        if condition():
            return True
        time.sleep(0.01)  # what it waits for may be in C++, without any event
    return False


def resident_kib() -> int:
    """This process's resident memory. Skips the test if there is no /proc."""
    if not Path("/proc/self/status").exists():
        pytest.skip("this system has no /proc")
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")
