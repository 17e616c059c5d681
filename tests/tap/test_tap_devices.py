"""Taps over several devices: one delivery for each shard, or one of the whole value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import grid, line, over

import hostcall as hc

ORDERS = pytest.mark.parametrize("order", ["unordered", "ordered"])
X = np.arange(32, dtype=np.float32).reshape(4, 8)
NUMBERS = np.arange(4, dtype=np.float32)


class Taps:
    """Deliveries as (what `hc.current()` says, the arrays)."""

    def __init__(self, order="unordered", **options):
        self.order, self.options = order, options
        self.seen = []

    def __call__(self, *arrays, **more):
        hc.tap(self.host, *arrays, order=self.order, **self.options, **more)

    def through(self, x):
        return hc.tap_through(self.host, x, **self.options)

    def host(self, *arrays):
        self.seen.append((hc.current(), arrays))

    def taken(self):
        hc.barrier()
        taken, self.seen = self.seen, []
        return taken

    def arrays(self):
        """The one array of each delivery."""
        return [array for _, (array,) in self.taken()]

    def by_device(self):
        """Maps a device's number to the one array of each of its deliveries."""
        found = {device.id: [] for device in jax.devices()}
        for current, (array,) in self.taken():
            found[current.device.id].append(array)
        return found


def doubling(taps):
    return lambda x: (taps(x), x * 2)[1]


# --- Each shard its own --------------------------------------------------------------

# The block of device (i, j) of the grid.
BLOCKS = {
    P("x", "y"): lambda i, j: X[2 * i : 2 * i + 2, 4 * j : 4 * j + 4],
    P("x"): lambda i, j: X[2 * i : 2 * i + 2],
    P(("y", "x")): lambda i, j: X[2 * j + i][None],
    P(): lambda i, j: X,
}


@ORDERS
@pytest.mark.parametrize("spec", BLOCKS, ids=str)
@pytest.mark.parametrize("through", [False, True], ids=["tap", "tap_through"])
def test_shard_map_taps_each_shard_which_knows_its_place(through, spec, order):
    taps = Taps(order)
    body = (lambda x: taps.through(x) * 2) if through else doubling(taps)
    y = over(grid(), body, spec)(X)  # alive until the barrier, see the next test
    np.testing.assert_array_equal(y, X * 2)
    taken = taps.taken()
    assert {current.device for current, _ in taken} == set(jax.devices())
    assert len({current.run for current, _ in taken}) == 1
    for current, (block,) in taken:
        i, j = current.mesh_coords["x"], current.mesh_coords["y"]
        assert current.device == grid().devices[i, j]
        assert current.order == ("pure" if through else order)
        np.testing.assert_array_equal(block, BLOCKS[spec](i, j))
    assert len(taken) == 4


def test_the_barrier_waits_for_a_copy_that_reading_the_result_does_not_wait_for():
    taps = Taps()

    def body(x):  # the last device, whose block is a copy, comes long after the others
        last = lax.axis_index(("x", "y")) == 3
        x = lax.fori_loop(0, jnp.where(last, 3_000_000, 0), lambda _, v: v + 1, x)
        return taps.through(x * 0)

    y = over(grid(), body, P("x"), check_vma=False)(X)
    np.testing.assert_array_equal(y, X * 0)
    assert sorted(current.device.id for current, _ in taps.taken()) == [0, 1, 2, 3]


@ORDERS
@pytest.mark.parametrize("through", [False, True], ids=["tap", "tap_through"])
def test_pmap_taps_each_device(through, order):
    taps = Taps(order)
    body = (lambda x: taps.through(x) * 2) if through else doubling(taps)
    for _ in range(2):
        np.testing.assert_array_equal(jax.pmap(body, axis_name="i")(X), X * 2)
        taken = taps.taken()
        assert sorted(c.mesh_coords["i"] for c, _ in taken) == [0, 1, 2, 3]
        for current, (block,) in taken:
            assert current.device == jax.devices()[current.mesh_coords["i"]]
            np.testing.assert_array_equal(block, X[current.mesh_coords["i"]])


