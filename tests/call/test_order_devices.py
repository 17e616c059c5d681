"""The order of calls on each device, and on each of several threads."""

import random
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import hostcall as hc

ANY = jax.ShapeDtypeStruct((), jnp.int32)
EFFECTS = pytest.mark.parametrize("order", ["unordered", "ordered"])


class Log(list):
    """Appends `key(argument)` with each call."""

    def __init__(self, order, key):
        super().__init__()
        self.order, self.key = order, key

    def __call__(self, *args):
        return hc.call(self.host, ANY, *args, order=self.order)

    def tell(self, *args):
        """A call without results."""
        hc.call(self.silent, None, *args, order=self.order)

    def silent(self, *args):
        self.host(*args)

    def host(self, number, *rest):
        # Sleeps up to 0.3 ms, to upset an order that nothing enforces.
        time.sleep(random.random() * 3e-4)
        self.append(self.key(number))
        return np.int32(number)


def by_first(log):
    return {first: [n for other, n in log if other == first] for first, _ in log}


def with_device(n):
    return hc.current().device.id, int(n)


def mesh():
    return Mesh(np.array(jax.devices()), ("i",))


@EFFECTS
def test_shard_map_keeps_the_order_on_each_device(order):
    log = Log(order, key=with_device)

    def body(x):
        for n in range(5):
            x = x + log(n, x) * 0
            log.tell(n + 100, x)
        return lax.fori_loop(5, 10, lambda i, c: c + log(i, c) * 0, x)

    f = jax.jit(jax.shard_map(body, mesh=mesh(), in_specs=P("i"), out_specs=P("i")))
    x = np.arange(4, dtype=np.int32)
    for _ in range(5):
        np.testing.assert_array_equal(f(x), x)
    jax.effects_barrier()
    straight, loop = [n for k in range(5) for n in (k, k + 100)], list(range(5, 10))
    lists = by_first(log)
    assert sorted(lists) == [d.id for d in jax.devices()]
    for found in lists.values():
        if order == "ordered":
            assert found == (straight + loop) * 5
        else:  # nothing orders the loop relative to the code before it
            assert [n for n in found if n in straight] == straight * 5
            assert [n for n in found if n in loop] == loop * 5


def test_pmap_keeps_the_order_on_each_device():
    log = Log("ordered", key=with_device)

    def body(x):
        for n in range(10):
            log.tell(n, x + n)
        return x * 2

    f = jax.pmap(body)
    x = np.arange(4, dtype=np.int32)
    for _ in range(5):
        np.testing.assert_array_equal(f(x), x * 2)
    jax.effects_barrier()
    assert by_first(log) == {d.id: list(range(10)) * 5 for d in jax.devices()}


@EFFECTS
def test_threads_each_have_their_own_order(order):
    log = Log(order, key=lambda n: divmod(int(n), 1000))
    f = jax.jit(lambda n, x: (log(n, x), log(n + 1, x * 2), x.sum()))
    failures = []

    def work(number):
        try:
            for n in range(0, 60, 2):
                jax.block_until_ready(f(number * 1000 + n, jnp.ones(1024)))
            jax.effects_barrier()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert by_first(log) == {n: list(range(60)) for n in range(6)}
