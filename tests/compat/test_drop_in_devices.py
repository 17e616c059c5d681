"""Drop-ins in programs over several devices."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import jobs
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import hostcall as hc

P = PartitionSpec
KINDS = {
    "pure": hc.pure_callback,
    "io": hc.io_callback,
    "ordered": lambda *args, **kw: hc.io_callback(*args, ordered=True, **kw),
}


@pytest.fixture
def sharding():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return NamedSharding(mesh, P("x"))


@pytest.mark.parametrize("number", [None, 0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_once_on_the_whole_value(kind, number, sharding):
    """The requested device calls, and the program's text names it."""
    seen = []

    def host(x):
        seen.append((x.shape, hc.current().device))
        return np.asarray(x) * 2

    device = jax.devices()[number or 0]
    place = None if number is None else SingleDeviceSharding(device)
    f = jax.jit(
        lambda x: KINDS[kind](host, x, x, sharding=place),
        in_shardings=sharding,
        out_shardings=sharding,
    )
    x = jnp.arange(8.0)
    out = f(x)
    np.testing.assert_array_equal(out, x * 2)
    assert out.sharding == sharding
    jax.effects_barrier()
    assert seen == [((8,), device)]
    text = f.lower(x).as_text()
    assert f"#sdy.sharding_per_value<[<@maximal_mesh_{device.id}, []>]>" in text


def test_a_device_outside_of_the_program(sharding):
    mesh = jax.make_mesh(
        (2,),
        ("x",),
        devices=jax.devices()[:2],
        axis_types=(jax.sharding.AxisType.Auto,),
    )
    place = SingleDeviceSharding(jax.devices()[3])
    f = jax.jit(
        lambda x: hc.pure_callback(np.sin, x, x, sharding=place),
        in_shardings=NamedSharding(mesh, P("x")),
    )
    with pytest.raises(ValueError, match="not in"):  # 0.10: the text of list.index
        f(jnp.arange(4.0))


