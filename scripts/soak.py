"""Ten minutes of all kinds of work at once, then processes that end at random moments.

    python scripts/soak.py [--seconds 600] [--processes 50] [--rounds 100] [--seed N]

First part: threads make and drop programs with calls, taps, feeds, recorders, buffers,
parallel rows and failures, eager and compiled, on several devices. Resident memory,
threads and file descriptors must not grow after the first third.

Second part (jaxlib 0.12 or later): four threads dispatch programs over 2 to 8 devices,
on one and two cores, without waiting. None may wait for ever, and each call is made
once.

Third part: processes that do such work get a Ctrl-C at one random moment and end at
another, while daemon threads and taps are running. Each must end with status 0 and
without an abort message.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np

import hostcall as hc
from hostcall import _native
from hostcall._core import failures

# --- The work ------------------------------------------------------------------------


class Wrong(Exception):
    """The exception that failing callbacks raise."""


def fresh(k: float):
    """Returns a function that no program has seen."""
    return lambda a: a + np.asarray(k, np.asarray(a).dtype)


def call(rng: random.Random) -> None:
    x = jnp.full(rng.choice([(), (3,), (300, 300)]), 1.0)
    order = rng.choice(["pure", "unordered", "ordered"])
    f = jax.jit(lambda v, host=fresh(1): hc.call(host, v, v, order=order))
    assert np.all(np.asarray(f(x)) == 2)


def eager(rng: random.Random) -> None:
    x = jnp.full(rng.choice([(), (1000,)]), 1.0)
    assert np.all(np.asarray(hc.call(fresh(2), x, x)) == 3)


def rows(rng: random.Random) -> None:
    method = rng.choice(["sequential", "parallel", "expand_dims"])
    f = lambda v, host=fresh(3): hc.call(host, v, v, vmap_method=method)
    assert np.all(np.asarray(jax.jit(jax.vmap(f))(jnp.ones(8))) == 4)


def tap(rng: random.Random) -> None:
    seen: list[int] = []
    n = rng.randrange(1, 200)
    size = rng.choice([1, 1000, 100_000])

    def body(i, c):
        hc.tap(lambda i, c: seen.append(int(i)), i, c)
        return c

    f = jax.jit(lambda c: jax.lax.fori_loop(0, n, body, c))
    f(jnp.ones(size)).block_until_ready()
    hc.barrier(programs=False)
    assert seen == list(range(n))


def buffers(rng: random.Random) -> None:
    def double(ctx, out, x):
        np.asarray(out)[...] = 2 * np.asarray(x)

    x = jnp.ones(rng.choice([4, 10_000]))
    f = jax.jit(
        hc.buffers.buffer_callback(double, jax.ShapeDtypeStruct(x.shape, x.dtype))
    )
    assert np.all(np.asarray(f(x)) == 2)


def fails(rng: random.Random) -> None:
    held = np.ones(rng.choice([1, 1_000_000]))

    def host(a):
        raise Wrong(float(held[0]))

    f = jax.jit(lambda v: hc.call(host, v, v, order=rng.choice(["pure", "unordered"])))
    try:
        with hc.reraise():
            f(1.0)
    except Wrong:
        return
    raise AssertionError("the callback's exception was not raised")


def tap_fails(rng: random.Random) -> None:
    def host(a):
        raise Wrong

    jax.jit(lambda v: hc.tap(host, v))(1.0)


def devices(rng: random.Random) -> None:
    mesh = jax.make_mesh((2,), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    x = jax.device_put(jnp.ones(4), jax.sharding.NamedSharding(mesh, spec))
    f = lambda v, host=fresh(4): hc.call(host, v, v)
    if rng.random() < 0.5:
        f = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)
    assert np.all(np.asarray(jax.jit(f)(x)) == 5)


def chains(rng: random.Random) -> None:
    """Programs over several devices, each behind the one before it: the first waits in
    its call, and all others donate their inputs.
    """
    count = rng.choice([n for n in (2, 4, 8) if n <= jax.device_count()])
    mesh = jax.make_mesh((count,), ("x",), devices=jax.devices()[:count])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x = jax.device_put(jnp.zeros(2 * count), sharding)
    counted: list[object] = []
    late = threading.Event()

    def waits(value):
        late.wait(60)
        return value

    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    first = jax.jit(
        lambda v: v + 1 + 0 * hc.call(waits, scalar, v[0], order="unordered")
    )

    def step(v):
        hc.call(counted.append, None, v.sum(), order="unordered")
        hc.tap(counted.append, v[0])
        return v + 1

    step = jax.jit(step, donate_argnums=0)
    steps = rng.randrange(1, 16)
    y = first(x)
    for _ in range(steps):
        y = step(y)
    late.set()
    assert np.all(np.asarray(y) == 1 + steps)
    try:
        hc.barrier()
    except* Wrong:  # of taps of other threads
        pass
    assert len(counted) == 2 * steps


def feeds(rng: random.Random) -> None:
    count = rng.randrange(1, 2000)
    items = lambda: (np.full(3, i, np.float32) for i in range(count))
    with hc.feed(items, prefetch=rng.randrange(1, 9)) as feed:

        @jax.jit
        def total():
            def body(state):
                item, ok = feed()
                return state[0] + item[0], ok

            return jax.lax.while_loop(lambda s: s[1], body, (jnp.float32(0), True))[0]

        for _ in range(rng.randrange(1, 4)):
            assert float(total()) == sum(range(count))
            feed.reset()


def records(rng: random.Random) -> None:
    count = rng.randrange(1, 2000)
    with tempfile.TemporaryDirectory() as folder:
        recorder = hc.Recorder(folder)

        @jax.jit
        def run():
            def step(i, carry):
                recorder(i=i, twice=carry)
                return carry + 2

            return jax.lax.fori_loop(0, count, step, 0)

        assert int(run()) == 2 * count
        try:
            recorder.close()
        except* Wrong:  # of taps of other threads
            pass
        table = recorder.table()
        assert table["i"].to_pylist() == list(range(count))
        assert table["twice"].to_pylist() == list(range(0, 2 * count, 2))


# Programs over several devices from several threads may wait for each other in XLA's
# queues, with or without host calls. So one thread at a time runs them.
_ALONE = threading.Lock()


def one(rng: random.Random) -> None:
    work = rng.choice(
        [
            *(call, eager, rows, tap, buffers, fails, tap_fails),
            *(devices, chains, feeds, records),
        ]
    )
    if work in (devices, chains):
        with _ALONE:
            work(rng)
    else:
        work(rng)


def million_items() -> None:
    """A million items reach one program, each once and in order."""
    items = lambda: (np.int32(i) for i in range(1_000_000))
    with hc.feed(items, prefetch=64) as feed:

        @jax.jit
        def run():
            def body(state):
                good, count, _ = state
                item, ok = feed()
                return good & (~ok | (item == count)), count + ok, ok

            return jax.lax.while_loop(lambda s: s[2], body, (True, 0, True))

        good, count, _ = run()
    assert good
    assert count == 1_000_000


# --- First part ----------------------------------------------------------------------


def held() -> tuple[float, int, int]:
    """(resident MiB, threads, descriptors)."""
    status = Path("/proc/self/status").read_text()
    value = lambda key: int(status.split(key + ":")[1].split()[0])
    return value("VmRSS") / 1024, value("Threads"), len(os.listdir("/proc/self/fd"))


def churn(seconds: float, seed: int) -> None:
    """Runs the work, and fails if the memory, threads or descriptors in use grow."""
    end = time.monotonic() + seconds
    rounds = itertools.count()
    done = 0
    raised: list[BaseException] = []

    def run(number: int) -> None:
        nonlocal done
        rng = random.Random(seed + number)
        try:
            for _ in range(25):
                one(rng)
                done += 1
        except BaseException as error:
            raised.append(error)

    samples: list[tuple[float, tuple[float, int, int]]] = []
    while time.monotonic() < end and not raised:
        threads = [threading.Thread(target=run, args=(next(rounds),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        try:
            hc.barrier()
        except* Wrong:
            pass
        jax.clear_caches()
        gc.collect()
        samples.append((end - time.monotonic(), held()))
    if raised:
        raise raised[0]
    late = [what for left, what in samples if left < seconds * 2 / 3]
    first, last = late[: len(late) // 4], late[-(len(late) // 4) :]
    for place, name in enumerate(["resident MiB", "threads", "descriptors"]):
        before = float(np.median([what[place] for what in first]))
        after = float(np.median([what[place] for what in last]))
        print(f"{name}: {before:.1f} after a third, {after:.1f} at the end")
        assert after <= before * 1.02 + (5 if place == 0 else 1), f"{name} grew"
    # The frames of the newest failures hold programs.
    while failures._ledger.kept:
        failures._ledger.release_oldest()
    gc.collect()
    _native.bury()
    assert _native.live_slots() == 0, "programs that are gone hold slots"
    print(f"{done} pieces of work on {len(samples) * 3} threads")


# --- Second part ---------------------------------------------------------------------

_FOREVER = 600  # seconds: what takes longer waits for ever


def overlaps(rounds: int) -> None:
    """Runs `overlap` on so many devices and cores, each in a process of its own: the
    number of devices is the process's.
    """
    if jaxlib.version.__version_info__ < (0, 12):
        print("programs over several devices keep JAX's tokens with this jaxlib")
        return
    for devices, cores in itertools.product((2, 4, 8), (1, 2)):
        numbers = (devices, cores, rounds)
        flags = f"--xla_force_host_platform_device_count={devices}"
        subprocess.run(
            [sys.executable, __file__, "--overlap", *map(str, numbers)],
            env={**os.environ, "XLA_FLAGS": flags},
            timeout=_FOREVER,
            check=True,
        )


def overlap(devices: int, cores: int, rounds: int) -> None:
    """Four threads dispatch eight programs a round, each behind its own ones before."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    mesh = jax.make_mesh((devices,), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    x = jax.device_put(jnp.arange(2.0 * devices), sharding)
    scalar = jax.ShapeDtypeStruct((), np.float32)
    made = collections.Counter[str]()
    lock = threading.Lock()

    def note(name: str) -> None:
        with lock:
            made[name] += 1

    def noted(value, name):
        note(name)
        return value

    def block(x):
        hc.call(lambda v: note("block"), None, x, order="unordered")
        return x + jax.lax.psum(x.sum(), "x") * 0

    def whole(x):
        hc.call(lambda v: note("whole"), None, x.sum(), order="unordered")
        return x * 1 + x.sum() * 0

    def tapped(x):
        hc.tap(lambda v: note("tapped"), x.sum())
        return x * 1

    def given_back(x):
        value = hc.call(noted, scalar, x.sum(), "given back", order="unordered")
        return x + 0 * value

    in_blocks = jax.shard_map(block, mesh=mesh, in_specs=spec, out_specs=spec)
    steps = [jax.jit(in_blocks), jax.jit(whole), jax.jit(tapped)]
    donating = jax.jit(given_back, donate_argnums=0)
    for f in (*steps, donating):
        jax.block_until_ready(f(x + 0))
    hc.barrier()
    made.clear()
    raised: list[BaseException] = []

    def run() -> None:
        y = x
        try:
            for _ in range(rounds):
                for f in (*steps, *steps):
                    y = f(y)
                y = donating(y + 0)
            hc.barrier()
            assert np.array_equal(y, x)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hc.barrier()
    if raised:
        raise raised[0]
    runs = 4 * rounds
    assert made == {
        "block": 2 * runs * devices,
        "whole": 2 * runs,
        "tapped": 2 * runs,
        "given back": runs,
    }
    print(f"{8 * runs} programs over {devices} devices on {cores} cores ended")


