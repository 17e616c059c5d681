"""Programs over several CPU devices on JAX's fast dispatch: counts, waits, failures, and
many of them at once.

Their host calls are not ordered. The oracle is what the same programs promise with
tokens: each call is made once by each device that makes it, every wait waits for all of
them, and a failure is raised once, by a wait of the thread that dispatched the program.
"""

from __future__ import annotations

import contextlib
import threading

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import grid, line, over

import hostcall as hc

# Before, these programs keep JAX's tokens, and JAX's own programs with collectives wait
# for ever, or end the process, if they follow each other on fewer cores than devices.
pytestmark = pytest.mark.skipif(
    jaxlib.version.__version_info__ < (0, 12, 0),
    reason="programs over several devices keep their tokens with this jaxlib",
)

LIMIT = 60  # seconds: what takes longer hangs
SCALAR = jax.ShapeDtypeStruct((), np.float32)


class Host:
    """Host code that waits for an event, counts, and fails when it is told to."""

    def __init__(self):
        self.event = threading.Event()
        self.event.set()
        self.count = 0
        self.fails = False
        self._lock = threading.Lock()

    def __call__(self, x):
        assert self.event.wait(LIMIT)
        with self._lock:
            self.count += 1
        if self.fails:
            raise ValueError("no such number")

    def same(self, x):
        self(x)
        return x


def unordered(host, x):
    hc.call(host, None, x, order="unordered")


def in_loop(host, x):
    lax.fori_loop(0, 3, lambda i, c: (unordered(host, c), c)[1], x)


# Each: a body, and how many calls a device makes.
BODIES = {
    "call": (unordered, 1),
    "calls in a loop": (in_loop, 3),
    "drop-in": (lambda host, x: hc.io_callback(host, None, x), 1),
    "tap": (lambda host, x: hc.tap(host, x), 1),
}


def jitted(f, host):
    return jax.jit(lambda x: (f(host, x.sum()), x * 2)[1]), 1


def without_results(f, host):
    return jax.jit(lambda x: f(host, x.sum())), 1


def in_shard_map(f, host):
    return over(line(), lambda x: (f(host, x), x * 2)[1], P("x")), 4


def beside_a_collective(f, host):
    def body(x):
        f(host, x)
        return x + lax.psum(x.sum(), "x")

    return over(line(), body, P("x")), 4


def partly_manual(f, host):
    def body(x):
        f(host, x)
        return x * 2

    g = over(grid(), body, P("x"), axis_names={"x"})
    split = jax.device_put(jnp.arange(8.0), NamedSharding(grid(), P("x")))
    return lambda x: g(split), 2


WAYS = [jitted, without_results, in_shard_map, beside_a_collective, partly_manual]


@pytest.fixture
def x():
    return jax.device_put(jnp.arange(8.0), NamedSharding(line(), P("x")))


# JAX refuses its own callbacks in a shard_map that is manual over some axes only, and so
# do the drop-ins.
CASES = [
    pytest.param(way, body, id=f"{way.__name__}, {body}")
    for way in WAYS
    for body in BODIES
    if (way, body) != (partly_manual, "drop-in")
]
# Taps fail on their own worker.
FAILING = [case for case in CASES if case.values[1] != "tap"]


def made(way, body):
    host = Host()
    f, each = way(BODIES[body][0], host)
    return host, f, each * BODIES[body][1]


@pytest.mark.parametrize(("way", "body"), CASES)
def test_waits_wait_for_all_devices(way, body, x):
    host, f, calls = made(way, body)
    for _ in range(2):
        f(x)
    hc.barrier()
    assert host.count == 2 * calls
    host.event.clear()
    f(x)
    assert not hc.barrier(0.05)
    host.event.set()
    if body != "tap":
        jax.effects_barrier()
        assert host.count == 3 * calls
    hc.barrier()
    assert host.count == 3 * calls


@pytest.mark.parametrize("wait", [hc.barrier, jax.effects_barrier])
@pytest.mark.parametrize(("way", "body"), FAILING)
def test_a_failure_is_raised_once(way, body, x, wait):
    host, f, _ = made(way, body)
    for _ in range(2):
        f(x)
    hc.barrier()
    host.fails = True
    f(x)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such number"):
        wait()
    wait()
    with pytest.raises(ValueError, match="no such number"), hc.reraise():
        f(x)
    host.fails = False
    jax.block_until_ready(f(x))
    hc.barrier()


@pytest.mark.parametrize(
    ("way", "body"), [case for case in FAILING if case.values[0] != without_results]
)
def test_a_failure_of_the_first_dispatch_that_was_read_is_not_raised_again(
    way, body, x
):
    """JAX dispatches a program in Python at first, and takes a token from it."""
    host, f, _ = made(way, body)
    host.fails = True
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such number"):
        jax.block_until_ready(f(x))
    jax.effects_barrier()
    hc.barrier()


