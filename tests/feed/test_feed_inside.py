"""A feed whose own thread fails, which no program can bring about."""

from __future__ import annotations

import numpy as np
import pytest

import hostcall as hc
from hostcall.errors import FeedError


def test_a_thread_that_fails_closes_its_feed(monkeypatch, in_time):
    with hc.feed(lambda: iter(np.arange(99, dtype=np.int32)), tag="dead") as feed:
        puller = feed._stream.puller

        def broken():
            raise MemoryError("no memory")

        monkeypatch.setattr(puller, "_step", broken)
        puller.ring.wake()
        assert in_time(lambda: puller.closed)
        with pytest.raises(FeedError) as found:
            feed()
        assert str(found.value) == (
            "hostcall: the feed `dead` was closed, since its thread failed with"
            " MemoryError: no memory. Make another hc.feed"
            "\n[hc-feed] python -m hostcall explain hc-feed"
        )
