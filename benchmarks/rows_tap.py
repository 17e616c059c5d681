"""Rows: what taps cost on the device, at dispatch and at delivery."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from benchmarks.harness import Case, Row, at_most, dispatch_time, times_faster
from benchmarks.raw_handler import empty_call

EMPTY = "a handler that does nothing"

F32 = jnp.float32


def nothing(*_: Any) -> None:
    pass


def settle() -> None:
    jax.effects_barrier()
    hc.barrier(programs=False)


def looped(step: Callable[[Any], Any], n: int) -> Callable[[Any], Any]:
    def f(x: Any) -> Any:
        def body(_: Any, c: Any) -> Any:
            step(c)
            return c * 1.0001 + 1

        return jax.lax.fori_loop(0, n, body, x)

    return jax.jit(f)


def on_device(step: Callable[[Any], Any], x: Any, n: int) -> Case:
    """Microseconds that `step` adds to one iteration of a compiled loop of `n`.

    The time runs until the loop's result is there. Later deliveries do not count, and
    are over before the next round begins.
    """
    with_step, without = looped(step, n), looped(lambda c: None, n)

    def seconds(f: Callable[[Any], Any]) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(f(x))
        return time.perf_counter() - begin

    def run() -> float:
        empty = seconds(without)
        used = seconds(with_step)
        settle()
        return (used - empty) / n * 1e6

    return run


# --- On the device's thread -----------------------------------------------------------


def scalar_tap(quick: bool) -> dict[str, Case]:
    x, n, few = F32(1), 20_000 if quick else 200_000, 200 if quick else 2000
    gate, entered = threading.Event(), threading.Event()

    def wait(_: Any) -> None:
        entered.set()
        gate.wait(60)

    ours = on_device(lambda c: hc.tap(nothing, c), x, n)

    def while_the_worker_waits() -> float:
        """Measures while the worker is in a slow function, away from the queue."""
        gate.clear()
        entered.clear()
        hc.tap(wait, 0)
        entered.wait(60)
        threading.Timer(0.5, gate.set).start()  # ours() ends by waiting for the queue
        return ours()

    return {
        "hostcall": ours,
        "hostcall, worker in a slow function": while_the_worker_waits,
        "JAX": on_device(lambda c: jax.debug.callback(nothing, c), x, few),
    }


def kept_back(quick: bool) -> dict[str, Case]:
    """What a False `where` adds to a step, its comparison included."""
    x, n = F32(1), 20_000 if quick else 200_000
    same = jax.ShapeDtypeStruct((), F32)

    def instead(c: Any) -> Any:
        return jax.lax.cond(
            c < 0, lambda c: hc.call(nothing, same, c, order="unordered"), F32, c
        )

    return {
        "call": on_device(
            lambda c: hc.call(nothing, same, c, where=c < 0, order="unordered"), x, n
        ),
        "tap": on_device(lambda c: hc.tap(nothing, c, where=c < 0), x, n),
        EMPTY: on_device(lambda c: empty_call(same)(c < 0, c), x, n),
        "call in lax.cond": on_device(instead, x, n),
    }


def large_tap(quick: bool) -> dict[str, Case]:
    n = 20 if quick else 100
    x = jnp.zeros(1 << 18, F32)
    ring = [np.zeros(1 << 18, np.float32) for _ in range(n)]
    source = np.zeros(1 << 18, np.float32)

    def copies() -> float:
        """Copies into memory that is as far from the cache as the queue's."""
        begin = time.perf_counter()
        for target in ring:
            np.copyto(target, source)
        return (time.perf_counter() - begin) / n * 1e6

    return {
        "hostcall": on_device(lambda c: hc.tap(nothing, c), x, n),
        "np.copyto": copies,
        "JAX": on_device(lambda c: jax.debug.callback(nothing, c), x, n),
    }


def printing(quick: bool) -> dict[str, Case]:
    x, n, few = F32(1), 2000 if quick else 20_000, 100 if quick else 1000
    sink = io.StringIO()
    theirs = on_device(lambda c: jax.debug.print("x {}", c), x, few)

    def quietly() -> float:
        import contextlib

        with contextlib.redirect_stdout(io.StringIO()):
            return theirs()

    return {
        "hostcall": on_device(lambda c: hc.print("x {}", c, file=sink), x, n),
        "JAX": quietly,
    }


def busy_thread(quick: bool) -> dict[str, Case]:
    x, n, few = F32(1), 20_000 if quick else 200_000, 100 if quick else 500

    def beside(case: Case) -> Case:
        def run() -> float:
            stop = False

            def spin() -> None:
                while not stop:
                    pass

            thread = threading.Thread(target=spin)
            thread.start()
            try:
                return case()
            finally:
                stop = True
                thread.join()

        return run

    ours = on_device(lambda c: hc.tap(nothing, c), x, n)
    theirs = on_device(lambda c: jax.debug.callback(nothing, c), x, few)
    return {
        "hostcall, busy": beside(ours),
        "hostcall, quiet": ours,
        "JAX, busy": beside(theirs),
        "JAX, quiet": theirs,
    }


# --- Delivery -------------------------------------------------------------------------


def delivered(tap: Callable[[Any], Any], n: int) -> Case:
    """Microseconds for each of `n` taps of a loop, until all are delivered."""
    f, x = looped(tap, n), F32(1)

    def run() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(f(x))
        hc.barrier(programs=False)
        return (time.perf_counter() - begin) / n * 1e6

    return run


