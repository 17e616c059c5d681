"""`hc.tap(batch=...)`: taps of one place, stacked. The oracle is the same tap alone."""

import itertools
import math
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import line

import hostcall as hc


class Seen:
    """What a batched tap was called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, *args):
        self.calls.append(args)

    def joined(self, number=0):
        return np.concatenate([args[number] for args in self.calls])


def scanned(tap, xs):
    """A compiled loop that taps each row of `xs`."""

    @jax.jit
    def run(xs):
        return jax.lax.scan(lambda carry, x: (carry, tap(x)), 0.0, xs)[0]

    run(xs)
    hc.barrier()


DTYPES = [
    np.bool_,
    np.int8,
    np.uint16,
    np.int32,
    np.float32,
    np.complex64,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.int4,
    ml_dtypes.uint2,
]


SHAPES = [(), (3,), (2, 5), (0,)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_dtypes_and_shapes(dtype):
    """All shapes in one program, each with a tap of its own."""
    every = [np.arange(40 * int(np.prod(s))).reshape(40, *s) % 4 for s in SHAPES]
    every = [jnp.asarray(xs).astype(dtype) for xs in every]
    taps = [Seen() for _ in SHAPES]
    scanned(lambda xs: [hc.tap(f, x, batch=7) for f, x in zip(taps, xs)], every)
    for seen, xs in zip(taps, every):
        assert all(1 <= len(a) <= 7 and a.dtype == xs.dtype for (a,) in seen.calls)
        np.testing.assert_array_equal(seen.joined(), np.asarray(xs))
        assert sum(len(a) for (a,) in seen.calls) == 40


@pytest.mark.parametrize("batch", [1, 2, 100, 100_000])
def test_sizes(batch):
    seen = Seen()
    scanned(lambda x: hc.tap(seen, x, batch=batch), jnp.arange(3000))
    assert max(len(a) for (a,) in seen.calls) <= batch
    np.testing.assert_array_equal(seen.joined(), np.arange(3000))


def gated(tap, xs):
    """As `scanned`, but the worker is in another tap until the loop has ended.

    After such a slow tap it takes one event, and then all that are queued.
    """
    begun, ended = threading.Event(), threading.Event()

    def gate():
        begun.set()
        ended.wait(60)

    hc.tap(gate)
    assert begun.wait(60)
    run = jax.jit(lambda xs: jax.lax.scan(lambda c, x: (c, tap(x)), 0.0, xs)[0])
    jax.block_until_ready(run(xs))
    ended.set()
    hc.barrier()


def test_as_many_as_are_queued():
    seen = Seen()
    gated(lambda x: hc.tap(seen, x, batch=1000), jnp.arange(2500))
    assert [len(a) for (a,) in seen.calls] == [1, 1000, 1000, 499]


def test_trees_and_static_leaves():
    seen = []

    def log(tree, name, *, scale):
        seen.append((name, scale, tree["a"].shape, tree["b"][0].shape))

    def tap(x):
        hc.tap(log, {"a": x, "b": (jnp.ones((2, 3)) * x,)}, "n", scale=x, batch=50)

    gated(tap, jnp.arange(50.0))
    first, (name, scale, a, b) = seen
    assert first[2:] == ((1,), (1, 2, 3))
    assert (name, a, b) == ("n", (49,), (49, 2, 3))
    np.testing.assert_array_equal(scale, np.arange(1, 50.0))


@pytest.mark.parametrize("arrays", ["jax", "dlpack"])
def test_kinds_of_arrays(arrays):
    seen = []

    def log(x, key):
        x = np.from_dlpack(x) if arrays == "dlpack" else x
        assert arrays == "dlpack" or isinstance(x, jax.Array)
        seen.append((np.asarray(x), jax.random.key_data(key)))

    keys = jax.random.split(jax.random.key(0), 20)
    gated(lambda x: hc.tap(log, *x, batch=99, arrays=arrays), (jnp.arange(20), keys))
    assert len(seen) == 2
    x, data = map(np.concatenate, zip(*seen, strict=True))
    np.testing.assert_array_equal(x, np.arange(20))
    np.testing.assert_array_equal(data, jax.random.key_data(keys))


def test_taps_in_turns():
    """Each tap's values are in order and stacked, with others between them."""
    one, two, alone = Seen(), Seen(), []

    def taps(x):
        hc.tap(one, x, batch=64)
        hc.tap(alone.append, x)
        hc.tap(two, -x, x * 2, batch=64)

    gated(taps, jnp.arange(300))
    np.testing.assert_array_equal(one.joined(), np.arange(300))
    np.testing.assert_array_equal(two.joined(0), -np.arange(300))
    np.testing.assert_array_equal(two.joined(1), 2 * np.arange(300))
    assert [int(x) for x in alone] == list(range(300))
    assert len(one.calls) < 20
    assert len(two.calls) < 20


