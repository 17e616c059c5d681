"""`hc.feed` in compiled programs: order, ends, control flow, vmap, grad, errors."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from limits import PROGRAM_SECONDS

import hostcall as hc
from hostcall.errors import FeedEndError, FeedError, ResultError


def count(n: int) -> Callable[[], Iterator[dict[str, Any]]]:
    """A source whose items tell their number twice."""

    def items() -> Iterator[dict[str, Any]]:
        for i in range(n):
            yield {"x": np.full((3,), i, np.float32), "n": np.int32(i)}

    return items


@pytest.fixture
def numbers():
    with hc.feed(count(20)) as feed:
        yield feed


def test_a_scan_takes_each_item_once_in_order(numbers):
    @jax.jit
    def run():
        def body(total, _):
            item, ok = numbers()
            return total + item["x"], (item["n"], ok)

        return jax.lax.scan(body, jnp.zeros(3), length=15)

    total, (ns, oks) = run()
    assert ns.tolist() == list(range(15))
    assert oks.all()
    assert total.tolist() == [sum(range(15))] * 3
    total, (ns, oks) = run()
    assert ns.tolist() == [15, 16, 17, 18, 19] + [0] * 10
    assert oks.tolist() == [True] * 5 + [False] * 10
    assert total.tolist() == [15 + 16 + 17 + 18 + 19] * 3


def test_programs_and_eager_calls_share_one_order(numbers):
    one = jax.jit(lambda: numbers()[0]["n"])
    two = jax.jit(lambda: (numbers()[0]["n"], numbers()[0]["n"]))
    assert int(one()) == 0
    assert [int(n) for n in two()] == [1, 2]
    assert int(numbers()[0]["n"]) == 3
    pending = [one() for _ in range(5)]  # dispatched one after another
    assert [int(n) for n in pending] == [4, 5, 6, 7, 8]


def test_a_while_loop_ends_with_the_items(numbers):
    @jax.jit
    def by_body():
        def body(state):
            steps, total, _ = state
            item, ok = numbers()
            return steps + ok, total + item["n"], ok

        return jax.lax.while_loop(lambda s: s[2], body, (0, 0, True))

    steps, total, ok = by_body()
    assert (int(steps), int(total), bool(ok)) == (20, sum(range(20)), False)
    numbers.reset()
    in_condition = jax.jit(
        lambda: jax.lax.while_loop(lambda n: numbers()[1], lambda n: n + 1, 0)
    )
    assert int(in_condition()) == 20


def test_fori_loop_and_the_taken_branch_only(numbers):
    @jax.jit
    def run():
        def body(i, seen):
            n = jax.lax.cond(i % 2 == 0, lambda: numbers()[0]["n"], lambda: -1)
            return seen.at[i].set(n)

        return jax.lax.fori_loop(0, 6, body, jnp.zeros(6, int))

    assert run().tolist() == [0, -1, 1, -1, 2, -1]


def test_where_takes_no_item_and_shows_zeros(numbers):
    take = jax.jit(lambda w: numbers(where=w))
    item, ok = take(False)
    assert not ok
    assert item["x"].tolist() == [0, 0, 0]
    item, ok = take(True)
    assert ok
    assert int(item["n"]) == 0
    item, ok = take(True)
    assert int(item["n"]) == 1


def test_vmap_gives_one_item_to_all_rows(numbers):
    out = jax.jit(jax.vmap(lambda x: x + numbers()[0]["n"]))(jnp.arange(3))
    assert out.tolist() == [0, 1, 2]
    assert int(numbers()[0]["n"]) == 1


def test_vmap_with_rows_gives_each_row_its_own(numbers):
    def row(x):
        item, ok = numbers(rows=x)
        return item["n"], item["x"], ok

    ns, xs, oks = jax.jit(jax.vmap(row))(jnp.arange(3.0))
    assert ns.tolist() == [0, 1, 2]
    assert xs[:, 0].tolist() == [0, 1, 2]
    assert oks.all()
    ns, _, _ = jax.vmap(jax.vmap(row))(jnp.zeros((2, 2)))
    assert ns.tolist() == [[3, 4], [5, 6]]
    ns, _, oks = jax.vmap(row)(jnp.zeros(20))
    assert ns.tolist() == [*range(7, 20), *[0] * 7]
    assert oks.sum() == 13


def test_vmap_of_where(numbers):
    mask = jnp.array([True, False, True])
    ns, oks = jax.vmap(lambda w: (numbers(where=w)[0]["n"] + 10, numbers(where=w)[1]))(
        mask
    )
    assert ns.tolist() == [10, 10, 10]
    assert oks.tolist() == [True, False, True]
    ns = jax.vmap(lambda w: numbers(where=w, rows=w)[0]["n"])(mask)
    assert ns.tolist() == [2, 0, 3]
    none = jax.vmap(lambda w: numbers(where=w)[1])(jnp.zeros(3, bool))
    assert not none.any()
    assert int(numbers()[0]["n"]) == 4


def test_vmap_of_where_within_rows(numbers):
    def row(x, w):
        return numbers(where=w, rows=x)[0]["n"]

    inner = jax.vmap(row, in_axes=(0, None))
    ns = jax.jit(jax.vmap(inner, in_axes=(None, 0)))(
        jnp.zeros(2), jnp.array([True, False])
    )
    assert ns.tolist() == [[0, 1], [0, 0]]


def test_vmap_of_while_loop(numbers):
    def row(n):
        def body(state):
            i, total = state
            return i + 1, total + numbers()[0]["n"]

        return jax.lax.while_loop(lambda s: s[0] < n, body, (0, 0))[1]

    totals = jax.jit(jax.vmap(row))(jnp.array([1, 3]))
    assert totals.tolist() == [0, 0 + 1 + 2]


def test_an_item_is_a_constant_under_grad(numbers):
    def loss(w):
        item, _ = numbers()
        return (w * (item["x"] + 1)).sum()

    value, slope = jax.jit(jax.value_and_grad(loss))(2.0)
    assert (float(value), float(slope)) == (6, 3)
    slope = jax.jit(jax.grad(jax.checkpoint(lambda w: jnp.sin(loss(w)))))(2.0)
    assert np.isclose(slope, 6 * np.cos(12))
    assert int(numbers()[0]["n"]) == 2  # neither took a second item
    slope = jax.vmap(jax.grad(lambda w: w * numbers(rows=w)[0]["n"]))(jnp.ones(2))
    assert slope.tolist() == [3, 4]


def test_the_end_can_fail_the_program():
    with hc.feed(count(2), on_end="raise", tag="two") as feed:
        take = jax.jit(lambda: feed()[0]["n"])
        assert [int(take()), int(take())] == [0, 1]
        for _ in range(2):
            with pytest.raises(FeedEndError) as found, hc.reraise():
                take()
        feed.reset()
        assert int(take()) == 0
    assert str(found.value) == (
        "hostcall: the feed `two` has ended after 2 items, and a program wants another"
        ' (on_end="raise"). Run fewer steps, call feed.reset() before the next epoch,'
        ' or use "mask"'
        "\n[hc-feed-end] python -m hostcall explain hc-feed-end"
    )


def test_repeat_counts_epochs():
    epochs = []

    def items(epoch):
        epochs.append(epoch)
        return iter([np.int32(10 * epoch), np.int32(10 * epoch + 1)])

    with hc.feed(items, on_end="repeat", prefetch=1) as feed:
        ns = jax.jit(lambda: jax.lax.scan(lambda c, _: (c, feed()[0]), 0, length=5)[1])
        assert ns().tolist() == [0, 1, 10, 11, 20]
        assert feed.state() == {"epoch": 2, "item": 1}
    assert epochs[:3] == [0, 1, 2]


def test_an_empty_epoch_is_not_repeated_for_ever():
    used = iter([np.int32(1)])
    with hc.feed(lambda: used, on_end="repeat", tag="used") as feed:
        assert int(feed()[0]) == 1
        with pytest.raises(FeedError, match=r"gave no item in epoch 1, so on_end="):
            feed()


class Broken(Exception):
    pass


def test_what_the_source_raises_fails_the_program_as_itself():
    error = Broken("disk")

    def items():
        yield np.int32(1)
        raise error

    with hc.feed(items) as feed:
        take = jax.jit(lambda: feed()[0])
        assert int(take()) == 1
        for _ in range(2):
            with pytest.raises(Broken) as found, hc.reraise():
                take()
            assert found.value is error
        with pytest.raises(jax.errors.JaxRuntimeError, match="Broken: disk"):
            jax.block_until_ready(take())
        feed.reset()
        assert int(take()) == 1


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (
            {"x": np.zeros(2, np.float32)},
            "item 1['x'] of the feed `odd`, which without spec= has the shapes and dtypes"
            " of its first item, should be float32[3], got float32[2]. Is it the last"
            " batch, which is not full? Items can't differ in size: let the source leave"
            " it out (drop_last=True), or fill it up",
        ),
        (
            {"x": np.zeros((3, 3), np.float32)},
            "should be float32[3], got float32[3,3]. Change what the source gives, or"
            " spec=",
        ),
        (
            {"y": np.zeros(3, np.float32)},
            "item 1 of the feed `odd` has another structure than spec=. Expected"
            " {'x': *}, got {'y': *}",
        ),
        (
            {"x": np.zeros(3, np.complex64)},
            "item 1['x'] of the feed `odd`, which without spec= has the shapes and dtypes"
            " of its first item, should be float32, got complex64. hostcall does not"
            " convert complex to float silently: return x.real if that is what you mean,"
            " or declare complex64",
        ),
        (
            {"x": np.array([1.0, 1e300, 2.0])},
            "should be float32, got float64 holding 1e+300, which float32 can't hold: it"
            " would become inf. Scale or clip it, declare a wider result, or return"
            " x.astype('float32') to let it overflow",
        ),
    ],
)
def test_an_item_that_does_not_fit_is_named(bad, text):
    good = {"x": np.ones(3, np.float32)}
    with hc.feed([good, bad], tag="odd") as feed:
        take = jax.jit(lambda: feed()[0]["x"])
        assert take().tolist() == [1, 1, 1]
        with pytest.raises(ResultError) as found, hc.reraise():
            take()
        assert text in str(found.value)


def test_a_list_of_another_kind_than_the_first_item():
    with hc.feed(iter([np.int32([1, 2]), [1.5, 2.5]])) as feed:
        take = jax.jit(lambda: feed()[0])
        take()
        with (
            pytest.raises(
                ResultError, match=r"of its first item, should be int32, got"
            ),
            hc.reraise(),
        ):
            take()


def test_numbers_of_two_kinds():
    with hc.feed([1, 2.5]) as feed:
        take = jax.jit(lambda: feed()[0])
        assert take() == 1
        with pytest.raises(ResultError) as found, hc.reraise():
            take()
        assert (
            "item 1 of the feed `list`, which without spec= has the shapes and dtypes of"
            " its first item, should be int32, got float64 from Python numbers."
            " hostcall does not convert float to integer silently: return round(x) if"
            " that is what you mean, or declare float32"
        ) in str(found.value)
        assert found.value.code == "hc-result-dtype"


def test_the_first_item_is_not_named_where_there_is_a_spec():
    with hc.feed([1, 2.5], jax.ShapeDtypeStruct((), jnp.int32)) as feed:
        take = jax.jit(lambda: feed()[0])
        assert take() == 1
        with pytest.raises(ResultError) as found, hc.reraise():
            take()
        assert "item 1 of the feed `list` should be int32" in str(found.value)


def test_another_shape_without_an_attribute():
    with hc.feed([[1.0], [1.0, 2.0]], jax.ShapeDtypeStruct((1,), jnp.float32)) as feed:
        take = jax.jit(lambda: feed()[0])
        with pytest.raises(ResultError) as found, hc.reraise():
            take()
            take()
        assert "Change what the source gives, or spec=" in str(found.value)


def test_rows_by_a_word():
    with hc.feed(count(3), tag="words") as feed:
        with pytest.raises(hc.errors.SpecError) as found:
            jax.vmap(lambda x: feed(rows="each"))(jnp.ones(2))
        assert str(found.value) == (
            "hostcall: rows= of a call of the feed `words` should be an array of the"
            " vmapped function, which differs between the rows, got 'each'. Write"
            " feed(rows=x), which takes an item for each row of x"
            "\n[hc-option] python -m hostcall explain hc-option"
        )


def test_a_source_that_gives_nothing_in_time():
    go = threading.Event()

    def items():
        yield np.int32(1)
        go.wait()
        yield np.int32(2)

    with hc.feed(items, timeout=0.1, tag="late") as feed:
        take = jax.jit(lambda: feed()[0])
        assert int(take()) == 1
        with pytest.raises(FeedError) as found, hc.reraise():
            take()
        go.set()
        assert (
            "the source of the feed `late` gave no item for timeout=0.1 s; it is at"
            in str(found.value)
        )
        assert int(feed()[0]) == 2


def test_close_ends_the_thread_and_programs_say_so():
    pulled, threads = [], set()

    def items():
        for i in range(1000):
            pulled.append(i)
            threads.add(threading.current_thread())
            yield np.int32(i)

    with hc.feed(items, prefetch=3, tag="closing") as feed:
        take = jax.jit(lambda: feed()[0])
        assert int(take()) == 0
    (thread,) = threads
    # Closing waits a second for it, which a busy machine may use up.
    thread.join(PROGRAM_SECONDS)
    assert not thread.is_alive()
    seen = len(pulled)
    assert seen <= 5
    with pytest.raises(FeedError) as found, hc.reraise():
        take()
    assert len(pulled) == seen
    assert str(found.value) == (
        "hostcall: the feed `closing` was closed. Make another hc.feed, or close it"
        " later"
        "\n[hc-feed] python -m hostcall explain hc-feed"
    )
    feed.close()  # again
    with pytest.raises(FeedError, match="was closed"):
        feed.reset()


def test_an_unused_feed_is_collected_with_its_thread(in_time):
    threads = set()

    def items():
        threads.add(threading.current_thread())
        yield from count(100)()

    def use():
        feed = hc.feed(items)
        jax.jit(lambda: feed()[0]["n"])()

    use()
    (thread,) = threads
    jax.clear_caches()
    assert in_time(lambda: not thread.is_alive())


@pytest.mark.parametrize("mode", ["eager", "jit", "reraise"])
def test_feeds_that_failed_are_collected(mode):
    """All but that of the newest failure, whose traceback shows its values."""

    def broken():
        yield np.float32(1)
        raise LookupError("a broken record")

    def epoch():
        feed = hc.feed(broken)
        take = feed if mode == "eager" else jax.jit(lambda: feed()[0])
        block = hc.reraise() if mode == "reraise" else contextlib.nullcontext()
        with contextlib.suppress(LookupError, jax.errors.JaxRuntimeError), block:
            take(), jax.block_until_ready(take())
        return weakref.ref(feed)

    feeds = [epoch() for _ in range(5)]
    jax.clear_caches()
    gc.collect()
    assert sum(feed() is not None for feed in feeds) <= 1


def test_keys_and_jax_arrays_are_items():
    keys = jax.random.split(jax.random.key(0), 3)
    with hc.feed({"k": k, "x": jnp.float32(i)} for i, k in enumerate(keys)) as feed:
        item, _ = jax.jit(lambda: feed())()
        assert (jax.random.key_data(item["k"]) == jax.random.key_data(keys[0])).all()
        item, _ = feed()
        assert float(item["x"]) == 1


def test_debug_nans_sees_items_eagerly_as_in_a_program():
    def items() -> Iterator[np.ndarray]:
        yield from (
            np.float32(1),
            np.float32(np.nan),
            np.float32(2),
            np.float32(np.nan),
        )

    with hc.feed(items) as feed, jax.debug_nans(True):
        assert feed()[0] == 1
        with pytest.raises(FloatingPointError, match="nan"):
            feed()
        run = jax.jit(lambda: feed()[0])
        assert run() == 2
        with pytest.raises(FloatingPointError, match="nan"):
            run()


def test_threads_share_a_feed():
    with hc.feed(count(400)) as feed:
        take = jax.jit(
            lambda: jax.lax.scan(lambda c, _: (c, feed()[0]["n"]), 0, length=50)[1]
        )
        seen: list[list[int]] = []
        threads = [
            threading.Thread(target=lambda: seen.append(take().tolist()))
            for _ in range(8)
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert sorted(n for ns in seen for n in ns) == list(range(400))
    assert all(ns == sorted(ns) for ns in seen)


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_feed_that_outlives_64_bit_mode(mode):
    with jax.enable_x64(True):
        feed = hc.feed([np.array([2**40 + 5, n]) for n in range(3)])
    with feed:
        item = mode(lambda: feed()[0])()
        assert item.dtype == np.asarray(item).dtype == np.int64
        assert item.tolist() == [2**40 + 5, 0]
        wanted = jnp.array([True, False])
        rows, there = mode(jax.vmap(lambda want: feed(where=want)))(wanted)
        assert rows.dtype == np.asarray(rows).dtype == np.int64
        assert rows.tolist() == [[2**40 + 5, 1], [0, 0]]
        assert there.tolist() == [True, False]


def test_keys_of_another_implementation():
    keys = [jax.random.key(1, impl="rbg"), jax.random.key(2, impl="unsafe_rbg")]
    with hc.feed(keys) as feed:
        take = jax.jit(lambda: feed()[0])
        assert take().dtype == keys[0].dtype
        with pytest.raises(ResultError) as found, hc.reraise():
            jax.block_until_ready(take())
        text = str(found.value)
        assert text.startswith("hostcall: item 1 of the feed `list`")
        assert "should be key<rbg>[], got key<urbg>[]" in text