@ORDERS
@pytest.mark.parametrize("wrap", ["shard_map", "pmap"])
@pytest.mark.parametrize("loop", ["scan", "while", "unrolled"])
def test_each_device_keeps_its_order_in_loops(loop, wrap, order):
    taps = Taps(order)
    step = lambda c: (taps(c), c + 1)[1]

    def body(x):
        if loop == "scan":
            return lax.scan(lambda c, _: (step(c), None), x, None, length=20)[0]
        if loop == "while":
            return lax.while_loop(lambda c: c.max() % 100 < 20, step, x)
        for _ in range(20):
            x = step(x)
        return x

    xs = NUMBERS * 100
    if wrap == "pmap":
        f = jax.pmap(body)
    else:
        f = over(line(), body, P("x"), check_vma=False)
    for _ in range(3):
        np.testing.assert_array_equal(f(xs), xs + 20)
    for number, found in taps.by_device().items():
        assert np.ravel(found).tolist() == [100 * number + n for n in range(20)] * 3


@ORDERS
def test_shards_with_conditions_of_their_own(order):
    taps = Taps(order)

    def body(x):
        index = lax.axis_index("x")
        x = lax.cond(index % 2 == 1, doubling(taps), lambda v: v, x)
        hc.tap(taps.host, -x, order=order, where=index == 2)
        return lax.fori_loop(0, index, lambda _, v: doubling(taps)(v), x)

    f = over(line(), body, P("x"), check_vma=False)
    np.testing.assert_array_equal(f(NUMBERS + 1), [1, 8, 12, 64])
    got = {n: sorted(np.ravel(a).tolist()) for n, a in taps.by_device().items()}
    assert got == {0: [], 1: [2, 4], 2: [-3, 3, 6], 3: [4, 8, 16, 32]}


@ORDERS
@pytest.mark.parametrize("rows", ["each", "batched"])
def test_vmap_inside_shard_map(rows, order):
    taps = Taps(order, rows=rows)
    f = over(line(), jax.vmap(doubling(taps), in_axes=1, out_axes=1), P("x"))
    np.testing.assert_array_equal(f(X), X * 2)
    for number, found in taps.by_device().items():
        np.testing.assert_array_equal(np.ravel(found), X[number])
        assert len(found) == (8 if rows == "each" else 1)


@ORDERS
def test_derivatives_inside_shard_map(order):
    taps = Taps(order)

    def body(x):
        inner = lambda v: hc.derivatives.tap_cotangent(
            taps.host, v * v, order=order
        ).sum()
        taps(x)
        return jax.grad(lambda v: 3 * inner(v))(x)

    np.testing.assert_allclose(over(line(), body, P("x"))(NUMBERS), 6 * NUMBERS)
    got = {n: sorted(np.ravel(a).tolist()) for n, a in taps.by_device().items()}
    assert got == {n: sorted([float(n), 3.0]) for n in range(4)}


# --- jit over sharded arrays: once, the whole value ----------------------------------

SPECS = [P("x", "y"), P("x"), P(None, "y"), P(("y", "x")), P()]


@ORDERS
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_jit_delivers_the_whole_value_once(spec, order):
    taps = Taps(order)
    f = jax.jit(doubling(taps))
    x = jax.device_put(X, NamedSharding(grid(), spec))
    for _ in range(3):
        np.testing.assert_array_equal(f(x), X * 2)
    taken = taps.taken()
    assert [current.mesh_coords for current, _ in taken] == [{}] * 3
    np.testing.assert_array_equal([array for _, (array,) in taken], [X] * 3)


@ORDERS
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_jit_over_sharded_arrays_in_loops_and_conditions(spec, order):
    taps = Taps(order)

    @jax.jit
    def f(x):
        def turn(i, c):
            taps(c)
            return lax.cond(i == 2, lambda v: (taps(-v), v)[1], lambda v: v, c) + 1

        return lax.fori_loop(0, 4, turn, x)

    x = jax.device_put(X, NamedSharding(grid(), spec))
    np.testing.assert_array_equal(f(x), X + 4)
    got = taps.arrays()
    want = [X, X + 1, X + 2, -(X + 2), X + 3]
    if order == "unordered":  # nothing orders a branch relative to its iteration
        key = lambda array: array.ravel().tolist()
        got, want = sorted(got, key=key), sorted(want, key=key)
    np.testing.assert_array_equal(got, want)


