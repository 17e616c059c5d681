"""hc.tap(on="shards"): each device taps its block, without communication."""

import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import hostcall as hc

ORDERS = pytest.mark.parametrize("order", ["unordered", "ordered"])
X = np.arange(32, dtype=np.float32).reshape(4, 8)
COLLECTIVE = re.compile("all-gather|all-reduce|all-to-all|permute|broadcast-start")


def put(spec, x=X):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
    return jax.device_put(x, NamedSharding(mesh, spec))


class Log:
    """Deliveries: (device, index of each array, arrays)."""

    def __init__(self):
        self.seen = []

    def __call__(self, *arrays):
        here = hc.current()
        self.seen.append((here.device, here.index, arrays))

    def taken(self):
        hc.barrier()
        seen, self.seen = self.seen, []
        return seen


@pytest.fixture
def log():
    return Log()


def blocks(x):
    """The oracle: maps each index to the first device that has it."""
    found = {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        index = tuple(
            slice(*part.indices(size)[:2])
            for part, size in zip(index, x.shape, strict=True)
        )
        if str(index) not in found or device.id < found[str(index)][0].id:
            found[str(index)] = (device, index)
    return sorted(found.values(), key=lambda found: found[0].id)


SPECS = [P("a", "b"), P(("a", "b")), P("a"), P(None, "b"), P(None, ("b", "a")), P()]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("mode", [jax.jit, lambda f: f], ids=["jit", "eager"])
@ORDERS
def test_each_block_once_with_its_place(spec, mode, order, log):
    x = put(spec)
    y = mode(lambda x: (hc.tap(log, x, on="shards", order=order), x * 2)[1])(x)
    np.testing.assert_array_equal(y, X * 2)
    seen = sorted(log.taken(), key=lambda s: s[0].id)
    assert [(device, index) for device, (index,), _ in seen] == blocks(x)
    for _, (index,), (block,) in seen:
        np.testing.assert_array_equal(block, X[index])


@pytest.mark.parametrize("spec", SPECS, ids=str)
@ORDERS
def test_no_communication(spec, order, log):
    f = jax.jit(lambda x: (hc.tap(log, x, on="shards", order=order), x * 2)[1])
    assert not COLLECTIVE.search(f.lower(put(spec)).compile().as_text())


def test_whole_does_communicate():
    f = jax.jit(lambda x: (hc.tap(print, x), x * 2)[1])
    assert COLLECTIVE.search(f.lower(put(P("a", "b"))).compile().as_text())


@ORDERS
def test_a_computed_value_as_the_compiler_shards_it(order, log):
    @jax.jit
    def f(x):
        y = jnp.sin(x) @ x.T
        hc.tap(log, y, on="shards", order=order)
        return y

    y = f(put(P("a", "b")))
    seen = log.taken()
    whole = np.full(y.shape, np.nan, np.float32)
    for _, (index,), (block,) in seen:
        assert np.isnan(whole[index]).all()  # no element twice
        whole[index] = block
    np.testing.assert_allclose(whole, y, rtol=1e-6)


@ORDERS
def test_loops_keep_the_order_of_each_device(order, log):
    @jax.jit
    def f(x):
        def body(i, c):
            hc.tap(log, c, i, on="shards", order=order)
            hc.tap(log, c, -i - 1, on="shards", order=order)
            return c + 1

        return lax.fori_loop(0, 10, body, x)

    for _ in range(5):
        f(put(P("a", "b")))
        by_device = {}
        for device, _, (block, step) in log.taken():
            if step >= 0:
                np.testing.assert_array_equal(block.ravel()[0] % 1, 0)
            by_device.setdefault(device, []).append(int(step))
        assert len(by_device) == 4
        want = [s for i in range(10) for s in (i, -i - 1)]
        for steps in by_device.values():
            assert steps == want


def test_ordered_taps_of_shards_and_of_the_whole(log):
    @jax.jit
    def f(x):
        for i in range(5):
            hc.tap(log, x[0, 0] * 0 + 2 * i, order="ordered")
            hc.tap(log, x * 0 + 2 * i + 1, order="ordered", on="shards")

    f(put(P("a")))
    first = [int(a.ravel()[0]) for d, _, (a,) in log.taken() if d == jax.devices()[0]]
    assert first == list(range(10))


def test_several_arrays_of_different_shardings(log):
    x, y = put(P("a", "b")), put(P(("a", "b")), np.arange(8))
    jax.jit(lambda x, y: hc.tap(log, x, {"y": y}, 3, on="shards"))(x, y)
    seen = log.taken()
    assert len(seen) == 4
    for _, (ix, iy, i3), (bx, by, three) in seen:
        np.testing.assert_array_equal(bx, X[ix])
        np.testing.assert_array_equal(by["y"], np.arange(8)[iy])
        assert three == 3
        assert i3 == ()


def test_scalars_and_replicated_values_arrive_once(log):
    jax.jit(lambda x: hc.tap(log, x.sum(), on="shards"))(put(P("a", "b")))
    ((device, index, (total,)),) = log.taken()
    assert (device, index, total) == (jax.devices()[0], ((),), X.sum())


TRANSFORMS = {
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "vmap": jax.vmap,
    "vmap of columns": lambda f: jax.vmap(f, 1, 1),
    "remat": jax.checkpoint,
    "grad of remat": lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum()),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "cond": lambda f: lambda x: lax.cond(x[0, 0] < 1, f, lambda x: x, x),
    "nested jit": lambda f: lambda x: (jax.jit(f)(x), x)[1],
    "unused": lambda f: lambda x: (lax.map(lambda _: f(x), jnp.arange(1)), 1)[1],
}