# --- Third part ----------------------------------------------------------------------


def work_until_told(seed: int, seconds: float) -> None:
    """The program of a process of the third part."""
    rng = random.Random(seed)
    import logging

    logging.getLogger("hostcall").setLevel(logging.CRITICAL)

    # The daemon threads spend nearly all of their time in this callback. One that was
    # inside JAX when the interpreter shuts down (compiling, or waiting for a program)
    # would abort the process, with or without hostcall: JAX's C++ takes the GIL where
    # no exception may pass.
    def slow(a):
        time.sleep(0.05)
        return a

    def forever(number: int) -> None:
        x = np.full(3, number, np.float32)
        while True:
            hc.call(slow, x, x)

    for number in range(2):
        threading.Thread(target=forever, args=(number,), daemon=True).start()
    interrupted = False
    print("ready", flush=True)
    end = time.monotonic() + seconds
    try:
        while not interrupted or time.monotonic() < end:
            try:
                rng.choice([call, eager, rows, tap, buffers, feeds, records])(rng)
            except KeyboardInterrupt:
                interrupted = True
    except KeyboardInterrupt:  # between two pieces of work
        pass
    # The process ends while the daemon threads are busy and taps are in the queue.
    for i in range(100):
        hc.tap(lambda i: None, i)


def ends(processes: int, seed: int) -> None:
    rng = random.Random(seed)
    for number in range(processes):
        seconds = rng.random() * 2
        command = [sys.executable, __file__, "--child", str(seed + number)]
        process = subprocess.Popen(
            [*command, "--seconds", str(seconds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(rng.random() * 2)
        out, err = interrupted_output(process)
        assert process.returncode == 0, (number, process.returncode, out, err)
        assert "terminate called" not in err, err
    print(f"{processes} processes ended after a Ctrl-C, none aborted")


def interrupted_output(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Sends Ctrl-C, and again if nothing happens; returns the process's output.

    Python reports and drops a KeyboardInterrupt that is raised in a callback of a weak
    reference, and JAX's caches have such callbacks.
    """
    for _ in range(5):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=60)
    return process.communicate(timeout=60)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=600)
    options.add_argument("--processes", type=int, default=50)
    options.add_argument("--seed", type=int, default=random.randrange(10**6))
    options.add_argument("--rounds", type=int, default=100)
    options.add_argument("--child", type=int)
    options.add_argument("--overlap", type=int, nargs=3)
    given = options.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if given.child is not None:
        work_until_told(given.child, given.seconds)
        return
    if given.overlap is not None:
        overlap(*given.overlap)
        return
    print(f"seed {given.seed}", flush=True)
    million_items()
    churn(given.seconds, given.seed)
    overlaps(given.rounds)
    ends(given.processes, given.seed)


if __name__ == "__main__":
    main()
