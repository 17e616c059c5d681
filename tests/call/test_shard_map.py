"""Calls inside shard_map and pmap: one for each shard, which knows its place."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from meshes import grid, line, over

import hostcall as hc

ORDERS = pytest.mark.parametrize("order", ["pure", "unordered", "ordered"])
X = np.arange(32, dtype=np.float32).reshape(4, 8)


class Host:
    """Doubles on the host; `seen` has (device, mesh coordinates, block) of each call."""

    def __init__(self, **options):
        self.options, self.seen = options, []

    def double(self, x):
        here = hc.current()
        self.seen.append((here.device, here.mesh_coords, x.copy()))
        return x * 2

    def __call__(self, x):
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return hc.call(self.double, result, x, **self.options)


# The block of device (i, j) of the grid.
BLOCKS = {
    P("x", "y"): lambda i, j: X[2 * i : 2 * i + 2, 4 * j : 4 * j + 4],
    P("x"): lambda i, j: X[2 * i : 2 * i + 2],
    P(("y", "x")): lambda i, j: X[2 * j + i][None],
    P(): lambda i, j: X,
}


@ORDERS
@pytest.mark.parametrize("spec", BLOCKS, ids=str)
def test_one_call_a_shard_with_its_block_and_place(spec, order):
    host = Host(order=order)
    # With effects, JAX takes a result as different on each device, whatever the block.
    strict = order == "pure" or spec in (P("x", "y"), P(("y", "x")))
    f = over(grid(), host, spec, check_vma=strict)
    np.testing.assert_array_equal(f(X), X * 2)
    jax.effects_barrier()
    assert len(host.seen) == 4
    for device, coords, block in host.seen:
        i, j = coords["x"], coords["y"]
        assert grid().devices[i, j] == device
        np.testing.assert_array_equal(block, BLOCKS[spec](i, j))
    assert {device for device, _, _ in host.seen} == set(jax.devices())


@ORDERS
def test_pmap_makes_one_call_a_device(order):
    host = Host(order=order)
    np.testing.assert_array_equal(jax.pmap(host, axis_name="i")(X), X * 2)
    jax.effects_barrier()
    assert sorted(coords["i"] for _, coords, _ in host.seen) == [0, 1, 2, 3]
    for device, coords, block in host.seen:
        assert device == jax.devices()[coords["i"]]
        np.testing.assert_array_equal(block, X[coords["i"]])


@pytest.mark.parametrize("order", ["unordered", "ordered"])
def test_a_call_without_results(order):
    host = Host()

    def body(x):
        hc.call(lambda v: host.double(v) is None or None, None, x, order=order)
        return x + 1

    np.testing.assert_array_equal(over(line(), body, P("x"))(X), X + 1)
    jax.effects_barrier()
    assert sorted(coords["x"] for _, coords, _ in host.seen) == [0, 1, 2, 3]


def empty_again(host, order):
    result = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    return {
        "call": lambda x: hc.call(host.double, result(x), x, order=order),
        "two calls": lambda x: [
            hc.call(host.double, result(x), x, order=order) for _ in range(2)
        ],
        "tap": lambda x: hc.tap(host.double, x, order=order),
        "a call without results": lambda x: hc.call(
            lambda v: host.double(v) is None or None, None, x, order=order
        ),
    }


@pytest.mark.parametrize("order", ["unordered", "ordered"])
@pytest.mark.parametrize("kind", ["call", "two calls", "tap", "a call without results"])
@pytest.mark.parametrize("outs", ["nothing", "the array", "the array, in a loop"])
def test_arrays_without_elements(order, kind, outs):
    """XLA drops a region that returns no element, unless it hands on a token."""
    host = Host()
    emit = empty_again(host, order)[kind]

    def body(x):
        emit(x)
        return None if outs == "nothing" else x

    each = over(line(), body, P("x"))

    def program(x):
        if outs != "the array, in a loop":
            return each(x)
        return lax.fori_loop(0, 2, lambda _, x: each(x), x)

    f = jax.jit(program)
    for _ in range(3):
        f(np.zeros((4, 0), np.float32))
    hc.barrier()
    rounds = 3 * (2 if "loop" in outs else 1) * (2 if "two" in kind else 1)
    places = sorted(coords["x"] for _, coords, _ in host.seen)
    assert places == sorted([*range(4)] * rounds)
    assert {block.shape for _, _, block in host.seen} == {(1, 0)}


@ORDERS
@pytest.mark.parametrize("length", [1, 7])
def test_in_a_scan(order, length):
    host = Host(order=order)

    def body(x):
        return lax.scan(lambda c, _: (host(c) - c + 1, None), x, None, length=length)[0]

    f = over(line(), body, P("x"), check_vma=True)
    np.testing.assert_array_equal(f(X), X + length)
    jax.effects_barrier()
    for k in range(4):
        blocks = [block for _, coords, block in host.seen if coords["x"] == k]
        np.testing.assert_array_equal(blocks, [X[k : k + 1] + n for n in range(length)])


@ORDERS
def test_a_collective_after_the_call(order):
    host = Host(order=order)
    f = over(line(), lambda x: lax.psum(host(x), "x"), P("x"), P(), check_vma=True)
    for _ in range(10):
        np.testing.assert_array_equal(f(X), (X * 2).sum(0, keepdims=True))
    jax.effects_barrier()
    assert len(host.seen) == 40


@ORDERS
def test_under_vmap(order):
    host = Host(order=order)
    f = over(line(), jax.vmap(host, in_axes=1, out_axes=1), P("x"), check_vma=True)
    np.testing.assert_array_equal(f(X), X * 2)
    jax.effects_barrier()
    for k in range(4):
        blocks = [block for _, coords, block in host.seen if coords["x"] == k]
        np.testing.assert_array_equal(blocks, X[k][:, None])


@ORDERS
def test_shards_with_control_flow_of_their_own(order):
    host = Host(order=order)

    def body(x):
        index = lax.axis_index("x")
        x = lax.cond(index % 2 == 1, host, lambda v: v, x)
        return lax.fori_loop(0, index, lambda _, v: host(v), x)

    f = over(line(), body, P("x"), check_vma=False)
    np.testing.assert_array_equal(f(X), X * np.array([[1], [4], [4], [16]]))
    jax.effects_barrier()
    calls = [coords["x"] for _, coords, _ in host.seen]
    assert [calls.count(k) for k in range(4)] == [0, 2, 2, 4]


@pytest.mark.parametrize("wrap", ["shard_map", "pmap"])
def test_the_callbacks_of_four_shards_can_meet(wrap):
    meeting = threading.Barrier(4, timeout=60)

    def host(x):
        meeting.wait()
        return x * 2

    def body(x):
        for _ in range(5):
            x = hc.call(host, x, x)
        return x

    f = over(line(), body, P("x")) if wrap == "shard_map" else jax.pmap(body)
    for _ in range(5):
        np.testing.assert_array_equal(f(X), X * 32)


# --- Failures ----------------------------------------------------------------------------


FAILING = """
    import sys, time
    import jax, numpy as np
    from jax.sharding import Mesh, PartitionSpec as P
    import hostcall as hc

    def host(x):
        count.append(1)
        if x[0] == -1:
            raise KeyError("one shard")
        return x

    def program(order, wrap):
        def body(x):
            y = hc.call(host, x, x, order=order)
            return jax.lax.psum(y, "i")

        if wrap == "pmap":
            pmapped = jax.pmap(body, axis_name="i")
            return lambda x: pmapped(x[:, None])[0]
        mesh = Mesh(np.array(jax.devices()), ("i",))
        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P()))

    good = np.arange(4, dtype=np.float32)
    for way in sys.argv[1:]:
        count, f = [], program(*way.split())
        for _ in range(3):
            bad = good.copy()
            bad[2] = -1
            try:
                with hc.reraise():
                    jax.block_until_ready(f(bad))
            except KeyError as error:
                assert error is hc.errors.last_error()
            else:
                raise AssertionError("no error")
            for _ in range(2):
                assert np.asarray(f(good)).tolist() == [6.0]
        jax.effects_barrier()
        assert len(count) == 4 * 9, (way, len(count))
        print(way)
