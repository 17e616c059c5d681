"""Calls of a program over several GPUs that get nothing which is known only at run time.

XLA moves constants into the region of such a call, and an array without elements is a
constant. What is left to enter the region are tokens.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import hostcall as hc

ORDERS = ["pure", "unordered", "ordered"]
EMPTY = jax.ShapeDtypeStruct((4, 0), np.float32)
THREE = jax.ShapeDtypeStruct((3,), np.float32)


def sharded(array):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(array, NamedSharding(mesh, P("x")))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_calls_on_an_array_without_elements(count, order):
    called = []

    def host(x):
        called.append(x.shape)
        return x

    def program(x):
        for _ in range(count):
            x = hc.call(host, EMPTY, x, order=order)
        return x

    x = sharded(np.zeros(EMPTY.shape, np.float32))
    result = jax.jit(program)(x)
    assert (result.shape, result.dtype) == (EMPTY.shape, EMPTY.dtype)
    hc.barrier()
    if order != "pure":
        assert called == [EMPTY.shape] * count


@pytest.mark.parametrize("order", ["unordered", "ordered"])
def test_calls_and_taps_on_equal_constants(order):
    called = []
    tapped = []
    ones = jnp.ones(3, jnp.float32)

    def host(x):
        called.append(x.tolist())
        return 2 * x

    def program(x):
        first = hc.call(host, THREE, ones, order=order)
        hc.tap(lambda v: tapped.append(v.tolist()), ones, order=order)
        second = hc.call(host, THREE, ones, order=order)
        hc.tap(lambda v: tapped.append(v.tolist()), ones, order=order)
        return x + first.sum() + second.sum() + ones.sum()

    x = np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(jax.jit(program)(sharded(x)), x + 15)
    hc.barrier()
    assert called == [[1, 1, 1]] * 2
    assert tapped == [[1, 1, 1]] * 2


def test_items_of_two_feeds_beside_equal_constants():
    feeds = [hc.feed(itertools.repeat(np.ones(3, np.float32))) for _ in range(2)]

    def program(x):
        items = [feed()[0] for feed in feeds for _ in range(2)]
        return x + sum(items).sum() + jnp.ones(3).sum()

    x = np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(jax.jit(program)(sharded(x)), x + 15)
    for feed in feeds:
        feed.close()
