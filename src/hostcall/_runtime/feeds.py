"""What programs hold of feeds, and the end of all feeds with the process.

The threads are in feed_puller.py, which says who holds whom.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from typing import ClassVar

from hostcall._core import config
from hostcall._core.errors import FeedError
from hostcall._core.host_code import HostCode
from hostcall._core.process import living
from hostcall._core.wait import wait
from hostcall._native import FeedFound
from hostcall._runtime import workers
from hostcall._runtime.feed_puller import FORKED, Puller

# The reasons why a feed gives nothing any more. Each completes "the feed `x` ...".
CLOSED = "was closed. Make another hc.feed, or close it later"
INTERRUPTED = "was closed by Ctrl-C. Make another hc.feed"
ENDING = "was closed, since the process is ending"

# Seconds that close() and the end of the process wait for a source that blocks.
PATIENCE = 1.0


class Stream(HostCode):
    """What programs hold of a feed; calling it waits for an item.

    Equal only to itself, so each feed traces to programs of its own.

    Attributes:
        ending_since: when the end of the process began.
    """

    ending_since: ClassVar[float] = math.inf

    def __init__(
        self, puller: Puller, sizes: list[int], timeout: float | None, source: str
    ) -> None:
        self.puller, self.ring, self.timeout = puller, puller.ring, timeout
        self.sizes = sizes  # bytes of each leaf of an item, or of its block
        self.__qualname__ = puller.name
        self._source = source

    def source(self) -> str:
        return self._source

    def __call__(self, lane: int) -> None:
        """Returns when the lane may find an item. Called by the engine."""
        began, waiting = time.monotonic(), threading.get_ident()

        def item(seconds: float) -> bool:
            found = self.ring.wait(lane, seconds)
            if found is FeedFound.STOPPED:
                self.puller.why_stopped()
            return found is not FeedFound.NOTHING

        def look() -> None:
            since = max(began, Stream.ending_since)
            if time.monotonic() - since > config.EXIT_TIMEOUT:
                seconds = time.monotonic() - began
                self._late(f"{seconds:.0f} s, and the process is ending")

        # hc.monitor.status() shows where the source is.
        workers.delegates[waiting] = [self.puller.thread]
        try:
            if not wait(item, self.timeout, look):
                self._late(f"timeout={self.timeout:g} s")
                wait(item)
        except KeyboardInterrupt:
            self.puller.close(INTERRUPTED)
            raise
        finally:
            workers.delegates.pop(waiting, None)

    def _late(self, limit: str) -> None:
        frame = sys._current_frames().get(self.puller.thread)
        where = "its thread has ended"
        if frame is not None:
            last = traceback.extract_stack(frame)[-1]
            where = f"it is at {last.filename}:{last.lineno} in {last.name}"
        why = (
            f"gave no item for {limit}; {where}. If it only is slow, raise timeout=, or"
            " prefetch= if it comes in bursts"
        )
        if self.ring.lanes > 1:
            # All devices must fail, and before the same item: one that went on would
            # wait for the others in a collective. The next look finds the feed closed.
            self.puller.close(f"was closed, since its source {why}")
            return
        raise FeedError(f"hostcall: the source of the feed `{self.puller.name}` {why}")

    def __del__(self) -> None:
        self.puller.close(CLOSED)


def pullers() -> list[Puller]:
    """The feeds of this process that can be looked at."""
    return [p for p in living(Puller) if p.ring is not None and p.closed != FORKED]


def process_ends() -> None:
    """From now on, no program waits longer than EXIT_TIMEOUT for an item."""
    Stream.ending_since = time.monotonic()


def end_all() -> None:
    """Ends the threads of all feeds. No program can take items any more."""
    for puller in (mine := living(Puller)):
        puller.close(ENDING)
    until = time.monotonic() + PATIENCE
    for puller in mine:  # a thread of the parent of this process has ended
        puller.close(ENDING, max(0.01, until - time.monotonic()))