"""


def test_one_failing_shard_before_a_collective(run_python):
    # In a separate process, since XLA aborts it if the other shards wait in vain.
    wraps, orders = ("shard_map", "pmap"), ORDERS.args[1]
    ways = [f"{order} {wrap}" for order in orders for wrap in wraps]
    assert run_python(FAILING, *ways).stdout.splitlines() == ways


def test_a_shard_that_fails_alone_is_reported_at_once(caplog):
    # If a collective followed, XLA would end the process after a minute, and this
    # record
    # would be all that the user sees.
    def host(x):
        raise KeyError("lonely")

    def shard(x):
        called = lambda v: hc.call(host, v, v)
        return lax.cond(lax.axis_index("x") == 2, called, lambda v: v, x)

    f = over(line(), shard, P("x"), check_vma=False)
    for _ in range(2):
        caplog.clear()
        with pytest.raises(KeyError, match="lonely"), hc.reraise():
            jax.block_until_ready(f(X))
        (record,) = (r for r in caplog.records if r.name == "hostcall")
        text = record.getMessage()
        assert (
            f"`{host.__qualname__}` failed on {jax.devices()[2]}, and the other" in text
        )
        assert "give the condition as where= in place of lax.cond" in text
        assert "KeyError: 'lonely'" in text


@ORDERS
def test_where_brings_all_shards_to_the_call(order):
    # The remedy that the error suggests, with a collective that would otherwise hang.
    count = []

    def host(x):
        count.append(x)
        if x[0, 0] < 0:
            raise KeyError("shared")
        return x + 1

    def shard(x):
        chosen = lax.axis_index("x") == 2
        return lax.psum(hc.call(host, x, x, where=chosen, order=order), "x")

    f = over(line(), shard, P("x"), P(), check_vma=False)
    for _ in range(2):
        with pytest.raises(KeyError, match="shared"), hc.reraise():
            jax.block_until_ready(f(-X - 1))
        np.testing.assert_array_equal(f(X), X[2:3] + 1)
    assert len(count) == 4


@ORDERS
def test_a_callback_that_starts_a_program_over_its_own_mesh(order):
    other = over(line(), lambda x: lax.psum(x, "x"), P("x"), P())
    np.testing.assert_array_equal(other(X), X.sum(0, keepdims=True))  # on the fast path

    def host(x):
        if x[0, 0] >= 0:
            np.asarray(other(jnp.asarray(X)))
        return x

    f = over(line(), lambda x: hc.call(host, x, x, order=order), P("x"))
    for _ in range(3):
        with (
            pytest.raises(hc.errors.DeadlockError, match="Compute with NumPy"),
            hc.reraise(),
        ):
            jax.block_until_ready(f(X))
        np.testing.assert_array_equal(f(X - 100), X - 100)
        np.testing.assert_array_equal(other(X), X.sum(0, keepdims=True))


F32 = jax.ShapeDtypeStruct((), np.float32)

# --- What is refused -----------------------------------------------------------------------


@pytest.mark.parametrize("wrap", ["shard_map", "pmap"])
def test_a_device_is_refused_where_each_device_calls(wrap):
    host = Host(on=jax.devices()[0])
    f = over(line(), host, P("x")) if wrap == "shard_map" else jax.pmap(host)
    with pytest.raises(ValueError, match="inside shard_map or pmap, where each device"):
        f(X)


@pytest.mark.parametrize("others", [False, True], ids=["ordered", "unordered"])
@pytest.mark.parametrize("branch", ["cond", "switch", "inner jit", "cond in scan"])
def test_a_token_alone_in_a_branch_is_refused(branch, others):
    """XLA would end the process. An unordered call has a token if there are others."""
    order = "unordered" if others else "ordered"
    call = lambda: hc.call(lambda: np.float32(1), F32, order=order)[None]
    each = jax.shard_map(
        call, mesh=line(), in_specs=(), out_specs=P("x"), check_vma=False
    )

    def choose(p):
        if branch == "cond":
            return jax.lax.cond(p, each, lambda: jnp.zeros(4))
        if branch == "inner jit":
            return jax.lax.cond(p, jax.jit(each), lambda: jnp.zeros(4))
        return jax.lax.switch(p.astype(int), [lambda: jnp.zeros(4), each])

    def program(x):
        if others:
            hc.call(lambda: None, None, order="unordered")
        if branch == "cond in scan":
            return jax.lax.scan(lambda c, i: (choose(i > 0), None), x, jnp.arange(2))[0]
        return choose(x.sum() > 0)

    wanted = "uses no array that has elements, in a branch of lax.cond.*Give the"
    with pytest.raises(hc.errors.HostcallError, match=wanted):
        jax.jit(program)(jax.device_put(jnp.ones(4), jax.NamedSharding(line(), P("x"))))


@pytest.mark.parametrize("order", ["unordered", "ordered"])
def test_an_array_without_elements_alone_in_a_branch_is_refused(order):
    each = over(line(), Host(order=order), P("x"))
    wanted = "uses no array that has elements, in a branch of lax.cond.*Give the"
    with pytest.raises(hc.errors.HostcallError, match=wanted):
        jax.jit(lambda p, x: lax.cond(p, each, jnp.copy, x))(True, np.zeros((4, 0)))


def test_the_array_that_the_message_asks_for():
    got = lambda v: hc.call(lambda v: np.float32(7), F32, v, order="ordered")[None]
    each = jax.shard_map(
        got, mesh=line(), in_specs=P(), out_specs=P("x"), check_vma=False
    )
    f = jax.jit(
        lambda p: jax.lax.cond(p, lambda: each(jnp.zeros(())), lambda: jnp.zeros(4))
    )
    np.testing.assert_array_equal(f(True), np.full(4, 7))


def test_a_failing_shard_of_a_mesh_without_devices():
    """No device is known at lowering, but the other shards still learn of the failure."""

    def host(v):
        if v[0] == 2:
            raise ZeroDivisionError("two")
        return v

    spec = jax.ShapeDtypeStruct((1,), np.float32)
    f = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(hc.call(host, spec, x), "x"),
            mesh=line().abstract_mesh,
            in_specs=jax.P("x"),
            out_specs=jax.P(),
        )
    )
    x = jax.device_put(jnp.arange(4.0), jax.NamedSharding(line(), jax.P("x")))
    with pytest.raises(ZeroDivisionError, match="two"), hc.reraise():
        jax.block_until_ready(f(x))
    np.testing.assert_array_equal(f(x + 3), [18])


def test_jaxs_own_callbacks_compute_on_threads_that_made_a_call():
    """The settings that a pure call leaves on XLA's threads don't affect them."""
    host, seen = Host(), []

    def row(x):
        y = host(x)
        jax.debug.callback(lambda v: seen.append(float(jnp.sum(v))), y)
        return y

    f = over(line(), row, P("x"))
    for _ in range(5):
        np.testing.assert_array_equal(f(X), X * 2)
        jax.effects_barrier()
    want = [float(part.sum()) for part in np.split(X * 2, 4)]
    assert sorted(seen) == sorted(want * 5)
