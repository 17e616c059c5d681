"""The tap queue: bounds, policies, and devices that do not wait."""

import contextlib
import itertools
import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from limits import holds_in_time
from platforms import late_square

import hostcall as hc

KIB = jnp.zeros(256)  # 1 KiB of float32


@pytest.fixture
def small_queue():
    before = hc.monitor.tap_queue().limit
    hc.configure(tap_queue_bytes=8 * 1100)  # eight of 1 KiB
    yield
    hc.configure(tap_queue_bytes=before)


class Gated:
    """A tap whose first delivery waits until `open` is set."""

    def __init__(self):
        self.entered, self.open, self.seen = threading.Event(), threading.Event(), []

    def __call__(self, i, *_):
        self.entered.set()
        assert self.open.wait(60)
        self.seen.append(int(i))


def loop(n, **options):
    gated = Gated()

    @jax.jit
    def f(x):
        def body(i, c):
            hc.tap(gated, i, c, **options)
            return c

        return lax.fori_loop(0, n, body, x)

    return f, gated


def counters(gated):
    return next(s for name, s in hc.monitor.stats().items() if "Gated" in name)


def test_a_blocked_worker_does_not_stop_the_device():
    f, gated = loop(100)
    for _ in range(5):
        f(KIB).block_until_ready()  # nothing was delivered yet
    assert gated.seen == []
    assert hc.barrier(0.01, programs=False) is False
    gated.open.set()
    hc.barrier()
    assert gated.seen == list(range(100)) * 5


def test_block_waits_and_loses_nothing(small_queue):
    f, gated = loop(50)
    # On a thread, since XLA runs a small program on the dispatching one.
    thread = threading.Thread(target=lambda: f(KIB).block_until_ready())
    thread.start()
    assert gated.entered.wait(60)
    while hc.monitor.tap_queue().blocked == 0:
        pass
    assert thread.is_alive()
    assert 0 < hc.monitor.tap_queue().nbytes <= hc.monitor.tap_queue().limit
    gated.open.set()
    thread.join()
    hc.barrier()
    assert gated.seen == list(range(50))


KEPT = {
    "drop_newest": lambda dropped: range(50 - dropped),
    "drop_oldest": lambda dropped: range(dropped, 50),
}


@pytest.mark.parametrize("when_full", KEPT)
def test_what_a_full_queue_drops(when_full, small_queue):
    f, gated = loop(50, when_full=when_full)
    hc.tap(gated, -1)
    assert gated.entered.wait(60)
    before = hc.monitor.tap_queue().dropped
    f(KIB).block_until_ready()
    dropped = hc.monitor.tap_queue().dropped - before
    gated.open.set()
    hc.barrier()
    assert gated.seen == [-1, *KEPT[when_full](dropped)]
    assert 40 <= dropped <= 45


def test_stats_count_what_was_dropped(small_queue):
    f, gated = loop(50, when_full="drop_newest")
    hc.tap(gated, -1)
    assert gated.entered.wait(60)
    before = counters(gated).dropped
    queue = hc.monitor.tap_queue().dropped
    f(KIB).block_until_ready()
    assert (
        counters(gated).dropped - before == hc.monitor.tap_queue().dropped - queue > 0
    )
    gated.open.set()
    hc.barrier()


def test_values_above_the_limit_go_through_alone(small_queue):
    sums = []
    f = jax.jit(
        lambda x: lax.fori_loop(
            0, 5, lambda i, c: (hc.tap(lambda v: sums.append(v.sum()), c), c + 1)[1], x
        )
    )
    f(jnp.zeros(1_000_000))
    hc.barrier()
    assert sums == [i * 1e6 for i in range(5)]


def test_64_mib(small_queue):
    seen = []
    f = jax.jit(lambda x: hc.tap(lambda v: seen.append(v[::4096].copy()), x))
    x = jnp.arange(16 << 20, dtype=jnp.float32)
    f(x)
    f(x + 1)
    hc.barrier()
    for i, array in enumerate(seen):
        np.testing.assert_array_equal(array, np.asarray(x[::4096]) + i)


