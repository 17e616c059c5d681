"""Feeds after something went wrong: a restore, a reset, the source, or a wait."""

from __future__ import annotations

import concurrent.futures
import copy
import threading

import numpy as np
import pytest
from limits import HANG_SECONDS

import hostcall as hc
from hostcall.errors import FeedError


class Counter:
    """An iterator with a state, which it goes on changing after it gave it away."""

    def __init__(self):
        self.state = {"i": 0}

    def __iter__(self):
        return self

    def __next__(self):
        self.state["i"] += 1
        return np.int32(self.state["i"] - 1)

    def get_state(self):
        return self.state

    def set_state(self, state):
        state["i"] += 0  # a KeyError if it does not fit
        self.state = state


def take(feed, n):
    return [int(feed()[0]) for _ in range(n)]


@pytest.mark.parametrize("source", [Counter, lambda: Counter()])
def test_a_state_that_the_source_refuses_changes_nothing(source):
    with hc.feed(source) as feed:
        take(feed, 5)
        with pytest.raises(KeyError):
            feed.restore({"epoch": 0, "item": 3, "source": {"j": 1}})
        assert take(feed, 3) == [5, 6, 7]
        assert feed.state() == {"epoch": 0, "item": 8, "source": {"i": 8}}


def test_a_source_that_can_not_be_opened_again_changes_nothing():
    def source(epoch):
        if epoch == 1:
            raise OSError("disk")
        return iter(np.arange(9, dtype=np.int32))

    with hc.feed(source, prefetch=2) as feed:
        take(feed, 1)
        with pytest.raises(OSError, match="disk"):
            feed.reset()
        assert take(feed, 3) == [1, 2, 3]
        assert feed.state() == {"epoch": 0, "item": 4}


@pytest.mark.parametrize("on_end", ["mask", "repeat"])
def test_a_restore_beyond_the_end_fails_programs_until_the_next(on_end):
    items = [np.int32(i) for i in range(3)]
    with hc.feed(items, on_end=on_end, tag="short") as feed:
        take(feed, 1)
        good = feed.state()
        text = (
            "hostcall: the feed `short` can't go on after item 5: its source gave only"
            " 3 items. Is it the source with which the state was saved?"
            "\n[hc-feed] python -m hostcall explain hc-feed"
        )
        with pytest.raises(FeedError) as found:
            feed.restore({"epoch": 0, "item": 5})
        assert str(found.value) == text
        with pytest.raises(FeedError) as found, hc.reraise():
            take(feed, 1)
        assert str(found.value) == text
        feed.restore(good)
        assert take(feed, 2) == [1, 2]


def test_a_reset_starts_the_epoch_after_the_one_that_programs_see():
    pulled_ahead = threading.Event()

    def source(epoch):
        for i in range(3):
            if epoch == 1:
                pulled_ahead.set()
            yield np.int32(100 * epoch + i)

    with hc.feed(source, on_end="repeat", prefetch=5) as feed:
        take(feed, 1)
        assert pulled_ahead.wait(HANG_SECONDS)
        feed.reset()
        assert take(feed, 4) == [100, 101, 102, 200]


def test_an_iterator_that_raised_once_goes_on_after_restore():
    class Flaky:
        i = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.i += 1
            if self.i == 3:
                raise OSError("transient")
            return np.int32(self.i)

    with hc.feed(Flaky()) as feed:
        assert take(feed, 2) == [1, 2]
        with pytest.raises(OSError, match="transient"), hc.reraise():
            take(feed, 1)
        feed.restore(feed.state())
        assert take(feed, 2) == [4, 5]


def test_saved_states_and_the_source_s_own_are_apart():
    with hc.feed(lambda: Counter()) as feed:
        take(feed, 3)
        saved = feed.state()
        kept = copy.deepcopy(saved)
        for _ in range(2):
            feed.restore(saved)
            assert feed.state() == saved == kept
            assert take(feed, 3) == [3, 4, 5]


def test_the_state_before_the_first_item_leads_back_to_it():
    with hc.feed(Counter()) as feed:
        first = feed.state()
        assert first == {"epoch": 0, "item": 0, "source": {"i": 0}}
        take(feed, 3)
        feed.restore(first)
        assert take(feed, 2) == [0, 1]


def test_a_job_that_ends_just_as_its_wait_does(monkeypatch):
    wait = concurrent.futures.Future.result

    def result(future, timeout=None):
        if timeout is None:
            return wait(future)
        wait(future, 60)
        raise TimeoutError

    with hc.feed(lambda: iter(np.arange(3, dtype=np.int32))) as feed:
        monkeypatch.setattr(concurrent.futures.Future, "result", result)
        feed.reset()
        monkeypatch.undo()
        assert take(feed, 2) == [0, 1]


def test_a_timeout_of_the_source_itself_is_what_reset_raises():
    def source(epoch):
        if epoch == 1:
            raise TimeoutError("the store")
        return iter(np.arange(3, dtype=np.int32))

    with hc.feed(source) as feed, pytest.raises(TimeoutError, match="the store"):
        feed.reset()
