"""Positions of feeds: saved, restored, and as monitors see them."""

from __future__ import annotations

import json
import pickle
import threading

import jax
import numpy as np
import pytest

import hostcall as hc
from hostcall.errors import FeedError, SpecError


def take(feed, n):
    run = jax.jit(lambda: jax.lax.scan(lambda c, _: (c, feed()[0]), 0, length=n)[1])
    return run().tolist()


class Shuffled:
    """An iterator with a state, as grain's have."""

    def __init__(self, seed=0):
        self.rng, self.given = np.random.default_rng(seed), 0

    def __iter__(self):
        return self

    def __next__(self):
        self.given += 1
        return np.float32(self.rng.random())

    def get_state(self):
        return {"rng": self.rng.bit_generator.state, "given": self.given}

    def set_state(self, state):
        self.rng.bit_generator.state = state["rng"]
        self.given = state["given"]


class Loader:
    """A loader whose state is its own, as torchdata's."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        while self.next < 50:
            self.next += 1
            yield np.int32(self.next - 1)
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class LateState:
    """A data set of Hugging Face's: its state is the last epoch's, or none, until this
    one has given an item.
    """

    state = start = None

    def __iter__(self):
        first, self.start = self.start or 0, None
        for i in range(first, 3):
            self.state = i + 1
            yield np.int32(i)

    def state_dict(self):
        assert self.state is not None
        return self.state

    def load_state_dict(self, state):
        self.start = state


def numbers(epoch):
    return iter(np.arange(10, dtype=np.int32) + 100 * epoch)


SOURCES = {
    "a function": lambda: numbers,
    "a list": lambda: [np.int32(i) for i in range(20)],
    "an iterator": lambda: iter(np.arange(40, dtype=np.int32)),
    "an iterator with a state": Shuffled,
    "a loader with a state": Loader,
}


@pytest.mark.parametrize("store", [json, pickle])
@pytest.mark.parametrize("name", SOURCES)
def test_a_state_is_that_of_the_last_item_taken(name, store):
    on_end = "repeat" if name == "a function" else "mask"
    with hc.feed(SOURCES[name](), on_end=on_end, prefetch=3) as feed:
        take(feed, 3)
        saved = store.dumps(feed.state())
        want = take(feed, 12)
    with hc.feed(SOURCES[name](), on_end=on_end, prefetch=3) as feed:
        feed.restore(store.loads(saved))
        assert feed.state() == store.loads(saved)
        assert take(feed, 12) == want


def test_an_iterator_is_skipped_forwards_only():
    with hc.feed(iter(np.arange(40, dtype=np.int32)), prefetch=4, tag="it") as feed:
        feed.restore({"epoch": 0, "item": 2})  # among those pulled ahead
        assert take(feed, 2) == [2, 3]
        feed.restore({"epoch": 0, "item": 20})
        assert feed.state() == {"epoch": 0, "item": 20}
        assert take(feed, 1) == [20]
        with pytest.raises(FeedError) as found:
            feed.restore({"epoch": 0, "item": 5})
        assert str(found.value) == (
            "hostcall: the source of the feed `it` is an iterator, which can be"
            " iterated only once: restore() can't go back to item 5. Give a function"
            " that returns a new iterator, hc.feed(lambda: make_iterator())"
            "\n[hc-feed] python -m hostcall explain hc-feed"
        )
        assert take(feed, 1) == [21]
        with pytest.raises(FeedError, match=r"reset\(\) can't start it again"):
            feed.reset()


def test_the_start_of_an_epoch_needs_no_state():
    """A source's own may be that of the epoch before, or raise."""
    with hc.feed(LateState(), np.int32(0)) as feed:
        assert take(feed, 3) == [0, 1, 2]
        feed.reset()
        assert feed.state() == {"epoch": 1, "item": 0}
        feed.restore(feed.state())
        assert take(feed, 3) == [0, 1, 2]
        assert feed.state() == {"epoch": 1, "item": 3, "source": 3}


def test_states_that_do_not_fit():
    with hc.feed([np.int32(1)], tag="one") as feed:
        with pytest.raises(SpecError, match=r"wants what state\(\) returned"):
            feed.restore({"step": 3})
        with pytest.raises(FeedError, match=r"its source gave only 1 item\."):
            feed.restore({"epoch": 0, "item": 3})
        with pytest.raises(FeedError, match="the source can't take one"):
            feed.restore({"epoch": 0, "item": 0, "source": 1})


def test_restore_after_the_end_and_after_a_failure():
    def items():
        yield np.int32(1)
        raise ValueError("bad row")

    with hc.feed(items) as feed:
        take(feed, 1)
        with pytest.raises(ValueError, match="bad row"), hc.reraise():
            take(feed, 1)
        feed.restore({"epoch": 0, "item": 0})
        assert take(feed, 1) == [1]


def test_monitors_see_who_waits():
    go = threading.Event()

    def items():
        yield np.int32(0)
        go.wait()
        yield np.int32(1)

    with hc.feed(items, tag="seen") as feed:
        thread = threading.Thread(target=take, args=(feed, 2))
        thread.start()
        calls: list[hc.monitor.ActiveCall] = []
        while not calls or "in items" not in calls[0].stack:  # where the source is
            calls = hc.monitor.status()
        assert calls[0].name == "seen"
        assert any(
            r.kind == "feed" and r.name == "seen" and r.state != "ended"
            for r in hc.monitor.flight()
        )
        (stats,) = (f for f in hc.monitor.feeds() if f.name == "seen")
        assert (stats.state, stats.taken, stats.ready) == ("pulling", 1, 0)
        assert stats.pulling_seconds > 0
        go.set()
        thread.join()
        (stats,) = (f for f in hc.monitor.feeds() if f.name == "seen")
        assert (stats.epoch, stats.item, stats.taken) == (0, 2, 2)
        assert stats.device_waits >= 1
        assert stats.device_seconds > 0
        calls_of = hc.monitor.stats()  # other tests have functions of this name too
        (calls,) = (
            calls_of[key]
            for key in calls_of
            if key.startswith("seen (") and "test_feed_states" in key
        )
        assert calls.calls == 2
    assert [f.state for f in hc.monitor.feeds() if f.name == "seen"] == ["closed"]


def test_the_flight_recorder_shows_waits():
    go = threading.Event()

    def items():
        go.wait()
        yield np.int32(1)

    spec = jax.ShapeDtypeStruct((), np.int32)
    with hc.feed(items, spec, tag="traced") as feed:
        run = jax.jit(lambda: feed()[0]).lower().compile()
        thread = threading.Thread(target=run)
        thread.start()
        while not hc.monitor.status():
            pass
        go.set()
        thread.join()
    (wait, *_) = (r for r in reversed(hc.monitor.flight()) if r.kind == "feed")
    assert wait.name == "traced"
    assert wait.seconds > 0
