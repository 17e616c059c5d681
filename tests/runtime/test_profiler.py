"""Calls, taps, deliveries and waits in profiles of JAX's, and names in the program."""

from __future__ import annotations

import ctypes
import gzip
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from platforms import late_square

import hostcall as hc

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def double(x):
    return x * 2


def slices_in(folder) -> list[dict[str, Any]]:
    """What a profile shows."""
    (path,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def names_in(folder) -> set[str]:
    """The operations of XLA's that a profile shows."""
    found = [e.get("args", {}) for e in slices_in(folder)]
    return {args["hlo_op"] for args in found if "hlo_op" in args}


def test_a_profile_shows_names_and_lines(tmp_path):
    @jax.jit
    def step(x):
        y = hc.call(double, SCALAR, x)
        hc.tap(lambda y: None, y, tag="train/loss")
        return y

    step(1.0).block_until_ready()
    hc.barrier()
    with jax.profiler.trace(str(tmp_path)):
        step(1.0).block_until_ready()
    hc.barrier()
    names = names_in(tmp_path)
    line = step.__wrapped__.__code__.co_firstlineno + 2
    (call,) = (n for n in names if n.startswith("double"))
    (tap,) = (n for n in names if n.startswith("train"))
    assert call.startswith(f"double__test_profiler_py_{line}_")
    assert tap.startswith(f"train_loss__test_profiler_py_{line + 1}_")


def test_a_profile_shows_deliveries(tmp_path):
    @jax.jit
    def step(x):
        hc.tap([].append, x, tag="one")
        hc.tap([].append, x, tag="many", batch=4)
        return x

    step(1.0).block_until_ready()
    hc.barrier()
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):
            step(1.0).block_until_ready()
        hc.barrier()
    line = step.__wrapped__.__code__.co_firstlineno + 2
    shown = {
        e["name"]: e["args"]
        for e in slices_in(tmp_path)
        if e["name"].startswith("delivery of ")
    }
    assert shown.keys() == {
        f"delivery of one (test_profiler.py:{line})",
        f"delivery of many (test_profiler.py:{line + 1})",
    }
    for args in shown.values():
        assert args["place"].startswith(f"{__file__}:")
        assert int(args["tap"]) > 0
    hc.tap([].append, 1.0)  # no profile is taken
    hc.barrier()


def test_a_profile_shows_a_full_queue(tmp_path, run_python):
    done = run_python(
        """
import sys, threading
import jax, jax.numpy as jnp, hostcall as hc
hc.configure(tap_queue_bytes=1000)
first = threading.Event()
def waits(x):
    first.wait()
@jax.jit
def step(x):
    hc.tap(waits, x, tag="front")
    hc.tap(lambda x: None, x * 2, tag="behind")
    return x
big = jnp.ones(250)
first.set(); step(big).block_until_ready(); hc.barrier(); first.clear()
with jax.profiler.trace(sys.argv[1]):
    thread = threading.Thread(target=lambda: step(big).block_until_ready())
    thread.start()
    while not hc.monitor.tap_queue().blocked:
        pass
    first.set()
    thread.join()
    hc.barrier()
""",
        str(tmp_path),
    )
    assert done.stderr == ""
    names = [(e["name"].split(" (")[0], e.get("args", {})) for e in slices_in(tmp_path)]
    shown = {name: args for name, args in names if name.startswith("delivery of ")}
    assert {name: args["blocked"] for name, args in shown.items()} == {
        "delivery of front": "1",
        "delivery of behind": "0",
    }


def test_a_profile_shows_a_wait_for_the_gil(tmp_path):
    pause = ctypes.PyDLL(None).usleep  # holds the GIL
    m = jnp.ones(late_square(600))  # so that it runs on a thread of XLA's

    @jax.jit
    def loop(m):
        def step(i, m):
            return m @ m * 1e-3 + hc.call(double, SCALAR, m[0, 0])

        return jax.lax.fori_loop(0, 50, step, m)

    loop(m).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        result = loop(m)
        pause(300_000)
        result.block_until_ready()
    calls = [e for e in slices_in(tmp_path) if e["name"].startswith("call of double")]
    assert len(calls) == 50
    assert max(float(call["args"]["waited_us"]) for call in calls) > 1000


def test_a_profile_shows_the_calls_of_a_loop(tmp_path):
    run = jax.jit(
        lambda x: jax.lax.fori_loop(0, 9, lambda i, c: hc.call(double, SCALAR, c), x)
    )
    run(1.0).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        run(1.0).block_until_ready()
    names = [e["name"] for e in slices_in(tmp_path)]
    line = run.__wrapped__.__code__.co_firstlineno
    assert names.count(f"call of double (test_profiler.py:{line})") == 9


WRITES = {
    "call": lambda x: hc.call(double, SCALAR, x, order="ordered"),
    "drop-in": lambda x: hc.pure_callback(double, SCALAR, x),
    "print": lambda x: hc.print("{}", x) or x,
    "buffers": lambda x: hc.buffers.buffer_callback(lambda ctx, out, x: None, SCALAR)(
        x
    ),
}


@pytest.mark.parametrize("kind", WRITES)
def test_each_kind_has_its_name_in_the_program(kind):
    compiled = jax.jit(WRITES[kind]).lower(1.0).compile().as_text()
    (line,) = (line for line in compiled.splitlines() if " custom-call(" in line)
    assert "(test_profiler.py:" in line.split("op_name=", 1)[1]


def test_the_text_of_the_program_is_the_same_without_names():
    def program(tag):
        return jax.jit(lambda x: hc.call(double, SCALAR, x, tag=tag)).lower(1.0)

    first = program("a").as_text()
    assert program("a").as_text().count("custom_call") == 1
    assert "test_profiler.py" not in first
