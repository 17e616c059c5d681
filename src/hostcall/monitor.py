"""`hostcall.monitor`: what is running, what it has cost, and what waits.

    status         the calls and the tap that run now, each with its thread's stack
    stats          what calls and taps have cost, by function
    tap_queue      what waits to be delivered, and what became of the rest
    pinned_memory  what values on their way to and from GPUs hold
    discard_taps   drops the taps that are queued

They return an `ActiveCall` for each call, a `CallStats` for each function, a
`TapQueue`, and a `PinnedMemory` for each pool. Reading them starts nothing.
"""

from hostcall._api.barrier import discard_taps
from hostcall._api.status import (
    ActiveCall,
    CallStats,
    PinnedMemory,
    TapQueue,
    pinned_memory,
    stats,
    status,
    tap_queue,
)

__all__ = [
    "ActiveCall",
    "CallStats",
    "PinnedMemory",
    "TapQueue",
    "discard_taps",
    "pinned_memory",
    "stats",
    "status",
    "tap_queue",
]