def test_a_tap_that_taps_does_not_wait_for_itself(small_queue):
    seen = []
    inner = jax.jit(
        lambda x: lax.fori_loop(
            0,
            30,
            lambda i, c: (hc.tap(lambda j, _: seen.append(int(j)), i, c), c)[1],
            x,
        )
    )

    def outer(x):
        inner(x).block_until_ready()  # 30 KiB into a queue of 8
        for i in range(30, 40):
            hc.tap(lambda j, _: seen.append(int(j)), i, KIB)

    jax.jit(lambda x: hc.tap(outer, x))(KIB)
    hc.barrier()
    hc.barrier()
    assert seen == list(range(40))


def test_the_device_never_takes_the_gil(run_python):
    # Threads keep the GIL for ten seconds at a time, so a device that asked for it
    # would take as long. The main thread releases it whenever it waits.
    done = run_python(
        """
        import sys, threading, time
        import jax, jax.numpy as jnp
        import hostcall as hc
        f = jax.jit(lambda x: jax.lax.fori_loop(
            0, 1000, lambda i, c: (hc.tap(lambda v: None, c), c + 1)[1], x))
        x = jax.block_until_ready(jnp.zeros(()))
        f(x).block_until_ready()
        hc.barrier()
        pushed = hc.monitor.tap_queue().pushed
        out = f(x)
        sys.setswitchinterval(10)
        # From here the main thread keeps the lock: the tight loop gives it to nobody.
        deadline = time.monotonic() + 5
        while hc.monitor.tap_queue().pushed < pushed + 1000:
            assert time.monotonic() < deadline, "the device waits for the lock"
        sys.setswitchinterval(0.005)
        hc.barrier()
        print("done")
        """
    )
    assert done.stdout == "done\n"


def test_status_names_a_tap_that_hangs():
    f, gated = loop(1)
    f(KIB)
    assert gated.entered.wait(60)
    (active,) = hc.monitor.status()
    assert active.name == "Gated"
    assert "self.open.wait" in active.stack
    assert active.place.file == __file__
    gated.open.set()
    hc.barrier()


def test_flush_leaves_errors_to_the_barrier():
    error = ValueError("later")

    def fail(x):
        raise error

    jax.jit(lambda x: hc.tap(fail, x))(1)
    jax.effects_barrier()
    assert hc.barrier(programs=False) is True
    with pytest.raises(ValueError, match="later"):
        hc.barrier()


def test_a_barrier_with_a_limit():
    f, gated = loop(3)
    f(KIB)
    assert gated.entered.wait(60)
    assert hc.barrier(timeout=0.01) is False
    gated.open.set()
    assert hc.barrier(timeout=60) is True
    assert gated.seen == [0, 1, 2]


def test_a_barrier_without_time_says_that_all_is_over():
    hc.barrier()
    assert holds_in_time(lambda: hc.barrier(timeout=0))


def test_a_barrier_inside_a_call_waits_for_taps_and_not_for_its_program():
    gate, seen, found = threading.Event(), [], []

    def late(x):
        gate.wait(60)
        return x

    def host(x):
        found.append((hc.barrier(timeout=60), len(seen)))
        return x

    @jax.jit
    def f(m):
        hc.tap(seen.append, m[0, 0])
        return hc.call(host, m, m, order="unordered")

    m = jnp.ones(late_square(600))
    m = jax.jit(lambda m: hc.call(late, m, m @ m))(m)
    y = f(m)  # does not run on the dispatching thread
    gate.set()
    y.block_until_ready()
    assert found == [(True, 1)]


def test_a_barrier_with_a_limit_waits_for_programs_and_loses_no_error():
    gate = threading.Event()

    def late(x):
        gate.wait(60)
        return x

    def bad(x):
        raise LookupError("once")

    m = jnp.ones(late_square(600))
    m = jax.jit(lambda m: hc.call(late, m, m @ m))(m)
    # With an input that is not ready, it does not run on the dispatching thread.
    jax.jit(lambda m: hc.call(bad, None, m, order="ordered"))(m)
    assert hc.barrier(timeout=0.01) is False
    gate.set()
    with pytest.raises(jax.errors.JaxRuntimeError, match="LookupError: once"):
        hc.barrier(timeout=60)


def test_discarded_taps_are_counted_and_not_delivered(small_queue):
    f, gated = loop(5)
    before = hc.monitor.tap_queue()
    f(KIB).block_until_ready()
    assert gated.entered.wait(60)
    hc.monitor.discard_taps()
    gated.open.set()
    hc.barrier()
    assert gated.seen == [0]
    assert hc.monitor.tap_queue().dropped - before.dropped == 4
    f(KIB).block_until_ready()
    hc.barrier()
    assert gated.seen == [0, 0, 1, 2, 3, 4]
    after = hc.monitor.tap_queue()
    assert after.delivered - before.delivered == 6
    assert after.nbytes == 0