def test_current_tells_them_apart():
    seen = []

    def log(x):
        here = hc.current()
        assert (here.run, here.step) == (here.runs[0], here.steps[0])
        seen.append((x, here.runs, here.steps, here.device))

    @jax.jit
    def run(xs):
        return jax.lax.map(lambda x: (hc.tap(log, x, batch=100), x)[1], xs)

    run(jnp.arange(30))
    run(jnp.arange(30))
    hc.barrier()
    runs = list(itertools.chain(*(r for _, r, _, _ in seen)))
    steps = list(itertools.chain(*(s for _, _, s, _ in seen)))
    assert len(runs) == len(steps) == 60
    assert len(set(runs[:30])) == len(set(runs[30:])) == 1
    assert runs[0] != runs[30]
    assert steps == sorted(set(steps))
    assert {device for *_, device in seen} == {jax.devices()[0]}
    hc.tap(lambda: seen.append(hc.current()))
    hc.barrier()
    assert (seen[-1].runs, seen[-1].steps) == (None, None)


def test_vmap_adds_axes_behind():
    seen = Seen()

    @jax.jit
    def run(xs):
        def body(carry, x):
            jax.vmap(lambda row, c: hc.tap(seen, row, c, batch=9), (0, None))(x, carry)
            return carry + 1, None

        return jax.lax.scan(body, 0, xs)[0]

    xs = jnp.arange(12.0).reshape(4, 3)
    run(xs)
    hc.barrier()
    np.testing.assert_array_equal(seen.joined(0), xs)
    np.testing.assert_array_equal(seen.joined(1), np.arange(4))


@pytest.mark.parametrize("option", ["where", "every", "sample"])
def test_with_filters(option):
    def options(x):
        return {"where": x % 3 == 0} if option == "where" else {option: amount}

    amount = {"every": 10, "sample": 0.25}.get(option)
    seen, alone = Seen(), []
    scanned(lambda x: hc.tap(seen, x, batch=32, **options(x)), jnp.arange(200))
    scanned(lambda x: hc.tap(alone.append, x, **options(x)), jnp.arange(200))
    assert 0 < len(alone) < 200
    if option == "sample":  # each place has a sequence of its own
        assert set(seen.joined()) <= set(range(200))
        assert seen.joined().tolist() == sorted(set(seen.joined().tolist()))
    else:
        np.testing.assert_array_equal(seen.joined(), np.stack(alone))


def test_eager_taps_are_batches_of_one():
    seen = Seen()
    hc.tap(seen, jnp.arange(3), batch=8)
    hc.tap(seen, 2.0, batch=8)
    hc.barrier()
    assert [a.shape for (a,) in seen.calls] == [(1, 3), (1,)]


def test_cotangents():
    seen = Seen()

    def loss(x):
        def body(c, _):
            c = hc.derivatives.tap_cotangent(seen, c, batch=16)
            return c * 2, None

        return jax.lax.scan(body, x, None, length=8)[0]

    jax.jit(jax.grad(loss))(1.0)
    hc.barrier()
    np.testing.assert_array_equal(seen.joined(), 2.0 ** np.arange(1, 9))


def test_shard_map_stacks_each_device_alone():
    mesh = line()
    seen = []

    def log(x):
        assert len(hc.current().steps) == len(x)
        seen.append((hc.current().mesh_coords["x"], x[:, 0]))

    def body(block):
        def step(i, b):
            hc.tap(log, b + i, batch=1000)
            return b

        return jax.lax.fori_loop(0, 50, step, block)

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    run(100 * jnp.arange(4))
    hc.barrier()
    for shard in range(4):
        values = np.concatenate([x for coord, x in seen if coord == shard])
        np.testing.assert_array_equal(values, 100 * shard + np.arange(50))


