"""How tests make the driver hostile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MODES: dict[str, Callable[[Any], None]] = {
    "calm": lambda driver: None,
    "slow": lambda driver: driver.fakeSetDelayMicroseconds(300),
    "reordered": lambda driver: driver.fakeSetReordered(1),
    "pinned_waits": lambda driver: driver.fakeSetPinnedWaits(1),
}