def delivery(quick: bool) -> dict[str, Case]:
    n = 20_000 if quick else 200_000
    return {"hostcall": delivered(lambda c: hc.tap(nothing, c), n)}


def stacked(quick: bool) -> dict[str, Case]:
    n = 100_000 if quick else 1_000_000

    def through_jax(c: Any) -> None:
        jax.experimental.io_callback(nothing, None, c)

    return {
        "hostcall": delivered(lambda c: hc.tap(nothing, c, batch=4096), n),
        "hostcall, one by one": delivered(lambda c: hc.tap(nothing, c), n // 10),
        "JAX, io_callback": delivered(through_jax, n // 1000),
    }


# --- Dispatch -------------------------------------------------------------------------


def dispatch(ordered: bool) -> Callable[[bool], dict[str, Case]]:
    order = "ordered" if ordered else "unordered"

    def cases(quick: bool) -> dict[str, Case]:
        x, repeat = F32(1), 64 if quick else 256
        fs = {
            "hostcall": lambda x: (hc.tap(nothing, x, order=order), x + 1)[1],
            "jit(x + 1)": lambda x: x + 1,
            "debug.callback": lambda x: (
                jax.debug.callback(nothing, x, ordered=ordered),
                x + 1,
            )[1],
        }
        return {n: dispatch_time(jax.jit(f), x, repeat=repeat) for n, f in fs.items()}

    return cases


def dispatch_through(quick: bool) -> dict[str, Case]:
    x, repeat = F32(1), 64 if quick else 512
    fs = {
        "hostcall": lambda x: hc.tap_through(nothing, x) + 1,
        "jit(x + 1)": lambda x: x + 1,
    }
    return {n: dispatch_time(jax.jit(f), x, repeat=repeat) for n, f in fs.items()}


def sleeping(quick: bool) -> dict[str, Case]:
    del quick

    def sleep(_: Any) -> None:
        time.sleep(0.01)

    def twenty(tap: Callable[..., Any]) -> Case:
        def f(x: Any) -> Any:
            for _ in range(20):
                tap(sleep, x)
            return x + 1

        f = jax.jit(f)

        def run() -> float:
            begin = time.perf_counter()
            f(F32(1))
            seconds = time.perf_counter() - begin
            settle()
            return seconds * 1e3

        return run

    return {"hostcall": twenty(hc.tap), "JAX": twenty(jax.debug.callback)}


# --- A training loop that logs every step ---------------------------------------------


def training(quick: bool) -> dict[str, Case]:
    """Gradient descent on a small network, one dispatch per step; see examples/."""
    steps = 20 if quick else 200
    key = jax.random.key(0)
    x = jax.random.normal(key, (256, 64))
    y = jnp.sin(x.sum(1))
    weights = (jax.random.normal(key, (64, 128)) / 8, jnp.zeros(128))

    def loss(w: Any) -> Any:
        return ((jnp.tanh(x @ w[0]) @ w[1] - y) ** 2).mean()

    def trained(log: Callable[..., Any] | None) -> Case:
        @jax.jit
        def step(w: Any) -> Any:
            value, slope = jax.value_and_grad(loss)(w)
            if log is not None:
                log(nothing, value)
            return jax.tree.map(lambda w, g: w - 0.1 * g, w, slope)

        def run() -> float:
            w = weights
            begin = time.perf_counter()
            for _ in range(steps):
                w = step(w)
            jax.block_until_ready(w)
            settle()
            return (time.perf_counter() - begin) / steps * 1e6

        return run

    return {
        "hostcall": trained(hc.tap),
        "no logging": trained(None),
        "JAX": trained(jax.debug.callback),
    }


ROWS = (
    Row(
        "scalar tap, on the device",
        (
            at_most(0.2, None, "hostcall, worker in a slow function"),
            times_faster(100),
        ),
        scalar_tap,
    ),
    Row(
        "kept back by where=False, in a loop",
        (at_most(1.4, EMPTY, "call"), at_most(1.4, EMPTY, "tap")),
        kept_back,
    ),
    Row("1 MiB tap, on the device", (times_faster(2),), large_tap),
    Row("hc.print in a loop, on the device", (at_most(0.5, None),), printing),
    Row(
        "scalar tap beside a busy Python thread",
        (at_most(1.2, "hostcall, quiet", "hostcall, busy"),),
        busy_thread,
    ),
    Row("scalar taps into a Python function, each", (at_most(1, None),), delivery),
    Row(
        "scalar taps stacked for a Python function, each",
        (at_most(0.2, None), times_faster(100, base="JAX, io_callback")),
        stacked,
    ),
    Row(
        "dispatch, one unordered tap",
        (at_most(1.5, "jit(x + 1)"),),
        dispatch(False),
    ),
    Row("dispatch, one ordered tap", (at_most(1.5, "jit(x + 1)"),), dispatch(True)),
    Row("dispatch, tap_through", (at_most(1.2, "jit(x + 1)"),), dispatch_through),
    Row(
        "dispatch of 20 taps that sleep 10 ms",
        (at_most(2, None),),
        sleeping,
        unit="ms",
        rounds=5,
    ),
    Row("training step that logs its loss", (), training),
)