def test_a_failure_is_one_of_its_batch():
    def fails(x):
        raise RuntimeError(f"{len(x)} values")

    before = hc.monitor.stats()
    with pytest.raises(ExceptionGroup) as caught:
        gated(
            lambda x: hc.tap(fails, x, batch=99, tag="fails together"), jnp.arange(20)
        )
    assert [str(e) for e in caught.value.exceptions] == ["1 values", "19 values"]
    stats = hc.monitor.stats()["fails together"]
    assert "fails together" not in before
    assert (stats.calls, stats.errors, stats.bytes_in) == (20, 2, 80)


def test_discarded_taps_are_in_no_batch():
    seen, begun, go_on = Seen(), threading.Event(), threading.Event()

    def first(x):
        seen(x)
        begun.set()
        go_on.wait(60)

    xs = jnp.arange(100)
    run = jax.jit(lambda: jax.lax.map(lambda x: (hc.tap(seen, x, batch=9), x)[1], xs))
    hc.tap(first, jnp.arange(1))
    assert begun.wait(60)
    jax.block_until_ready(run())
    hc.monitor.discard_taps()
    jax.block_until_ready(run())
    go_on.set()
    hc.barrier()
    np.testing.assert_array_equal(seen.joined(), [0, *range(100)])


def test_a_full_queue_drops_the_oldest():
    hc.configure(tap_queue_bytes=64_000)
    try:
        seen = Seen()

        def tap(x):
            hc.tap(seen, x, batch=50, when_full="drop_oldest", tag="dropped batch")

        gated(tap, jnp.arange(5000))
        dropped = hc.monitor.stats()["dropped batch"].dropped
        got = seen.joined()
        assert dropped > 0
        assert len(got) == 5000 - dropped
        np.testing.assert_array_equal(got[-500:], np.arange(4500, 5000))
        assert got.tolist() == sorted(got.tolist())
    finally:
        hc.configure(tap_queue_bytes=256_000_000)


def test_results_are_the_same_bits(optimized):
    def run(tap):
        def body(c, x):
            tap(c)
            return jnp.sin(c) * 1.1 + x, c

        return jax.jit(lambda c: jax.lax.scan(body, c, jnp.arange(50.0)))(0.3)

    plain = run(lambda c: None)
    tapped = run(lambda c: hc.tap(lambda x: None, c, batch=10))
    hc.barrier()
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(tapped), strict=True):
        assert a.tobytes() == b.tobytes()


# --- Mistakes ------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [0, -1, 2.0, True, "all"])
def test_a_wrong_size(batch):
    text = r"batch= of the tap `print` should be the most taps .* an int of 1 or more"
    with pytest.raises(hc.errors.SpecError, match=text):
        hc.tap(print, 1, batch=batch)


@pytest.mark.parametrize(
    ("option", "instead"),
    [({"order": "ordered"}, "leave out order="), ({"rows": "each"}, "rows='batched'")],
)
def test_options_that_do_not_go_together(option, instead):
    with pytest.raises(hc.errors.SpecError, match="has batch= and .* one by one") as e:
        hc.tap(print, 1, batch=5, **option)
    assert instead in str(e.value)


def test_masks_that_differ_between_rows():
    tap = jax.vmap(lambda x: hc.tap(print, x, where=x > 1, batch=5))
    text = r"batch= and a where= that differs between the rows.*Pass the mask as"
    with pytest.raises(hc.errors.SpecError, match=text):
        jax.jit(tap)(jnp.arange(3))


def test_a_function_for_scalars_gets_the_hint_that_taps_come_together():
    def of_scalars(x):
        math.sin(x)

    scanned_alone = jax.jit(
        lambda xs: jax.lax.scan(
            lambda c, x: (c, hc.tap(of_scalars, x, batch=4)), 0, xs
        )[0]
    )
    scanned_alone(jnp.ones(8))
    with pytest.raises((TypeError, ExceptionGroup)) as caught:
        hc.barrier()
    error = caught.value
    error = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
    assert any("with batch= this tap gets the values" in n for n in error.__notes__)
