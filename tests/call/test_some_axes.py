"""Calls and taps in a shard_map that is manual over some mesh axes only.

Along the others the compiler splits the values. What is called gets the whole value
along them, once, as JAX's debug callbacks do.
"""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import hostcall as hc

X = np.arange(16, dtype=np.float32).reshape(4, 4)
IN_ORDER = jaxlib.version.__version_info__ >= (0, 11, 2)
NO_ORDER = "XLA aborts such programs before jaxlib 0.11.2, so they are refused"
HALVES = [X[:2].tolist(), X[2:].tolist()]


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))


def run(f, x=X, kind=AxisType.Auto):
    """`f` on each half of the rows; the compiler may split the columns."""
    place = mesh(kind)
    with jax.set_mesh(place):
        x = jax.device_put(x, NamedSharding(place, P("data", "model")))
        g = jax.shard_map(
            f, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
        )
        result = np.asarray(jax.jit(g)(x))
        jax.effects_barrier()
        hc.barrier()
    return result


def told(tell, f=None):
    return lambda v: (tell(v), v * 2)[1]


TELLS = {
    "tap": lambda see, v: hc.tap(see, v),
    "ordered tap": lambda see, v: hc.tap(see, v, order="ordered"),
    "tap of shards": lambda see, v: hc.tap(see, v, on="shards"),
    "tap with where": lambda see, v: hc.tap(see, v, where=v.sum() >= 0),
    "tap in cond": lambda see, v: jax.lax.cond(
        v.sum() >= 0, lambda: hc.tap(see, v), lambda: None
    ),
    "unordered call": lambda see, v: hc.call(see, None, v, order="unordered"),
    "ordered call": lambda see, v: hc.call(see, None, v, order="ordered"),
    "drop-in": lambda see, v: hc.debug.callback(see, v),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", TELLS)
def test_each_block_is_told_once(name, kind):
    if kind is AxisType.Explicit and name == "drop-in":
        pytest.skip("JAX refuses its own debug callbacks there too")
    if name.startswith("ordered") and not IN_ORDER:
        pytest.skip(NO_ORDER)
    seen = []
    tell = TELLS[name]
    got = run(
        told(lambda v: tell(lambda a: seen.append(np.asarray(a).tolist()), v)),
        kind=kind,
    )
    np.testing.assert_array_equal(got, X * 2)
    assert sorted(seen) == HALVES


def test_jaxs_own_tells_the_same():
    seen, own = [], []
    run(told(lambda v: hc.tap(lambda a: seen.append(a.tolist()), v)))
    run(
        told(
            lambda v: jax.debug.callback(
                lambda a: own.append(np.asarray(a).tolist()), v
            )
        )
    )
    assert sorted(seen) == sorted(own) == HALVES


@pytest.mark.skipif(not IN_ORDER, reason=NO_ORDER)
def test_taps_in_a_scan_are_in_order():
    seen = []

    def f(v):
        def body(carry, i):
            hc.tap(
                lambda i, a: seen.append((int(a[0, 0]), int(i))), i, v, order="ordered"
            )
            return carry, None

        return jax.lax.scan(body, v, jnp.arange(4))[0]

    run(f)
    for first in (0, 8):
        assert [i for a, i in seen if a == first] == [0, 1, 2, 3]
    assert len(seen) == 8


def double(v):
    return np.asarray(v) * 2


CALLS = {
    "pure": lambda v: hc.call(double, v, v),
    "ordered": lambda v: hc.call(double, v, v, order="ordered"),
    "unordered": lambda v: hc.call(double, v, v, order="unordered"),
    "where": lambda v: hc.call(double, v, v, where=v.sum() >= 0),
    "rows": lambda v: jax.vmap(lambda r: hc.call(double, r, r))(v),
    "rows with where": lambda v: jax.vmap(
        lambda r: hc.call(double, r, r, where=r.sum() >= 0)
    )(v),
    "rows at once": lambda v: jax.vmap(
        lambda r: hc.call(double, r, r, vmap_method="expand_dims")
    )(v),
    "host": lambda v: hc.host(double, result=hc.results.like(0))(v),
    "tap_through": lambda v: 2 * hc.tap_through(lambda a: None, v),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_results(name, kind):
    if name == "ordered" and not IN_ORDER:
        pytest.skip(NO_ORDER)
    np.testing.assert_array_equal(run(CALLS[name], kind=kind), X * 2)


@pytest.mark.skipif(IN_ORDER, reason="XLA compiles these since jaxlib 0.11.2")
@pytest.mark.parametrize("name", ["ordered tap", "ordered call"])
def test_order_is_refused_where_xla_would_abort(name):
    tell = TELLS[name]
    with pytest.raises(NotImplementedError, match="leave out order='ordered'"):
        run(told(lambda v: tell(lambda a: None, v)))


def test_a_function_runs_once_for_each_block():
    calls = []

    def host(v):
        calls.append(v.tolist())
        return v * 2

    run(lambda v: hc.call(host, v, v, order="unordered"))
    assert sorted(calls) == HALVES


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "int4", "bool"])
def test_results_arrive_bit_for_bit(dtype):
    want = np.asarray(jnp.array([-0.0, 1.0, 0.0, 1.0]).astype(dtype))
    if dtype == "float32":
        want = np.array([-0.0, np.inf, 0, 0], np.float32)
        want.view(np.uint32)[3] = 0x7FC12345  # a NaN with a payload
    spec = jax.ShapeDtypeStruct(want.shape, want.dtype)
    got = run(lambda v: hc.call(lambda: want, spec, order="unordered"))
    assert got.tobytes() == np.concatenate([want, want]).tobytes()


def test_gradients():
    f = hc.host(lambda v: (v * v).sum(), result=jax.ShapeDtypeStruct((), np.float32))
    f.defvjp(lambda v: ((v * v).sum(), v), lambda v, ct: (2 * v * ct,))
    np.testing.assert_array_equal(run(jax.grad(f)), X * 2)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_failure_reaches_all_devices():
    """The others would wait for the failed one in the collective that comes next."""

    def fail(v):
        if v[0, 0] == 0:
            raise ValueError("the first half")
        return v

    with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: the first half"):
        run(lambda v: jax.lax.pmax(hc.call(fail, v, v, order="unordered"), "data"))
    with contextlib.suppress(jax.errors.JaxRuntimeError, hc.errors.WatchError):
        jax.effects_barrier()
    with pytest.raises(hc.errors.WatchError, match="not finite"):
        run(lambda v: (hc.watch(v), v)[1], np.full_like(X, np.nan))
    with contextlib.suppress(jax.errors.JaxRuntimeError, hc.errors.WatchError):
        jax.effects_barrier()
    call = CALLS["ordered" if IN_ORDER else "unordered"]
    np.testing.assert_array_equal(run(call), X * 2)


def test_values_are_those_of_a_program_without_a_mesh():
    seen = []

    def f(v):
        hc.tap(lambda a: seen.append(a.tolist()), (v @ v.T).sum())
        return v * 2

    run(f)
    assert sorted(seen) == sorted(float((h @ h.T).sum()) for h in (X[:2], X[2:]))
