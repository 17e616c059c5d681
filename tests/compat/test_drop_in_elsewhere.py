"""Drop-ins on platforms that the engine doesn't serve: JAX's own callback below.

No such platform is available here, so the CPU takes that path.
"""

from __future__ import annotations

import re

import elsewhere
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc


@pytest.fixture(autouse=True)
def through_jax():
    with elsewhere.drop_ins():
        yield


def test_all_of_them(capsys):
    seen = []

    def host(x):
        seen.append(isinstance(x, jax.Array))
        return x * 2

    @jax.jit
    def f(x):
        y = hc.pure_callback(host, x, x)
        y = hc.io_callback(host, y, y)
        y = hc.io_callback(host, y, y, ordered=True)
        hc.debug.callback(lambda v: seen.append("debug"), y)
        hc.debug.print("y = {}", y, ordered=True)
        return y

    x = jnp.arange(3.0)
    assert re.search("python_[cg]pu_callback", f.lower(x).as_text())
    np.testing.assert_array_equal(f(x), x * 8)
    jax.effects_barrier()
    assert sorted(map(str, seen)) == ["True"] * 3 + ["debug"]
    assert capsys.readouterr().out == "y = [ 0.  8. 16.]\n"


def test_partly_manual_regions_and_parts():
    """Debug callbacks run once along automatic axes, or on each part if requested."""
    plane = jax.make_mesh(
        (2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    seen = []

    def f(x):
        hc.debug.callback(lambda v: seen.append(v.shape), x)
        return x

    P = jax.sharding.PartitionSpec
    jax.jit(
        jax.shard_map(
            f,
            mesh=plane,
            in_specs=P("a"),
            out_specs=P("a"),
            axis_names={"a"},
            check_vma=False,
        )
    )(jnp.arange(8.0))
    jax.effects_barrier()
    assert seen == [(4,)] * 2
    seen.clear()
    place = jax.sharding.NamedSharding(plane, P(("a", "b")))
    f = lambda x: hc.debug.callback(lambda v: seen.append(v.shape), x, partitioned=True)
    jax.jit(f)(jax.device_put(jnp.arange(8.0), place))
    jax.effects_barrier()
    assert seen == [(2,)] * 4


def test_rows():
    x = jnp.arange(6.0).reshape(2, 3)
    f = jax.vmap(jax.vmap(lambda v: hc.io_callback(lambda r: r + 1, v, v)))
    np.testing.assert_array_equal(jax.jit(f)(x), x + 1)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_errors():
    def host(x):
        return np.zeros(7)

    f = jax.jit(lambda x: hc.pure_callback(host, x, x))
    with pytest.raises(jax.errors.JaxRuntimeError, match="Incorrect output shape"):
        f(1.0).block_until_ready()


def test_keys_arrive_as_their_blocks():
    seen = []
    f = jax.jit(lambda k: hc.debug.callback(lambda v: seen.append(v.shape), k))
    f(jax.random.key(0))
    jax.effects_barrier()
    assert seen == [(2,)]