@ORDERS
@pytest.mark.parametrize("spec", [P("x"), P()], ids=str)
def test_jit_over_sharded_arrays_with_where_vmap_and_grad(spec, order):
    taps = Taps(order, rows="each")
    row = lambda v: (taps(v, where=v[0] > 8), (v**2).sum())[1]
    f = jax.jit(jax.grad(lambda x: jax.vmap(row)(x).sum()))
    x = jax.device_put(X, NamedSharding(line(), spec))
    np.testing.assert_allclose(f(x), 2 * X)
    np.testing.assert_array_equal(taps.arrays(), X[2:])


@ORDERS
def test_eager_taps_of_sharded_arrays(order):
    taps = Taps(order)
    for spec in SPECS:
        taps(jax.device_put(X, NamedSharding(grid(), spec)))
    np.testing.assert_array_equal(taps.arrays(), [X] * len(SPECS))


def test_ordered_taps_of_mixed_programs_keep_program_order():
    # All of them tap on the first device, in program order.
    taps = Taps("ordered")
    whole = jax.jit(lambda x, n: (taps(n), x @ x.T)[1])
    single = jax.jit(lambda n: (taps(n), taps(n + 0.25))[0])
    loop = jax.jit(lambda x, n: lax.fori_loop(0, 3, lambda i, c: (taps(n + i / 4), c)[1], x))  # fmt: skip
    sharded = jax.device_put(X, NamedSharding(grid(), P("x", "y")))
    for n in range(0, 40, 4):
        whole(sharded, float(n))  # nobody waits for this program
        single(n + 1.0)
        loop(sharded, n + 2.0)
        taps(np.float32(n + 3))
    want = [n + k for n in range(0, 40, 4) for k in (0, 1, 1.25, 2, 2.25, 2.5, 3)]
    assert [float(number) for number in taps.arrays()] == want


@pytest.mark.parametrize("wrap", ["shard_map", "pmap"])
def test_ordered_taps_of_shards_keep_program_order_on_each_device(wrap):
    taps = Taps("ordered")

    def dispatched(k):
        body = lambda x: (taps(x), taps(x + 0.5), x + k)[2]
        return jax.pmap(body) if wrap == "pmap" else over(line(), body, P("x"))

    programs = [dispatched(k) for k in range(3)]
    for n in range(30):
        programs[n % 3](NUMBERS + 10 * n)
    for number, found in taps.by_device().items():
        want = [number + 10 * n + half for n in range(30) for half in (0, 0.5)]
        assert np.ravel(found).tolist() == want


# --- tap_through, and single devices -------------------------------------------------


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_tap_through_of_sharded_values(wrap, spec):
    taps = Taps()
    x = jax.device_put(X, NamedSharding(grid(), spec))
    out = wrap(lambda v: taps.through({"a": v, "b": (v * 2,)}))(x)
    np.testing.assert_array_equal(out["a"], X)
    np.testing.assert_array_equal(out["b"][0], X * 2)
    assert out["a"].sharding.device_set == set(jax.devices())
    ((current, (tree,)),) = taps.taken()
    assert current.order == "pure"
    np.testing.assert_array_equal(tree["a"], X)
    np.testing.assert_array_equal(tree["b"][0], X * 2)


@ORDERS
@pytest.mark.parametrize("number", range(4))
def test_a_program_of_one_device_taps_there(number, order):
    taps = Taps(order)
    device = jax.devices()[number]
    jax.jit(doubling(taps))(jax.device_put(jnp.asarray(X), device))
    ((current, (array,)),) = taps.taken()
    assert (current.device, current.mesh_coords) == (device, {})
    np.testing.assert_array_equal(array, X)