def test_a_writer_of_snapshots():
    """A slow writer, 100 steps, a queue of eight: dispatch never waits."""
    hc.configure(tap_queue_bytes=200 * 1100)
    written, gate = [], threading.Event()

    def write(i, x):
        assert gate.wait(60)
        if i == 70:
            raise OSError("disk full")
        written.append((int(i), x.copy()))

    @jax.jit
    def step(i, x):
        x = x + 1
        hc.tap(write, i, x, order="ordered")
        return x

    x = KIB
    for i in range(100):
        x = step(i, x)
    np.testing.assert_array_equal(x, np.full(256, 100))  # computed, not written
    assert written == []
    gate.set()
    with pytest.raises(OSError, match="disk full"):
        hc.barrier()
    assert [i for i, _ in written] == [i for i in range(100) if i != 70]
    for i, array in written:
        np.testing.assert_array_equal(array, np.full(256, i + 1))
    hc.configure(tap_queue_bytes=256_000_000)


@pytest.mark.parametrize("size", [0, -5, 1.5, True])
def test_configure_refuses(size):
    with pytest.raises(
        hc.errors.SpecError, match="tap_queue_bytes= of hc.configure should be"
    ):
        hc.configure(tap_queue_bytes=size)


def test_a_million_taps_in_a_scan():
    total = itertools.count()
    last = []

    def note(i):
        next(total)
        last[:] = [i]

    jax.jit(
        lambda: lax.scan(
            lambda c, _: ((hc.tap(note, c), c + 1)[1], None), 0, length=1_000_000
        )
    )()
    hc.barrier()
    assert next(total) == 1_000_000
    assert last == [999_999]


def test_stress(small_queue):
    """Threads, devices, sizes and policies, and some taps raise: every tap is accounted
    for.
    """
    seen, failed = {}, itertools.count()
    devices = jax.devices()

    class Unlucky(Exception):
        pass

    def note(thread, step, x):
        device = hc.current().device.id
        assert (np.asarray(x) == step).all()
        seen.setdefault((int(thread), device), []).append(int(step))
        if step % 97 == 13:
            next(failed)
            raise Unlucky

    def program(policy, size):
        def f(thread, start):
            def body(i, c):
                step = start + i
                hc.tap(note, thread, step, jnp.full(size, step), when_full=policy)
                return c

            return lax.fori_loop(0, 20, body, start)

        return jax.jit(f)

    policies = ["block", "drop_newest", "drop_oldest"]
    programs = [program(p, size) for p in policies for size in (1, 300, 5000)]
    for f, device in itertools.product(programs, devices):  # compile first
        f(-1, jax.device_put(0, device)).block_until_ready()
    hc.barrier(programs=False)
    with contextlib.suppress(Unlucky, ExceptionGroup):
        hc.barrier()
    seen.clear()
    before, errors_before = hc.monitor.tap_queue(), next(failed)
    problems, blocking = [], []

    def run(thread):
        try:
            choose = random.Random(thread)
            for turn in range(40):
                device, which = choose.choice(devices), choose.randrange(len(programs))
                start = jax.device_put(turn * 20, device)
                programs[which](thread, start).block_until_ready()
                if which < 3:  # none of these may be dropped
                    steps = range(turn * 20, turn * 20 + 20)
                    blocking.append(((thread, device.id), steps))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=run, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hc.barrier(programs=False)
    errors = next(failed) - errors_before - 1
    assert errors > 1
    with pytest.raises(ExceptionGroup, match=f"{errors} taps failed") as caught:
        hc.barrier()
    assert caught.value.split(Unlucky)[1] is None
    assert problems == []
    after = hc.monitor.tap_queue()
    delivered = sum(map(len, seen.values()))
    assert delivered == after.delivered - before.delivered
    assert delivered + after.dropped - before.dropped == 8 * 40 * 20
    for key, steps in blocking:
        assert set(steps) <= set(seen[key])
    for steps in seen.values():  # taps of one thread on one device are in order
        assert steps == sorted(set(steps))
