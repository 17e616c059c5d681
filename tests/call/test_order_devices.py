"""The order of calls on each device, and on each of several threads."""

import random
import threading
import time

import jax
import jax.experimental
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
        assert found == (straight + loop) * 5


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


# --- Ordered programs over different devices ---------------------------------------------
#
# JAX's own ordered callbacks are in order over devices. So are the engine's.


def noted(log):
    """A host function that notes its argument. Taps before it have been delivered."""

    def host(n):
        hc.barrier(programs=False)
        log.append(int(n))

    return host


def io(log, i):
    hc.io_callback(noted(log), None, i, ordered=True)


def debug(log, i):
    hc.debug.callback(noted(log), i, ordered=True)


def call(log, i):
    hc.call(noted(log), None, i, order="ordered")


def tap(log, i):
    hc.tap(lambda n: log.append(int(n)), i, order="ordered")


def through_jax(log, i):
    jax.experimental.io_callback(lambda n: log.append(int(n)), None, i, ordered=True)


ORDERED = {"io": io, "debug": debug, "call": call, "tap": tap}


@pytest.fixture(scope="module")
def slow():
    """Returns its argument, on its device, much later."""

    # A GPU's work is on a stream in any case, and tests/fakegpu interprets its kernels.
    steps = 20_000 if jax.default_backend() == "cpu" else 60

    @jax.jit
    def late(x):
        # Small matrices keep one core busy. XLA's threads share the work of large ones,
        # and turn in circles while there is none.
        body = lambda _, m: jnp.tanh(m @ m) * 0.5
        m = lax.fori_loop(0, steps, body, jnp.ones((4, 4)))
        return x + (0 * m[0, 0]).astype(x.dtype)

    for device in jax.devices():
        jax.block_until_ready(late(jax.device_put(jnp.int32(0), device)))
    return late


def on(device, i):
    return jax.device_put(jnp.int32(i), jax.devices()[device])


@pytest.fixture(params=[*ORDERED, "patched"])
def emit(request):
    if request.param != "patched":
        yield ORDERED[request.param]
        return
    with hc.patch_jax():
        yield through_jax


def program(emit, log, made=jax.jit):
    return made(lambda i: (emit(log, i), i + 0)[1])


def seen(log):
    jax.effects_barrier()
    hc.barrier()
    found = list(log)
    log.clear()
    return found


@pytest.mark.parametrize(
    "devices", [[0, 1, 2, 3], [0, 1, 0, 1, 0], [1, 1, 0, 0, 1], [0, 0, 0, 2, 0]]
)
def test_ordered_programs_of_a_thread_over_devices(emit, devices, slow):
    log = []
    f = program(emit, log)
    for again in range(3):  # compiled, then as JAX dispatches what it has
        for i, device in enumerate(devices):
            x = on(device, i)
            f(slow(x) if i % 2 == 0 else x)
        assert seen(log) == list(range(len(devices))), again


def test_programs_that_were_dispatched_fast_before_a_second_device_came(emit, slow):
    log = []
    f, g = program(emit, log), program(emit, log)
    for i in range(5):  # for JAX's C++
        f(on(0, i))
    assert seen(log) == list(range(5))
    for i in range(0, 8, 2):
        g(slow(on(1, i)))
        f(on(0, i + 1))
    assert seen(log) == list(range(8))
    for i in range(0, 8, 2):
        f(slow(on(0, i)))
        f(on(2, i + 1))
    assert seen(log) == list(range(8))


@pytest.mark.parametrize("first", ORDERED)
@pytest.mark.parametrize("second", ORDERED)
def test_ordered_kinds_over_devices(first, second, slow):
    log = []
    f, g = program(ORDERED[first], log), program(ORDERED[second], log)
    for i in range(0, 6, 2):
        f(slow(on(0, i)))
        g(on(1, i + 1))
    assert seen(log) == list(range(6))


@pytest.mark.parametrize("kind", ["io", "call", "tap"])
@pytest.mark.parametrize("others", [[0], [1], [0, 1], [2, 3]])
def test_between_programs_over_several_devices(kind, others, slow):
    """`others` are devices of programs over one; the two over several have 0 and 1."""
    log = []
    f = program(ORDERED[kind], log)
    mesh = Mesh(np.array(jax.devices()[:2]), ("i",))

    def several(x):
        ORDERED[kind](log, x.sum() // 2)
        return x + 0

    g = jax.jit(several)
    sharding = jax.NamedSharding(mesh, P("i"))
    for _ in range(3):
        n = 0
        for device in others * 2:
            f(slow(on(device, n)))
            x = jax.device_put(np.full(2, n + 1, np.int32), sharding)
            g(x)
            f(on(device, n + 2))
            n += 3
        assert seen(log) == list(range(n))


@pytest.mark.parametrize("kind", ["call", "tap", "io"])
def test_eager_ordered_calls_between_devices(kind, slow):
    log = []
    f = program(ORDERED[kind], log)
    for i in range(0, 9, 3):
        f(slow(on(0, i)))
        ORDERED[kind](log, on(1, i + 1))
        f(on(2, i + 2))
    assert seen(log) == list(range(9))


@pytest.mark.parametrize("kind", ["call", "tap"])
def test_compiled_functions_over_devices(kind, slow):
    """A compiled function has a dispatch in C++ of its own."""
    log = []
    f = [program(ORDERED[kind], log).lower(on(k, 0)).compile() for k in range(3)]
    for i in range(5):
        f[0](on(0, i))
    assert seen(log) == list(range(5))
    for _ in range(2):
        for i in range(0, 9, 3):
            f[1](slow(on(1, i)))
            f[0](slow(on(0, i + 1)))
            f[2](on(2, i + 2))
        assert seen(log) == list(range(9))


def test_threads_have_an_order_over_devices_of_their_own(slow):
    log = []
    f = program(call, log)
    failures = []

    def work(number):
        try:
            for i in range(0, 12, 2):
                f(slow(on(number % 4, 1000 * number + i)))
                f(on((number + 1) % 4, 1000 * number + i + 1))
            jax.effects_barrier()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for number in range(4):
        own = [n % 1000 for n in log if n // 1000 == number]
        assert own == list(range(12))


def test_a_failed_program_on_another_device_is_told_once(slow):
    log = []

    def fail(n):
        if n == 1:
            raise ValueError("the second one")
        log.append(int(n))

    f = jax.jit(lambda i: hc.call(fail, None, i, order="ordered"))
    f(slow(on(0, 0)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="the second one"):
        f(slow(on(1, 1)))  # raises here if it runs where it is dispatched
        hc.barrier()
    f(on(2, 2))
    hc.barrier()
    assert seen(log) == [0, 2]