@pytest.mark.parametrize("kind", KINDS)
def test_shard_map_calls_once_a_shard(kind, sharding):
    seen = collections.defaultdict(list)

    def host(x):
        seen[hc.current().device.id].append(np.asarray(x).tolist())
        return np.asarray(x) + 1

    f = jax.jit(
        jax.shard_map(
            lambda x: KINDS[kind](host, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
            mesh=sharding.mesh,
            in_specs=P("x"),
            out_specs=P("x"),
            check_vma=False,
        )
    )
    x = jnp.arange(8.0)
    np.testing.assert_array_equal(f(x), x + 1)
    jax.effects_barrier()
    assert seen == {d: [[2.0 * d, 2.0 * d + 1]] for d in range(4)}


def test_sharding_means_nothing_inside_shard_map(sharding):
    place = SingleDeviceSharding(jax.devices()[0])
    f = jax.shard_map(
        lambda x: hc.pure_callback(np.sin, x, x, sharding=place),
        mesh=sharding.mesh,
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=False,
    )
    with pytest.raises(NotImplementedError, match="do not support specifying sharding"):
        jax.jit(f)(jnp.arange(8.0))


@pytest.fixture
def plane():
    return jax.make_mesh(
        (2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )


def test_partly_manual_regions(plane):
    """Callbacks with results are refused; debug callbacks run once along the other
    axes.
    """
    seen = []

    def region(f):
        return jax.jit(
            jax.shard_map(
                f,
                mesh=plane,
                in_specs=P("a"),
                out_specs=P("a"),
                axis_names={"a"},
                check_vma=False,
            )
        )

    x = jnp.arange(8.0)
    with pytest.raises(NotImplementedError, match="all mesh axes are partitioned"):
        region(lambda x: hc.pure_callback(np.sin, x, x))(x)

    def f(x):
        hc.debug.callback(lambda v: seen.append(np.asarray(v).tolist()), x)
        return x * 2

    np.testing.assert_array_equal(region(f)(x), x * 2)
    jax.effects_barrier()
    assert sorted(seen) == [[0, 1, 2, 3], [4, 5, 6, 7]]


# --- partitioned=True -------------------------------------------------------------------


def collector():
    seen = collections.defaultdict(list)

    def host(*arrays):
        seen[hc.current().device.id].append([np.asarray(a).tolist() for a in arrays])

    return seen, host


def test_partitioned_each_device_calls_for_its_part(sharding):
    seen, host = collector()
    f = jax.jit(lambda x: hc.debug.callback(host, x, x * 2, partitioned=True))
    x = jax.device_put(jnp.arange(8.0), sharding)
    for _ in range(2):
        f(x)
    jax.effects_barrier()
    parts = {d: [[2.0 * d, 2.0 * d + 1], [4.0 * d, 4.0 * d + 2]] for d in range(4)}
    assert seen == {d: [part] * 2 for d, part in parts.items()}
    assert "all-gather" not in f.lower(x).compile().as_text()


def test_partitioned_of_a_value_that_all_have(sharding):
    seen, host = collector()
    f = jax.jit(lambda x: hc.debug.callback(host, x.sum(), partitioned=True))
    f(jax.device_put(jnp.arange(8.0), sharding))
    jax.effects_barrier()
    assert seen == {d: [[28.0]] for d in range(4)}


def test_partitioned_under_vmap(sharding):
    seen, host = collector()
    f = jax.jit(jax.vmap(lambda x: hc.debug.callback(host, x, partitioned=True)))
    place = NamedSharding(sharding.mesh, P(None, "x"))
    f(jax.device_put(jnp.arange(8.0).reshape(2, 4), place))
    jax.effects_barrier()
    assert {d: sorted(calls) for d, calls in seen.items()} == {
        d: [[[float(d)]], [[4.0 + d]]] for d in range(4)
    }


def test_partitioned_with_static_arguments_and_an_error(sharding):
    def host(x, name, *, scale):
        assert (name, float(scale)) == ("loss", 2.0)
        if (np.asarray(x) > 5).any():
            raise ValueError(f"{name} is too large")

    def f(x):
        hc.debug.callback(host, x, "loss", scale=2.0, partitioned=True)
        return x

    f = jax.jit(f)
    f(jax.device_put(jnp.zeros(8), sharding)).block_until_ready()
    with pytest.raises(jax.errors.JaxRuntimeError, match="loss is too large"):
        f(jax.device_put(jnp.arange(8.0), sharding)).block_until_ready()
        jax.effects_barrier()
    f(jax.device_put(jnp.zeros(8), sharding)).block_until_ready()


def test_partitioned_on_one_device():
    seen = []
    jax.jit(lambda x: hc.debug.callback(seen.append, x, partitioned=True))(1.0)
    jax.effects_barrier()
    assert [float(v) for v in seen] == [1.0]


# --- Processes --------------------------------------------------------------------------

PROCESS = """
    import os, sys
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    import jax, jax.numpy as jnp, numpy as np
    me, port = int(sys.argv[1]), sys.argv[2]
    jax.distributed.initialize(f"localhost:{port}", 2, me)
    import hostcall as hc
    from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P("x"))
    x = jax.make_array_from_callback(
        (8,), sharding, lambda index: np.arange(8.0, dtype="float32")[index]
    )
    seen = []

    def host(v):
        seen.append(np.asarray(v).tolist())
        return np.asarray(v) * 5

    def tree(v):
        seen.append("tree")
        return [v > 3, v.astype(complex).astype("complex64"), v.reshape(2, 4)]

    def run(f):
        out = jax.jit(f, in_shardings=sharding, out_shardings=sharding)(x)
        got = {s.index[0].start: s.data.tolist() for s in out.addressable_shards}
        return got

    last = SingleDeviceSharding(jax.devices()[3])
    mine = {4 * me: [20.0 * me, 20.0 * me + 5], 4 * me + 2: [20.0 * me + 10, 20.0 * me + 15]}
    assert run(lambda x: hc.io_callback(host, x, x)) == mine
    assert run(lambda x: hc.pure_callback(host, x, x)) == mine
    assert run(lambda x: hc.io_callback(host, x, x, ordered=True)) == mine
    jax.effects_barrier()
    calls = len(seen)
    assert run(lambda x: hc.call(host, x, x, on=jax.devices()[-1])) == mine
    spec = [jnp.zeros(8, bool), jnp.zeros(8, "complex64"), jnp.zeros((2, 4))]
    total = lambda a, b, c: a + b.real + c.reshape(8)
    run(lambda x: total(*hc.call(tree, spec, x, order="ordered")))
    jax.effects_barrier()
    assert all(v == list(np.arange(8.0)) for v in seen if v != "tree")
    print("calls", calls, len(seen) - calls)
"""


def test_several_processes(run_python):
    """One process calls, and its results reach all processes."""
    first, second = jobs.in_each(2, lambda me, port: run_python(PROCESS, str(me), port))
    assert first.stdout.endswith("calls 3 1\n")
    assert second.stdout.endswith("calls 0 1\n")
