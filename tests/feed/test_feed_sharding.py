"""Feeds with sharding=: each device takes its block of an item."""

from __future__ import annotations

import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import grid, line

import hostcall as hc
from hostcall.errors import FeedError, SpecError


def items(n, shape=(8, 4)):
    for i in range(n):
        yield np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1000 * i


@pytest.mark.parametrize(
    ("mesh", "spec"),
    [
        (line, jax.P("x")),
        (line, jax.P(None, "x")),
        (line, jax.P()),
        (grid, jax.P("x", "y")),
        (grid, jax.P("y")),
        (grid, jax.P(("y", "x"))),
    ],
)
def test_each_device_takes_its_block(mesh, spec):
    sharding = jax.NamedSharding(mesh(), spec)
    with hc.feed(lambda: items(3), sharding=sharding) as feed:
        take = jax.jit(feed)
        for want in items(3):
            got, ok = take()
            assert ok
            assert got.sharding.is_equivalent_to(sharding, 2)
            whole = jax.device_put(want, sharding)
            for ours, theirs in zip(
                got.addressable_shards, whole.addressable_shards, strict=True
            ):
                assert ours.index == theirs.index
                assert (np.asarray(ours.data) == np.asarray(theirs.data)).all()
        got, ok = take()
        assert not ok
        assert not got.any()


def test_a_training_loop_over_a_mesh_stops_at_the_end():
    sharding = jax.NamedSharding(line(), jax.P("x"))
    source = lambda: ({"x": x, "y": x[:, 0]} for x in items(5))
    with hc.feed(source, sharding=sharding) as feed:

        @jax.jit
        def epoch(w):
            def body(state):
                w, steps, _ = state
                batch, ok = feed()
                slope = jax.grad(lambda w: (w * batch["x"]).sum())(w)
                return w + slope, steps + ok, ok

            return jax.lax.while_loop(lambda s: s[2], body, (w, 0, True))

        w, steps, _ = epoch(jnp.float32(0))
        assert int(steps) == 5
        assert float(w) == sum(x.sum() for x in items(5))
        assert feed.state() == {"epoch": 0, "item": 5}


def test_what_does_not_fit_is_named():
    sharding = jax.NamedSharding(line(), jax.P("x"))
    for source, text in (
        ([np.zeros((6, 2))], r"axis 0 can't be cut into 4 equal parts"),
        ([np.float32(1)], r"has no axis for .*'x'"),
    ):
        with pytest.raises(SpecError, match=text):
            hc.feed(source, sharding=sharding)
    with pytest.raises(SpecError, match="should be a jax.NamedSharding on a mesh"):
        hc.feed([np.zeros(4)], sharding=jax.P("x"))
    with hc.feed([np.zeros(4)], sharding=sharding) as feed:
        with pytest.raises(SpecError, match="has sharding=, and rows="):
            feed(rows=1)
        inside = jax.shard_map(
            lambda: feed()[0], mesh=line(), in_specs=(), out_specs=jax.P("x")
        )
        with pytest.raises(SpecError, match="is called inside shard_map"):
            jax.jit(inside)()


# --- Devices stay together ------------------------------------------------------------


def endless():
    return (np.full((4,), i, np.float32) for i in itertools.count())


def test_a_reset_under_a_program_comes_at_one_item_for_all_devices():
    sharding = jax.NamedSharding(line(), jax.P("x"))
    with hc.feed(endless, sharding=sharding) as feed:
        step = lambda c, _: (c, feed()[0])
        run = jax.jit(lambda: jax.lax.scan(step, 0, length=500)[1])
        for _ in range(10):
            first = run()
            feed.reset()
            for got in (np.asarray(first), np.asarray(run())):
                assert (got == got[:, :1]).all()


