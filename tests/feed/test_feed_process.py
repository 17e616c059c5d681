"""Feeds and the process: its end, forks, Ctrl-C, and resuming after a kill."""

from __future__ import annotations

import json
import signal

import jobs

SOURCE = """
import itertools, json, os, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
import hostcall as hc

def numbers():
    return (np.int32(i) for i in itertools.count())
"""


def test_the_process_ends_under_a_feed(run_python):
    for ending in ("", "sys.exit(0)", "feed.close()", "del feed"):
        run_python(
            SOURCE
            + f"""
feed = hc.feed(numbers)
assert jax.jit(lambda: feed()[0])() == 0
{ending}
"""
        )


def test_the_process_ends_under_a_source_that_blocks(run_python):
    run_python(
        SOURCE
        + """
def blocks():
    yield np.int32(0)
    threading.Event().wait()
feed = hc.feed(blocks)
assert jax.jit(lambda: feed()[0])() == 0
"""
    )


def test_an_unused_feed_does_not_hold_the_process(run_python):
    run_python("""
import numpy as np
import hostcall as hc
feed = hc.feed(iter(lambda: np.int32(1), 0))
""")


def test_a_forked_child_refuses_the_feed(run_python):
    run_python(
        SOURCE
        + """
feed = hc.feed(numbers)
child = os.fork()
if child == 0:
    try:
        feed()
    except hc.errors.FeedError as error:
        assert "spawn" in str(error), error
        del feed
        sys.exit(7)
    sys.exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert feed()[0] == 0
"""
    )


def test_ctrl_c_ends_a_wait_and_the_thread(start_python):
    program = start_python(
        SOURCE
        + """
def blocks():
    yield np.int32(0)
    while True:
        time.sleep(0.01)
        if hc.monitor.status():
            print("ready", flush=True)
            threading.Event().wait(60)
            return
feed = hc.feed(blocks)
try:
    f = jax.jit(lambda: jax.lax.scan(lambda c, _: (c, feed()[0]), 0, length=2)[1])
    jax.block_until_ready(f())
except KeyboardInterrupt:
    try:
        feed()
    except hc.errors.FeedError as error:
        assert "was closed by Ctrl-C" in str(error), error
        print("interrupted", flush=True)
        os._exit(0)
"""
    )
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=120)
    assert "interrupted" in out, out + err


TRAIN = (
    SOURCE
    + """
def rows(epoch):
    rng = np.random.default_rng(epoch)
    return (rng.random(4, np.float32) for _ in range(7))

path = sys.argv[1]
feed = hc.feed(rows, on_end="repeat")
w, losses = jnp.zeros(4), []
if os.path.exists(path):
    saved = json.load(open(path))
    feed.restore(saved["feed"])
    w, losses = jnp.asarray(saved["w"], jnp.float32), saved["losses"]

@jax.jit
def steps(w):
    def body(w, _):
        x, ok = feed()
        return w + 0.1 * (x - w), ((x - w) ** 2).sum()
    return jax.lax.scan(body, w, length=5)

while len(losses) < 30:
    w, new = steps(w)
    losses += new.tolist()
    saved = {"w": w.tolist(), "losses": losses, "feed": feed.state()}
    with open(path + ".new", "w") as file:
        json.dump(saved, file)
    os.replace(path + ".new", path)
    if len(sys.argv) > 2 and len(losses) == 15:
        os.kill(os.getpid(), 9)
"""
)


def test_killed_and_resumed_gives_the_same_numbers(run_python, tmp_path):
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    run_python(TRAIN, whole)
    assert run_python(TRAIN, parts, "kill", check=False).returncode == -9
    run_python(TRAIN, parts)
    with open(whole) as a, open(parts) as b:
        assert json.load(a) == json.load(b)


TWO = """
import os, sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
import jax.numpy as jnp, numpy as np
import hostcall as hc

me = jax.process_index()
sharding = jax.NamedSharding(jax.make_mesh((4,), ("d",)), jax.P("d"))
mine = (np.full((2, 3), 10 * i + me, np.float32) for i in range(5 + 2 * me))
feed = hc.feed(mine, sharding=sharding)

@jax.jit
def run():
    def body(state):
        total, count, _ = state
        x, ok = feed()
        return jnp.where(ok, total + x.sum(), total), count + ok, ok
    return jax.lax.while_loop(lambda s: s[2], body, (jnp.float32(0), 0, True))

total, count, _ = run()
assert int(count) == 5, count
assert float(total) == sum(12 * 10 * i + 6 for i in range(5)), total
"""


def test_two_processes_feed_their_parts_and_stop_together(run_python):
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    jobs.in_each(2, lambda me, port: run_python(TWO, port, str(me), env=env))
