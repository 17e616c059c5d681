"""Calls in programs over several devices, with collectives before and after them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import hostcall as hc

SCALAR = jax.ShapeDtypeStruct((), np.float32)
X = np.arange(8, dtype=np.float32)


@pytest.fixture(params=[2, 4])
def sharded(request):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: request.param]), ("x",))
    return jax.device_put(X, NamedSharding(mesh, P("x")))


@pytest.mark.parametrize("order", ["pure", "unordered", "ordered"])
def test_a_collective_after_the_call(sharded, order):
    @jax.jit
    def f(x):
        scale = hc.call(lambda s: s + 1, SCALAR, x.sum(), order=order)
        return (x * scale).sum()

    for _ in range(20):
        assert f(sharded) == (X * (X.sum() + 1)).sum()


@pytest.mark.parametrize("order", ["pure", "unordered", "ordered"])
def test_collectives_between_calls_in_a_loop(sharded, order):
    @jax.jit
    def f(x):
        def body(_, v):
            return v / hc.call(lambda s: s, SCALAR, v.sum(), order=order)

        return jax.lax.fori_loop(0, 5, body, x)

    want = X
    for _ in range(5):
        want = want / want.sum()
    np.testing.assert_allclose(f(sharded), want, rtol=1e-5)


def test_runs_are_kept_apart(sharded):
    @jax.jit
    def f(x):
        return x + hc.call(lambda s: s, SCALAR, x.sum())

    # jax 0.10.2 hangs with many such programs in flight, with or without a call
    # (docs/design/devices.md).
    settle = jax.block_until_ready if jax.__version_info__ < (0, 12) else lambda y: y
    outs = [settle(f(sharded * i)) for i in range(20)]
    for i, out in enumerate(outs):
        np.testing.assert_allclose(out, X * i + (X * i).sum())


def test_a_parallel_call_refuses_a_program_over_its_own_devices(sharded):
    inner = jax.jit(lambda v: v * 2)
    inner(sharded)

    def host(v):
        return np.asarray(inner(sharded))[0] + v

    rows = jax.jit(
        lambda x: jax.vmap(lambda v: hc.call(host, v, v, vmap_method="parallel"))(
            x * jnp.float32(1)
        )
    )
    with pytest.raises(hc.errors.DeadlockError), hc.reraise():
        rows(sharded).block_until_ready()
