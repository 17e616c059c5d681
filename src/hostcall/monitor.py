"""`hostcall.monitor`: what is running, what it has cost, and what is queued.

    status         the running calls and the running tap, with their threads' stacks,
                   of this process or of all processes of the job
    stats          what calls and taps have cost, by tag or function
    feeds          where feeds are, and who waited for whom, how long
    tap_queue      how full the queue of taps is, and how many taps it has handled
    pinned_memory  the pinned memory for copies to and from GPUs
    discard_taps   drops the queued taps
    report         prints what callbacks have cost, and how to make the worst cheaper
    flight         the last 1,000 calls and taps, which are always recorded
    at_barrier     calls a function at each barrier and at the end of the process

`report` returns `Finding`s, `flight` a `Flight`, which is a list of `FlightRecord`s,
`status` an `ActiveCall` for each call or a `ProcessStatus` for each process, `stats` a
`CallStats` for each tag or function, `feeds` a `FeedStats` for each feed, `tap_queue` a
`TapQueue`, and `pinned_memory` a `PinnedMemory` for each pool. None of them starts a
thread or a program.
"""

from hostcall._api.barrier import discard_taps
from hostcall._api.flight import Flight, FlightRecord, flight
from hostcall._api.report import Finding, report
from hostcall._api.status import (
    CallStats,
    PinnedMemory,
    TapQueue,
    pinned_memory,
    stats,
    status,
    tap_queue,
)
from hostcall._core.gone import of_monitor as __getattr__  # noqa: F401
from hostcall._runtime.delivery import at_barrier
from hostcall._runtime.feeds import FeedStats, feeds
from hostcall._runtime.running import ActiveCall, ProcessStatus

__all__ = [
    "ActiveCall",
    "CallStats",
    "FeedStats",
    "Finding",
    "Flight",
    "FlightRecord",
    "PinnedMemory",
    "ProcessStatus",
    "TapQueue",
    "at_barrier",
    "discard_taps",
    "feeds",
    "flight",
    "pinned_memory",
    "report",
    "stats",
    "status",
    "tap_queue",
]
