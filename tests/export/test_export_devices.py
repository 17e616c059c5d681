"""Exported programs over several devices, on other devices than they came from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import registered as r
from registered import tapped

import hostcall as hc

pytest.importorskip("flatbuffers")
from fuzz.stablehlo import mlir_of, texts_in

X = np.arange(4, dtype=np.float32)
P = jax.P("x")
PAIRS = {"low to high": (0, 2), "high to low": (2, 0), "the same": (2, 2)}


def on_two(first):
    """X over the devices `first` and `first + 1`."""
    devices = np.array(jax.devices()[first : first + 2])
    return jax.device_put(X, jax.NamedSharding(jax.sharding.Mesh(devices, ("x",)), P))


def carried(f, pair):
    """(what `f` gives on the second devices, exported on the first; the taps)."""
    there, here = (on_two(first) for first in PAIRS[pair])
    loaded = hc.load(bytes(hc.export(jax.jit(f))(there)))
    hc.barrier()
    r.SEEN.clear()
    got = jax.block_until_ready(jax.jit(loaded.call)(here))
    hc.barrier()
    return got, sorted(r.SEEN)


def masked(x):
    hc.tap(r.seen, x, where=x[0] > 0)  # False
    hc.tap(r.seen, x + 1, where=x[1] > 0)
    return x


def ordered(x):
    hc.tap(r.seen, x, order="ordered")
    return hc.call(r.sine, x, x, order="ordered") + x


def rows(x):
    jax.vmap(lambda v: hc.tap(r.seen, v, rows="each"))(x)
    jax.vmap(lambda v: hc.tap(r.seen, v, rows="each", where=v > 1))(x)
    return x


def batches(x):
    jax.vmap(lambda v: hc.tap(r.seen, v))(x)
    jax.vmap(lambda v: hc.tap(r.seen, v, where=v > 1))(x)
    return x


def always(x):
    for k in range(2):
        hc.tap(r.seen, x + k, every=5, always=x[0] == k)
    return x


TAPS = {
    "tap": (tapped, [6.0]),
    "masked": (masked, [10.0]),
    "through": (lambda x: hc.tap_through(r.seen, x) * 1, [6.0]),
    "ordered": (ordered, [6.0]),
    "rows": (rows, [0.0, 1.0, 2.0, 2.0, 3.0, 3.0]),
    "batches": (batches, [5.0, 6.0]),
    "always": (always, [6.0, 10.0]),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", TAPS)
def test_one_device_taps(name, pair):
    f, wanted = TAPS[name]
    got, seen = carried(f, pair)
    assert seen == wanted
    np.testing.assert_allclose(got, f(X), rtol=1e-6)
    hc.barrier()


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("order", ["pure", "unordered", "ordered"])
def test_one_device_calls(order, pair):
    tag = f"{order} {pair}"
    got, _ = carried(lambda x: hc.call(r.sine, x, x, order=order, tag=tag), pair)
    np.testing.assert_allclose(got, np.sin(X), rtol=1e-6)
    assert hc.monitor.stats()[tag].calls == 1


def test_another_platform():
    """Exported for CUDA too, as on a machine that doesn't have its devices."""
    loaded = hc.load(
        bytes(hc.export(jax.jit(tapped), platforms=("cpu", "cuda"))(on_two(2)))
    )
    r.SEEN.clear()
    jax.jit(loaded.call)(on_two(0))
    hc.barrier()
    assert r.SEEN == [6.0]


@pytest.mark.parametrize("pair", PAIRS)
def test_every_device_calls_in_a_shard_map(pair):
    # XLA's threads then have host code's settings, among them its default device.
    many = [jax.jit(lambda x: hc.call(r.sine, x, x)) for _ in range(2)]
    jax.block_until_ready([f(on_two(PAIRS[pair][0])) for f in many for _ in range(4)])
    there = on_two(PAIRS[pair][0])

    @jax.shard_map(mesh=there.sharding.mesh, in_specs=P, out_specs=P)
    def f(x):
        hc.tap(r.seen, x)
        return hc.call(r.sine, x, x)

    got, seen = carried(f, pair)
    assert seen == [1.0, 5.0]
    np.testing.assert_allclose(got, np.sin(X), rtol=1e-6)


@pytest.mark.parametrize(
    "f",
    [
        lambda d, x: hc.call(r.sine, x, x, on=d),
        lambda d, x: (hc.tap(r.seen, x, on=d), x)[1],
    ],
)
def test_a_device_does_not_travel(f):
    x = on_two(2)
    with pytest.raises(hc.errors.ExportError, match=r"it has on=.*Leave out on="):
        hc.export(jax.jit(lambda x: f(jax.devices()[3], x)))(x)


def test_a_mesh_with_more_devices_than_there_are():
    x = on_two(2)
    mesh = x.sharding.mesh
    f = jax.shard_map(
        lambda x: hc.call(r.sine, x, x), mesh=mesh, in_specs=P, out_specs=P
    )
    loaded = hc.export(jax.jit(f))(x)
    text = text_of(loaded)
    changed = text.replace('[["x"],[2],[2,3]]', '[["x"],[99],[2,3]]')
    assert changed != text
    call = jax.ffi.ffi_call("hostcall_call", jax.ShapeDtypeStruct((2,), X.dtype))
    with pytest.raises(jax.errors.JaxRuntimeError, match="over 99 devices, and this"):
        call(jnp.ones(2), text=changed)


def text_of(exported):
    (text,) = texts_in(mlir_of(exported.exported))
    return text