def test_a_failure_is_its_own_threads(x):
    host, f, _ = made(in_shard_map, "call")
    f(x)
    f(x)
    hc.barrier()
    host.fails = True
    raised = []

    def dispatches():
        f(x)
        try:
            hc.barrier()
        except jax.errors.JaxRuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=dispatches)
    thread.start()
    thread.join(LIMIT)
    hc.barrier()
    jax.effects_barrier()
    assert len(raised) == 1
    assert "no such number" in raised[0]


def test_results_that_are_donated_hide_nothing(x):
    """All that the user gets is gone before the program has ended."""
    host = Host()
    f = jax.jit(
        lambda x: (unordered(host, x.sum()), x + 1)[1],
        donate_argnums=0,
    )
    y = f(f(x + 0))
    hc.barrier()
    host.event.clear()
    for _ in range(3):
        y = f(y)
    y.delete()
    assert not hc.barrier(0.05)
    host.event.set()
    jax.effects_barrier()
    assert host.count == 5
    host.fails = True
    f(x + 0).delete()
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such number"):
        hc.barrier()


def test_many_programs_of_four_threads(x):
    """Calls, taps, collectives and donations at once: none waits for ever, each call is
    made once.
    """
    host = Host()
    bodies = [
        over(
            line(), lambda x: (unordered(host, x), x + 0 * lax.psum(x, "x"))[1], P("x")
        ),
        jax.jit(lambda x: (unordered(host, x.sum()), x * 1 + x.sum() * 0)[1]),
        jax.jit(lambda x: (hc.tap(host, x.sum()), x * 1)[1]),
        jax.jit(
            lambda x: x + 0 * hc.call(host.same, SCALAR, x.sum(), order="unordered"),
            donate_argnums=0,
        ),
    ]
    nothing = jax.jit(lambda x: unordered(host, x.sum()))
    for f in (*bodies[:3], nothing):
        jax.block_until_ready(f(x))
    jax.block_until_ready(bodies[3](x + 0))
    hc.barrier()
    host.count = 0
    failed = []

    def run():
        y = x
        try:
            for _ in range(15):
                y = bodies[0](y)
                y = bodies[1](y)
                nothing(y)
                y = bodies[2](y)
                y = bodies[3](y + 0)
            hc.barrier()
            np.testing.assert_array_equal(y, x)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    hc.barrier()
    assert not failed
    assert host.count == 4 * 15 * (4 + 1 + 1 + 1 + 1)


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_inputs_that_are_not_ready_and_donated_ones(devices):
    """Four threads dispatch programs behind one that waits: each waits for its inputs,
    and donates them, and each call is made once.
    """
    gate = Host()
    host = Host()
    mesh = jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices])
    sharding = NamedSharding(mesh, P("x"))
    x = jax.device_put(jnp.arange(2.0 * devices), sharding)
    waits = jax.jit(
        lambda x: x + 1 + 0 * hc.call(gate.same, SCALAR, x[0], order="unordered")
    )
    steps = [
        jax.jit(lambda x: (unordered(host, x.sum()), x + 1)[1], donate_argnums=0),
        jax.jit(lambda x: (hc.tap(host, x.sum()), x + 1)[1], donate_argnums=0),
        jax.jit(
            lambda x: x + 1 + 0 * hc.call(host.same, SCALAR, x[0], order="unordered"),
            donate_argnums=0,
        ),
    ]
    y = waits(x)
    for step in steps:
        y = step(y)
    jax.block_until_ready(y)
    hc.barrier()
    host.count = 0
    gate.event.clear()
    begun = threading.Barrier(5)
    values = []
    failed = []

    def run():
        try:
            begun.wait(LIMIT)
            y = waits(x)
            for step in steps * 2:
                y = step(y)
            values.append(np.asarray(y))
            hc.barrier()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait(LIMIT)
    gate.event.set()
    for thread in threads:
        thread.join(LIMIT)
    hc.barrier()
    assert not failed
    assert host.count == 4 * 2 * 3
    assert len(values) == 4
    for value in values:
        np.testing.assert_array_equal(value, np.arange(2.0 * devices) + 7)


def test_ordered_calls_keep_their_order_over_devices(x):
    """Between ordered programs over several devices, unordered ones are dispatched."""
    host, beside, _ = made(jitted, "call")
    seen = []
    f = jax.jit(lambda x, i: (hc.call(seen.append, None, i, order="ordered"), x * 1)[1])
    for i in range(20):
        f(x, np.int32(i))
        beside(x)
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        hc.barrier()
    assert list(map(int, seen)) == list(range(20))
    assert host.count == 20