def test_a_close_under_a_program_fails_all_devices_at_one_item(in_time):
    sharding = jax.NamedSharding(line(), jax.P("x"))
    for _ in range(10):
        feed = hc.feed(endless, sharding=sharding, tag="shut")
        step = lambda c, _, feed=feed: (c + feed()[0].sum(), None)
        run = jax.jit(lambda step=step: jax.lax.scan(step, 0.0, length=10**6)[0])
        with pytest.raises(FeedError, match="`shut` was closed"), hc.reraise():
            total = run()
            assert in_time(lambda feed=feed: feed.state()["item"] > 20)
            feed.close()
            total.block_until_ready()
    # The last program may have left failed tokens. jax 0.10.2 would raise them at each
    # `effects_barrier`; each `hc.barrier` raises one of them and forgets it.
    assert in_time(nothing_is_raised)


def nothing_is_raised():
    try:
        return hc.barrier()
    except jax.errors.JaxRuntimeError:
        return False


def test_a_timeout_closes_the_feed_for_all_devices():
    go = threading.Event()

    def source():
        yield np.zeros(4, np.float32)
        go.wait()

    sharding = jax.NamedSharding(line(), jax.P("x"))
    with hc.feed(source, sharding=sharding, timeout=0.2, tag="late") as feed:
        step = lambda c, _: (c + feed()[0].sum(), None)
        run = jax.jit(lambda: jax.lax.scan(step, 0.0, length=3)[0])
        with pytest.raises(FeedError) as found, hc.reraise():
            run()
        said = str(found.value)
        assert said.startswith(
            "hostcall: the feed `late` was closed, since its source gave no item for"
            " timeout=0.2 s; it is at"
        )
        assert said.endswith(
            "raise timeout=, or prefetch= if it comes in bursts"
            "\n[hc-feed] python -m hostcall explain hc-feed"
        )
        with pytest.raises(
            FeedError, match="was closed, since its source gave no item"
        ):
            feed()
        go.set()


def test_where_stands_for_cond():
    sharding = jax.NamedSharding(line(), jax.P("x"))
    with hc.feed(endless, sharding=sharding) as feed:
        step = lambda c, p: (c, feed(where=p))
        wanted = jnp.array([True, False, True, False, False, True])
        got, oks = jax.jit(lambda: jax.lax.scan(step, 0, wanted)[1])()
        assert oks.tolist() == wanted.tolist()
        assert np.asarray(got)[:, 0].tolist() == [0, 0, 1, 0, 0, 2]
        assert feed.state() == {"epoch": 0, "item": 3}


@pytest.mark.parametrize("place", ["cond", "switch", "cond in scan", "inner jit"])
def test_in_branches(place):
    """The oracle: the items that the same Python code takes."""
    sharding = jax.NamedSharding(line(), jax.P("x"))
    items = [np.full((4, 3), i, np.float32) for i in range(6)]

    def program(take, cond, p):
        one = lambda: take().sum()
        if place == "cond":
            return [cond(p, one, lambda: 0.0), cond(~p, one, lambda: 0.0), one()]
        if place == "inner jit":
            return [cond(p, jax.jit(one), lambda: 0.0), one()]
        return [cond(p if i % 2 else ~p, one, lambda: -1.0) for i in range(4)]

    source = iter(items)
    want = program(lambda: next(source), lambda p, t, f: t() if p else f(), np.True_)
    with hc.feed(list(items), sharding=sharding) as feed:
        take = lambda: feed()[0]
        if place == "cond in scan":

            def step(c, i):
                p = i % 2 == 1
                return c, jax.lax.cond(p, lambda: take().sum(), lambda: -1.0)

            run = lambda p: jax.lax.scan(step, 0, jnp.arange(4))[1]
        elif place == "switch":
            choose = lambda p, t, f: jax.lax.switch(p.astype(int), [f, t])
            run = lambda p: program(take, choose, p)
        else:
            run = lambda p: program(take, jax.lax.cond, p)
        np.testing.assert_array_equal(jax.jit(run)(np.True_), want)
