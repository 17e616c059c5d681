"""Programs over several devices under JAX's older partitioner, GSPMD.

`jax_use_shardy_partitioner=False` is what JAX's own issues advise as a workaround. The
oracle is the same program under Shardy, the default.
"""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import line

import hostcall as hc

S = jax.ShapeDtypeStruct((8,), np.float32)
seen = []


def double(v):
    return np.asarray(v) * 2


def see(v):
    seen.append(np.asarray(v).tolist())


def told(tell):
    """A function that tells, and doubles."""
    return lambda v: (tell(v), v * 2)[1]


def in_a_scan(tell):
    def f(v):
        def body(carry, i):
            tell(carry + i)
            return carry, None

        return jax.lax.scan(body, v, jnp.arange(3.0))[0] * 2

    return f


def over(f):
    return lambda v: jax.shard_map(f, mesh=line(), in_specs=P("x"), out_specs=P("x"))(v)


def differentiated(v):
    f = hc.host(lambda v: np.sum(v * v), result=jax.ShapeDtypeStruct((), np.float32))
    f.defvjp(lambda v: (np.sum(v * v), v), lambda v, ct: (2 * v * ct,))
    return jax.grad(f)(v)


def patched(v):
    with hc.patch_jax():
        return jax.pure_callback(double, S, v)


def fed(v):
    return v * hc.feed([np.float32(2)] * 2)()[0]


PROGRAMS = {
    "call": lambda v: hc.call(double, S, v),
    "ordered": lambda v: hc.call(double, S, v, order="ordered"),
    "unordered": lambda v: hc.call(double, S, v, order="unordered"),
    "two results": lambda v: sum(hc.call(lambda a: (a, a), (S, S), v)),
    "two results, ordered": lambda v: sum(
        hc.call(lambda a: (a, a), (S, S), v, order="ordered")
    ),
    "no results": told(lambda v: hc.call(see, None, v, order="ordered")),
    "no arguments": lambda v: (
        v
        * hc.call(
            lambda: np.float32(2), jax.ShapeDtypeStruct((), np.float32), order="ordered"
        )
    ),
    "on a device": lambda v: hc.call(double, S, v, on=jax.devices()[2]),
    "vmap": jax.vmap(lambda v: hc.call(double, v, v)),
    "where": jax.vmap(lambda v: hc.call(double, v, v, where=v < 9)),
    "cond": lambda v: jax.lax.cond(v[0] < 1, lambda v: hc.call(double, S, v), abs, v),
    "scan": in_a_scan(lambda v: hc.call(see, None, v, order="ordered")),
    "grad": differentiated,
    "key": lambda v: (
        v
        * hc.call(
            lambda k: np.float32(2),
            jax.ShapeDtypeStruct((), np.float32),
            jax.random.key(0),
        )
    ),
    "host": lambda v: hc.host(double, result=hc.results.like(0))(v),
    "tap": told(lambda v: hc.tap(see, v)),
    "ordered tap": told(lambda v: hc.tap(see, v, order="ordered")),
    "tap of shards": told(lambda v: hc.tap(see, v, on="shards")),
    "tap on a device": told(lambda v: hc.tap(see, v, on=jax.devices()[2])),
    "taps in a scan": in_a_scan(lambda v: hc.tap(see, v)),
    "print": told(lambda v: hc.print("{}", v)),
    "watch": told(hc.watch),
    "feed": fed,
    "pure_callback": lambda v: hc.pure_callback(double, S, v),
    "io_callback": lambda v: hc.io_callback(double, S, v),
    "debug.callback": told(lambda v: hc.debug.callback(see, v)),
    "debug of shards": told(lambda v: hc.debug.callback(see, v, partitioned=True)),
    "patched": patched,
    "manual call": over(lambda v: hc.call(double, v, v)),
    "manual call, ordered": over(lambda v: hc.call(double, v, v, order="ordered")),
    "manual, two results": over(
        lambda v: sum(hc.call(lambda a: (a, a), (v, v), v, order="unordered"))
    ),
    "manual tap": over(told(lambda v: hc.tap(see, v))),
    "manual taps in a scan": over(in_a_scan(lambda v: hc.tap(see, v))),
    "manual pure_callback": over(lambda v: hc.pure_callback(double, v, v)),
    "manual debug": over(told(lambda v: hc.debug.callback(see, v))),
}


@contextlib.contextmanager
def under_gspmd():
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


@pytest.fixture
def gspmd():
    with under_gspmd():
        yield


def run(f):
    x = jax.device_put(jnp.arange(8.0), NamedSharding(line(), P("x")))
    seen.clear()
    result = np.asarray(jax.jit(f)(x))
    jax.effects_barrier()
    hc.barrier()
    return result, sorted(seen)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_what_it_does_under_shardy(name):
    want, told = run(PROGRAMS[name])
    np.testing.assert_array_equal(want, np.arange(8) * 2)
    with under_gspmd():
        got, told_there = run(PROGRAMS[name])
    np.testing.assert_array_equal(got, want)
    assert told_there == told


def test_ordered_calls_keep_their_order(gspmd):
    steps = []

    def f(v):
        for i in range(5):
            v = hc.call(lambda v, i=i: (steps.append(i), v)[1], S, v, order="ordered")
        return v

    run(f)
    assert steps == [0, 1, 2, 3, 4]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_failure_is_raised(gspmd):
    def fail(v):
        raise ValueError("no")

    with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: no"):
        run(lambda v: hc.call(fail, S, v))
    np.testing.assert_array_equal(run(PROGRAMS["call"])[0], np.arange(8) * 2)