@pytest.mark.parametrize("name", TRANSFORMS)
@ORDERS
def test_under_transformations(name, order, log):
    def f(x):
        hc.tap(log, x, on="shards", order=order)
        return jnp.sin(x)

    jax.block_until_ready(jax.jit(TRANSFORMS[name](f))(put(P("a", "b"))))
    seen = log.taken()
    assert {d.id for d, _, _ in seen} == {0, 1, 2, 3}
    assert sum(block.size for _, _, (block,) in seen) == X.size
    want = X.T if name == "vmap of columns" else X
    for _, (index,), (block,) in seen:
        np.testing.assert_array_equal(block, want[index])


def test_a_tap_without_arrays_arrives_once(log):
    def f(x):
        hc.tap(lambda word: log(word), "static", on="shards")
        return x

    jax.jit(f)(put(P("a", "b")))
    ((_, index, (word,)),) = log.taken()
    assert (index, word) == ((), "static")


def test_where_holds_for_all_devices(log):
    f = jax.jit(lambda x: hc.tap(log, x, on="shards", where=x.sum() > 0))
    f(put(P("a", "b")))
    assert len(log.taken()) == 4
    f(put(P("a", "b"), -X))
    assert log.taken() == []


def test_one_device_shard_map_and_pmap(log):
    tap = lambda x: (hc.tap(log, x, on="shards"), x)[1]
    jax.jit(tap)(X)
    ((device, (index,), (block,)),) = log.taken()
    assert (device, index) == (jax.devices()[0], (slice(0, 4), slice(0, 8)))
    np.testing.assert_array_equal(block, X)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    jax.jit(jax.shard_map(tap, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(X)
    assert sorted(d.id for d, _, _ in log.taken()) == [0, 1, 2, 3]
    jax.pmap(tap)(X)
    assert sorted(d.id for d, _, _ in log.taken()) == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", ["bool", "int4", "bfloat16", "complex64"])
def test_dtypes(dtype, log):
    x = put(P("a", "b"), jnp.asarray(X % 2, dtype))
    jax.jit(lambda x: hc.tap(log, x, on="shards"))(x)
    for _, (index,), (block,) in log.taken():
        assert block.dtype == x.dtype
        np.testing.assert_array_equal(block, np.asarray(x)[index])


def test_errors_and_collect(log):
    def fail(x):
        raise LookupError(hc.current().device.id)

    jax.jit(lambda x: hc.tap(fail, x, on="shards"))(put(P("a", "b")))
    with pytest.raises(ExceptionGroup, match="4 taps failed") as caught:
        hc.barrier()
    assert sorted(e.args[0] for e in caught.value.exceptions) == [0, 1, 2, 3]
    with hc.testing.collect() as seen:
        jax.jit(lambda x: hc.tap(log, x, on="shards", tag="x"))(put(P("a")))
    assert seen["x"].shape == (2, 2, 8)
    log.taken()


def test_programs_and_callbacks_go(log, in_time):
    to_log = lambda x: log(x)
    gone = weakref.ref(to_log)
    f = jax.jit(lambda x, to_log=to_log: hc.tap(to_log, x, on="shards"))
    f(put(P("a", "b")))
    log.taken()
    del to_log
    gc.collect()
    assert gone() is not None
    del f
    jax.clear_caches()
    assert in_time(lambda: gone() is None)


def test_what_is_refused(log):
    x = put(P("a", "b"))
    rows = jax.vmap(lambda v: hc.tap(log, v, on="shards", rows="each"))
    with pytest.raises(hc.errors.SpecError, match="on='shards' and rows='each'"):
        jax.jit(rows)(x)
    mask = jax.vmap(lambda v: hc.tap(log, v, on="shards", where=v[0] > 1))
    with pytest.raises(hc.errors.SpecError, match="where= that differs between rows"):
        jax.jit(mask)(x)
    with pytest.raises(
        hc.errors.SpecError, match="on= of the tap `Log` should be 'once'"
    ):
        hc.tap(log, 1, on="some")
