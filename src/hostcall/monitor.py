"""`hostcall.monitor`: what is running, what it has cost, and what is queued.

    status         the running calls and the running tap, with their threads' stacks
    stats          what calls and taps have cost, by tag or function
    tap_queue      how full the queue of taps is, and how many taps it has handled
    pinned_memory  the pinned memory for copies to and from GPUs
    discard_taps   drops the queued taps

`status` returns an `ActiveCall` for each call, `stats` a `CallStats` for each tag or
function, `tap_queue` a `TapQueue`, and `pinned_memory` a `PinnedMemory` for each pool.
None of them starts a thread or a program.
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
