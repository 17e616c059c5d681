"""`hc.monitor.feeds()`: where feeds are, and who waited for whom."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hostcall._runtime.feeds import pullers


@dataclass(frozen=True)
class FeedStats:
    """One feed, as `hc.monitor.feeds()` found it.

    Attributes:
        name: the feed's tag, or the name of its source.
        state: "pulling" (the source is asked for an item), "full" (as many items are
            pulled ahead as `prefetch` allows), "ended", "failed" or "closed".
        epoch: the epoch of the last item that a program took.
        item: how many items of that epoch programs have taken.
        taken: items that programs have taken, over all epochs.
        ready: items that are pulled ahead now.
        device_waits: how often a device waited for an item.
        device_seconds: how long these waits took. Large: the source is too slow.
        source_waits: how often the source waited for a free place.
        source_seconds: how long these waits took. Large: the program is slower than
            the source, and nothing is wrong.
        pulling_seconds: how long the source has been at the item that it gives now.
    """

    name: str
    state: str
    epoch: int
    item: int
    taken: int
    ready: int
    device_waits: int
    device_seconds: float
    source_waits: int
    source_seconds: float
    pulling_seconds: float


def feeds() -> list[FeedStats]:
    """The feeds that are alive. Cost: microseconds for each."""
    found = []
    for puller in pullers():
        counts, position = puller.ring.counts(), puller.position()
        since = puller.since
        found.append(
            FeedStats(
                name=puller.name,
                state=puller.state(),
                epoch=position["epoch"],
                item=position["item"],
                taken=counts["total"],
                ready=counts["put"] - counts["taken"],
                device_waits=counts["waits"],
                device_seconds=counts["wait_seconds"],
                source_waits=counts["stalls"],
                source_seconds=counts["stall_seconds"],
                pulling_seconds=0.0 if since is None else time.monotonic() - since,
            )
        )
    return sorted(found, key=lambda feed: feed.name)
