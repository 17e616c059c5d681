"""Feeds: what programs hold of them, and what monitors see.

The idea: only the feed's own thread touches the source (puller.py), and the ring
(native/queue/feed_ring.h) hands the items to the devices. A device enters Python only
if it has waited for 10 ms, or if no item can come: it calls the feed's `Stream`.

Who holds whom, and so what ends a thread: a feed and the programs that use it hold its
`Stream`. The thread holds the `Puller`, never the stream. So a stream that nothing can
use any more is collected, and closes its puller.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import ClassVar

from hostcall._core import config
from hostcall._core.errors import FeedError
from hostcall._core.host_code import HostCode
from hostcall._core.process import living
from hostcall._core.wait import wait
from hostcall._native import FeedFound
from hostcall._runtime import lifecycle, workers
from hostcall._runtime.lifecycle import Phase
from hostcall._runtime.puller import CLOSED, ENDING, FORKED, INTERRUPTED, Puller

# Seconds that close() and the end of the process wait for a source that blocks.
PATIENCE = 1.0


class Stream(HostCode):
    """What programs hold of a feed; calling it waits for an item.

    Equal only to itself, so each feed traces to programs of its own.

    Args:
        puller: the feed's thread, which has begun.
        sizes: bytes of each leaf of an item, or of its block.
        timeout: how many seconds a program waits for an item; None for no limit.
        source: the key of its statistics.

    Attributes:
        ending_since: when the end of the process began.
    """

    ending_since: ClassVar[float] = math.inf

    def __init__(
        self, puller: Puller, sizes: list[int], timeout: float | None, source: str
    ) -> None:
        self.puller = puller
        self.ring = puller.ring
        self.timeout = timeout
        self.sizes = sizes
        self.__qualname__ = puller.name
        self._source = source

    def source(self) -> str:
        return self._source

    def __call__(self, lane: int) -> None:
        """Returns when the lane may find an item. Called by the engine."""
        began = time.monotonic()
        waiting = threading.get_ident()

        def has_item(seconds: float) -> bool:
            answer = self.ring.wait(lane, seconds)
            if answer is FeedFound.STOPPED:
                self.puller.check_open()
                # None: a reset came between the two looks, and the lane looks again.
                error = self.puller.outcome.error
                if error is not None:
                    raise error()
            return answer is not FeedFound.NOTHING

        def refuse_at_the_end() -> None:
            # A program that waits for ever would hold up the end of the process. Before
            # the end began, `ending_since` is infinite, and nothing is refused.
            now = time.monotonic()
            since = max(began, Stream.ending_since)
            if now - since > config.EXIT_TIMEOUT:
                self._late(f"{now - began:.0f} s, and the process is ending")

        # hc.monitor.status() shows where the source is.
        workers.delegates[waiting] = [self.puller.thread]
        try:
            if not wait(has_item, self.timeout, refuse_at_the_end):
                self._late(f"timeout={self.timeout:g} s")
                # With one lane that has raised. With several it has closed the feed,
                # and this look finds it closed.
                wait(has_item)
        except KeyboardInterrupt:
            self.puller.close(INTERRUPTED)
            raise
        finally:
            workers.delegates.pop(waiting, None)

    def _late(self, limit: str) -> None:
        """Ends a wait for an item: says where the source is."""
        frame = sys._current_frames().get(self.puller.thread)
        position = "its thread has ended"
        if frame is not None:
            line = traceback.extract_stack(frame)[-1]
            position = f"it is at {line.filename}:{line.lineno} in {line.name}"
        why = (
            f"gave no item for {limit}; {position}. If it only is slow, raise timeout=,"
            " or prefetch= if it comes in bursts"
        )
        if self.ring.lanes > 1:
            # All devices must fail, and before the same item: one that went on would
            # wait for the others in a collective. The next look finds the feed closed.
            self.puller.close(f"was closed, since its source {why}")
            return
        raise FeedError(f"hostcall: the source of the feed `{self.puller.name}` {why}")

    def __del__(self) -> None:
        self.puller.close(CLOSED)


def process_ends() -> None:
    """From now on, no program waits longer than EXIT_TIMEOUT for an item."""
    Stream.ending_since = time.monotonic()


def end_all() -> None:
    """Ends the threads of all feeds. No program can take items any more."""
    pullers = living(Puller)
    for puller in pullers:
        puller.close(ENDING)
    # All end at the same time, so one limit holds for all.
    until = time.monotonic() + PATIENCE
    for puller in pullers:
        puller.close(ENDING, max(0.01, until - time.monotonic()))


lifecycle.at_end(Phase.SCRIPT, process_ends)
lifecycle.at_end(Phase.FEEDS, end_all)


# --- What monitors see ---------------------------------------------------------------


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
    # Without a ring a feed is still being made, and a parent's feeds are not this
    # process's.
    alive = [p for p in living(Puller) if p.ring is not None and p.closed != FORKED]
    return sorted(map(_stats, alive), key=lambda feed: feed.name)


def _stats(puller: Puller) -> FeedStats:
    counts = puller.ring.counts()
    position = puller.position()
    since = puller.since  # read once: the pull may end meanwhile
    return FeedStats(
        name=puller.name,
        state=puller.shown(),
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
