"""`feed.at(i)` beside the stream: one thread at a time, wrong numbers, no rows, ends."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc
from hostcall.errors import FeedError, SpecError


class Guarded:
    """Notes whether two threads were ever inside."""

    def __init__(self, n):
        self.n, self.threads, self.clashes = n, set(), 0
        self._inside = threading.Lock()

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i >= self.n:
            raise IndexError(i)
        if not self._inside.acquire(blocking=False):
            self.clashes += 1
            return np.float32(i)
        self.threads.add(threading.get_ident())
        threading.Event().wait(0.001)
        self._inside.release()
        return np.float32(i)


def test_one_thread_at_a_time_is_in_the_source():
    source = Guarded(100)
    with hc.feed(source, prefetch=2) as feed:
        run = jax.jit(
            lambda: jax.lax.scan(lambda c, i: (c, (feed.at(i), feed()[0])), 0, xs)[1]
        )
        xs = jnp.arange(100)
        for got in run():
            assert got.tolist() == list(range(100))
    assert len(source.threads) > 1
    assert source.clashes == 0


def test_items_read_ahead_may_be_made_by_jax():
    class Rows:
        def __len__(self):
            return 60

        def __getitem__(self, i):
            if i >= 60:
                raise IndexError(i)
            return np.asarray(jnp.sin(jnp.arange(64.0) + i).sum())

    with hc.feed(Rows(), prefetch=4) as feed:
        step = lambda i, total: total + feed.at(i)
        total = jax.jit(lambda x: jax.lax.fori_loop(0, 60, step, x))(0.0)
    want = np.sin(np.arange(64.0) + np.arange(60)[:, None]).sum()
    np.testing.assert_allclose(total, want, atol=1e-3)


def test_numbers_that_are_none():
    with hc.feed([np.float32(i) for i in range(4)], tag="four") as feed:
        text = "hostcall: feed.at(-1) of the feed `four`: items have numbers from 0"
        with pytest.raises(IndexError) as found, hc.reraise():
            jax.jit(feed.at)(-1)
        assert text in str(found.value)
        for wrong, got in ((1.5, "float32[]"), (True, "bool[]"), ([1, 2], "int32[2]")):
            with pytest.raises(SpecError) as spec:
                feed.at(jnp.asarray(wrong))
            assert str(spec.value) == (
                "hostcall: feed.at(i) of the feed `four` wants an int scalar, got"
                f" {got}. Under jax.vmap, i is a scalar for each row"
                "\n[hc-spec] python -m hostcall explain hc-spec"
            )


def test_no_rows_give_no_items():
    with hc.feed(np.arange(12.0).reshape(6, 2), batch=2) as feed:
        got = jax.jit(jax.vmap(feed.at))(jnp.zeros(0, int))
        assert got.shape == (0, 2, 2)
        assert got.dtype == np.float32


def test_a_closed_feed_is_named():
    feed = hc.feed([np.float32(i) for i in range(4)], tag="gone")
    pick = jax.jit(feed.at)
    assert pick(1) == 1
    feed.close()
    text = "hostcall: the feed `gone` was closed. Make"
    with pytest.raises(FeedError, match=text), hc.reraise():
        pick(1)


# --- Sources that were misread --------------------------------------------------------


def test_numbers_in_the_other_byte_order():
    data = np.arange(6, dtype=np.dtype(np.int32).newbyteorder())
    with hc.feed(data, batch=2) as feed:
        assert feed()[0].tolist() == [0, 1]
        assert feed.at(2).tolist() == [4, 5]
    spec = jax.ShapeDtypeStruct((2,), data.dtype)
    with hc.feed(lambda: iter(data.reshape(3, 2)), spec) as feed:
        assert jax.jit(feed)()[0].tolist() == [0, 1]


def test_a_class_is_a_function_that_makes_a_source():
    class Numbers:
        def __iter__(self):
            return iter(np.arange(4, dtype=np.int32))

    class Endless:
        def __iter__(self):
            return self

        def __next__(self):
            return np.int32(1)

    with hc.feed(Numbers, on_end="repeat") as feed:
        assert [int(feed()[0]) for _ in range(6)] == [0, 1, 2, 3, 0, 1]
    with hc.feed(Endless, on_end="repeat") as feed:
        assert int(feed()[0]) == 1


SIZES = {
    "empty": (
        lambda: hc.feed([], jax.ShapeDtypeStruct((), np.float32)),
        "list",
        "has no items",
        "Is its source empty, or not filled yet?",
    ),
    "list": (lambda: hc.feed([1.0, 2.0]), "list", "has the numbers 0 to 1", "i % 2"),
    "batches": (
        lambda: hc.feed(np.arange(7.0, dtype=np.float32), batch=2, tag="cut"),
        "cut",
        "has the numbers 0 to 2",
        "jnp.minimum(i, 2)",
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_number_after_the_last_item(name):
    make, called, numbers, instead = SIZES[name]
    with make() as feed:
        with pytest.raises(IndexError) as found:
            feed.at(7)
        assert f"hostcall: feed.at(7) of the feed `{called}`, which {numbers}." in str(
            found.value
        )
        assert instead in str(found.value)
        with pytest.raises(jax.errors.JaxRuntimeError) as report:
            jax.block_until_ready(jax.jit(feed.at)(7))
        assert f"(in callback `{called}.at`, called at" in str(report.value)


def test_an_index_error_of_the_source_itself_stays():
    class Odd:
        def __len__(self):
            return 3

        def __getitem__(self, i):
            if i:
                raise IndexError("the source's own")
            return np.float32(i)

    Endless = type("Endless", (Odd,), {"__len__": None, "__iter__": lambda _: iter([])})
    for source, number in ((Odd(), 2), (Endless(), 7)):
        feed = hc.feed(source, jax.ShapeDtypeStruct((), np.float32))
        with feed, pytest.raises(IndexError, match=r"^the source's own$"):
            feed.at(number)
