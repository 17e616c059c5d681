"""on="once", on=device in one process, and what hc.current() says of it."""

from __future__ import annotations

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import hostcall as hc

ORDERS = pytest.mark.parametrize("order", ["unordered", "ordered"])
MODES = pytest.mark.parametrize("mode", [jax.jit, lambda f: f], ids=["jit", "eager"])
X = np.arange(32, dtype=np.float32).reshape(4, 8)


@pytest.fixture
def x():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
    return jax.device_put(X, NamedSharding(mesh, P("a", "b")))


@pytest.fixture
def taken():
    """A function to tap, and what it got: (hc.current(), value) of each delivery."""
    seen = []

    def see(value):
        seen.append((hc.current(), value))

    def take():
        hc.barrier()
        found, seen[:] = seen[:], []
        return found

    return see, take


@ORDERS
@pytest.mark.parametrize("number", range(4))
def test_a_device_taps_the_whole_value(number, order, x, taken):
    see, take = taken
    device = jax.devices()[number]
    f = jax.jit(lambda x: (hc.tap(see, x, on=device, order=order), x * 2)[1])
    for _ in range(2):
        np.testing.assert_array_equal(f(x), X * 2)
        ((here, value),) = take()
        assert here.device == device
        assert here.index is None
        np.testing.assert_array_equal(value, X)


@MODES
def test_a_program_on_one_device(mode, taken):
    see, take = taken
    for on in ("once", "shards", jax.devices()[0]):
        mode(lambda v, on=on: hc.tap(see, v, on=on))(jnp.float32(3))
        ((here, value),) = take()
        assert value == 3
        assert here.devices == (jax.devices()[0],)
        assert (here.process, here.processes) == (0, 1)


def test_current_has_the_devices_of_the_program(x, taken):
    see, take = taken

    def call(v):
        see(v)
        return v

    jax.jit(lambda x: hc.call(call, x, x, order="unordered"))(x)
    ((here, _),) = take()
    assert here.devices == tuple(jax.devices())
    assert here.block is None
    mesh = Mesh(np.array(jax.devices()[::-1]), ("d",))
    tap = lambda v: (hc.tap(see, v), v)[1]
    over = P("d")
    jax.jit(jax.shard_map(tap, mesh=mesh, in_specs=over, out_specs=over))(X)
    for here, _ in take():
        assert here.devices == tuple(jax.devices()[::-1])
        assert here.devices[here.mesh_coords["d"]] == here.device
    jax.jit(lambda x: hc.tap(see, x, on="shards"))(x)
    for here, value in take():
        assert here.devices == tuple(jax.devices())
        ((row, column),) = here.block
        np.testing.assert_array_equal(
            value, X[2 * row : 2 * row + 2, 4 * column : 4 * column + 4]
        )


def test_prints_of_shards_and_of_a_device(x):
    out = io.StringIO()

    @jax.jit
    def f(x):
        hc.print("shard {:.0f}", x.sum(), on="shards", file=out)
        hc.print("total {:.0f}", x.sum(), on=jax.devices()[2], file=out)

    f(x)
    hc.barrier()
    assert sorted(out.getvalue().splitlines()) == [
        "shard 496",
        "total 496",
    ]


def test_what_is_refused(x, taken):
    see, _ = taken
    with pytest.raises(
        hc.errors.SpecError,
        match="'once', 'shards' or a device, such as jax.devices.*got 'all'",
    ):
        hc.tap(see, x, on="all")
    with pytest.raises(hc.errors.SpecError, match="on= of the tap .* got 'all'"):
        hc.print("{}", x, on="all")
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    half = jax.device_put(X, NamedSharding(mesh, P("x")))
    with pytest.raises(
        hc.errors.HostcallError, match="has on=.*not among the devices of the program"
    ):
        jax.jit(lambda x: hc.tap(see, x, on=jax.devices()[3]))(half)
    each = jax.shard_map(
        lambda x: (hc.tap(see, x, on=jax.devices()[0]), x)[1],
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P("x"),
    )
    with pytest.raises(ValueError, match="on=device inside shard_map or pmap"):
        jax.jit(each)(X)
