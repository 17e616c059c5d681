"""Rows: what a call costs before and around its run.

They measure dispatch, eager calls, import, tracing and lowering.
"""

from __future__ import annotations

import functools
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib import xla_client
from jax.experimental import io_callback

import hostcall as hc
from benchmarks import by_hand
from benchmarks.harness import (
    Case,
    Row,
    at_most,
    dispatch_time,
    resident_kib,
    run_time,
)
from benchmarks.rows_call import SCALAR, same

# --- Dispatch -------------------------------------------------------------------------


# The least that a function pays for which an argument is made a jax.Array: jaxlib makes
# one of a NumPy array, which is read once.
WITH_ARRAY = "jit(x + 1) and a jax.Array"


def with_array() -> Callable[[Any], Any]:
    f, device = jax.jit(lambda x: x + 1), jax.devices()[0]
    aval = jax.core.ShapedArray((), np.float32)
    sharding = jax.sharding.SingleDeviceSharding(device)
    put = xla_client.batched_device_put
    value = np.zeros((), np.float32)

    def run(x: Any) -> Any:
        y = f(x)
        np.asarray(put(aval, sharding, [value], [device], True))
        return y

    return run


def dispatch_pure(quick: bool) -> dict[str, Case]:
    x, repeat = jnp.float32(1), 64 if quick else 512
    fs = {
        "hostcall": lambda x: hc.call(same, SCALAR, x),
        "jit(x + 1)": lambda x: x + 1,
        "JAX": lambda x: jax.pure_callback(same, SCALAR, x),
    }
    return {n: dispatch_time(jax.jit(f), x, repeat=repeat) for n, f in fs.items()}


def dispatch_with_effect(ordered: bool) -> Callable[[bool], dict[str, Case]]:
    order = "ordered" if ordered else "unordered"

    def cases(quick: bool) -> dict[str, Case]:
        x, repeat = jnp.float32(1), 64 if quick else 256
        fs = {
            "hostcall": lambda x: hc.call(same, SCALAR, x, order=order),
            "jit(x + 1)": lambda x: x + 1,
            "drop-in": lambda x: hc.io_callback(
                same, SCALAR, x, ordered=ordered, arrays="numpy"
            ),
            "drop-in, jax.Arrays": lambda x: hc.io_callback(
                same, SCALAR, x, ordered=ordered
            ),
            "io_callback": lambda x: io_callback(same, SCALAR, x, ordered=ordered),
        }
        made = {n: dispatch_time(jax.jit(f), x, repeat=repeat) for n, f in fs.items()}
        return made | {WITH_ARRAY: dispatch_time(with_array(), x, repeat=repeat)}

    return cases


def dispatch_debug(quick: bool) -> dict[str, Case]:
    x, repeat = jnp.float32(1), 64 if quick else 256

    def nothing(x: Any) -> None:
        pass

    def step(callback: Callable[..., Any], **more: Any) -> Callable[[Any], Any]:
        return lambda x: (callback(nothing, x, **more), x + 1)[1]

    fs = {
        "hostcall": step(hc.debug.callback),
        'arrays="numpy"': step(hc.debug.callback, arrays="numpy"),
        "jit(x + 1)": lambda x: x + 1,
        "JAX": step(jax.debug.callback),
    }
    made = {n: dispatch_time(jax.jit(f), x, repeat=repeat) for n, f in fs.items()}
    return made | {WITH_ARRAY: dispatch_time(with_array(), x, repeat=repeat)}


# --- Fresh functions ------------------------------------------------------------------


def _fresh_hostcall(n: int) -> None:
    x = jnp.float32(1)
    for _ in range(n):
        hc.call(lambda x: x, SCALAR, x)


def _fresh_jax(n: int) -> None:
    x = jnp.float32(1)
    for _ in range(n):
        jax.pure_callback(lambda x: x, SCALAR, x)


def fresh_time(quick: bool) -> dict[str, Case]:
    n, few = (300, 5) if quick else (10_000, 40)
    return {
        "hostcall": run_time(_fresh_hostcall, n, per=n),
        "JAX": run_time(_fresh_jax, few, per=few),
    }


def fresh_memory(quick: bool) -> dict[str, Case]:
    n, few = (1000, 10) if quick else (10_000, 100)

    def grown(f: Callable[[int], None], n: int) -> float:
        gc.collect()
        before = resident_kib()
        f(n)
        gc.collect()
        return (resident_kib() - before) / n

    return {
        "hostcall": lambda: grown(_fresh_hostcall, n),
        "JAX": lambda: grown(_fresh_jax, few),
    }


# --- Eager calls ----------------------------------------------------------------------

_THREE = jax.ShapeDtypeStruct((3,), jnp.float32)


def _by_hand(x: jax.Array) -> jax.Array:
    """What a careful user would write without hostcall."""
    value = np.sin(np.asarray(x))
    if value.shape != _THREE.shape or value.dtype != _THREE.dtype:
        raise TypeError(f"wanted {_THREE}, got {value!r}")
    return jax.device_put(value)


def eager_call(quick: bool) -> dict[str, Case]:
    n = 100 if quick else 1000
    x = jnp.ones(3, jnp.float32)
    sine = hc.host(np.sin)
    calls: dict[str, Callable[[], Any]] = {
        "hostcall": lambda: hc.call(np.sin, _THREE, x),
        "host function": lambda: sine(x),
        "by hand": lambda: _by_hand(x),
        "JAX": lambda: jax.pure_callback(np.sin, _THREE, x),
    }
    return {name: run_time(_repeat(call), n, per=n) for name, call in calls.items()}


def _nothing(value: Any) -> None:
    del value


def _tapped(x: jax.Array) -> None:
    hc.tap(_nothing, x)


def eager_tap(quick: bool) -> dict[str, Case]:
    n = 100 if quick else 1000
    x = jnp.ones(3, jnp.float32)
    calls: dict[str, Callable[[], Any]] = {
        "hostcall": lambda: hc.tap(_nothing, x),
        "in a jitted function": functools.partial(jax.jit(_tapped), x),
        "JAX": lambda: jax.debug.callback(_nothing, x),
    }
    return {name: run_time(_repeat(call), n, per=n) for name, call in calls.items()}


def _repeat(call: Callable[[], Any]) -> Callable[[int], None]:
    def run(n: int) -> None:
        for _ in range(n):
            call()

    return run


# --- Before anything runs -------------------------------------------------------------


def import_time(quick: bool) -> dict[str, Case]:
    del quick

    def timed(imported: str) -> Case:
        program = (
            "import time, jax\n"
            "begin = time.perf_counter()\n"
            f"{imported}\n"
            "print((time.perf_counter() - begin) * 1e3)"
        )

        def run() -> float:
            done = subprocess.run(
                [sys.executable, "-c", program],
                capture_output=True,
                text=True,
                check=True,
            )
            return float(done.stdout)

        return run

    return {
        "hostcall": timed("import hostcall"),
        "and hc.call": timed("from hostcall import call"),
    }


def lowering_time(quick: bool) -> dict[str, Case]:
    """Lowers a fresh function each time, which is in none of JAX's caches.

    There are two floors: a custom call of XLA's FFI, which knows no function, and the
    work of a call in a row, without anything that only other calls need.
    """
    by_hand.check()
    x, repeat = jnp.float32(1), 10 if quick else 50

    def timed(call: Callable[..., Any]) -> Case:
        def run() -> float:
            seconds = []
            for _ in range(repeat):
                f = jax.jit(lambda x: call(lambda y: y, SCALAR, x))
                begin = time.perf_counter()
                f.lower(x)
                seconds.append(time.perf_counter() - begin)
            return statistics.median(seconds) * 1e6

        return run

    def bare(fn: Callable[..., Any], spec: Any, x: Any) -> Any:
        return jax.ffi.ffi_call("hostcall_call", spec)(x)

    return {
        "hostcall": timed(hc.call),
        "JAX": timed(jax.pure_callback),
        "ffi_call": timed(bare),
        "by hand": timed(by_hand.call),
    }


def signature_time(quick: bool) -> dict[str, Case]:
    """What a signature adds to the trace of a call, beside a spec."""
    calls = 50 if quick else 200
    matrix = jax.ShapeDtypeStruct((2, 3), np.float32)
    vector = jax.ShapeDtypeStruct((3,), np.float32)

    def product(m: Any, v: Any) -> Any:
        return m @ v

    fixed = hc.host(product, result=jax.ShapeDtypeStruct((2,), np.float32))
    bound = hc.host(product, result="(m,n),(n)->(m)")

    def traced(f: Callable[..., Any]) -> float:
        def program(m: Any, v: Any) -> Any:
            return [f(m, v) for _ in range(calls)]

        begin = time.perf_counter()
        jax.make_jaxpr(program)(matrix, vector)
        return (time.perf_counter() - begin) / calls * 1e6

    def more() -> float:
        # In turn, and the least of each: what the machine does beside is not less.
        pairs = [(traced(bound), traced(fixed)) for _ in range(5 if quick else 15)]
        return min(each for each, _ in pairs) - min(each for _, each in pairs)

    return {"hostcall": more}


def program_size(quick: bool) -> dict[str, Case]:
    del quick
    f = jax.jit(jax.vmap(lambda c: hc.call(same, SCALAR, c)))

    def lines(batch: int) -> Case:
        xs = jnp.ones(batch, jnp.float32)
        return lambda: float(len(f.lower(xs).as_text().splitlines()))

    return {"batch of 1000": lines(1000), "batch of 2": lines(2)}


# With effects as without, since programs on one CPU device need no tokens.
EFFECTS = (
    at_most(1.5, "jit(x + 1)"),
    at_most(2.5, "jit(x + 1)", ours="drop-in"),
    at_most(1.7, WITH_ARRAY, ours="drop-in, jax.Arrays"),
)

ROWS = (
    Row(
        "dispatch, one pure call",
        (at_most(1.2, "jit(x + 1)"),),
        dispatch_pure,
    ),
    Row(
        "dispatch, one unordered call",
        EFFECTS,
        dispatch_with_effect(False),
    ),
    Row(
        "dispatch, one ordered call",
        EFFECTS,
        dispatch_with_effect(True),
    ),
    Row(
        "dispatch, one debug.callback",
        (
            at_most(1.5, WITH_ARRAY),
            at_most(1.5, "jit(x + 1)", ours='arrays="numpy"'),
        ),
        dispatch_debug,
    ),
    Row("eager call of a fresh lambda", (at_most(100, None),), fresh_time, rounds=3),
    Row(
        "memory kept by an eager call of a fresh lambda",
        # "Flat": 1 MiB in 10,000 calls is within the allocator's noise.
        (at_most(0.1, None),),
        fresh_memory,
        unit="KiB",
        rounds=3,
    ),
    Row(
        "eager call",
        (
            at_most(2, "by hand"),
            at_most(2.5, "by hand", ours="host function"),
            at_most(1, "JAX"),
        ),
        eager_call,
    ),
    Row(
        "eager tap",
        (at_most(0.6, "JAX"), at_most(0.6, "JAX", ours="in a jitted function")),
        eager_tap,
    ),
    Row("import hostcall after import jax", (at_most(25, None),), import_time, "ms", 5),
    Row(
        "tracing and lowering one call",
        (at_most(1.2, "JAX"), at_most(1.2, "by hand")),
        lowering_time,
    ),
    Row(
        "binding a signature in a trace",
        (at_most(10, None),),
        signature_time,
        rounds=3,
    ),
    Row(
        "program under vmap, lines",
        (at_most(1, "batch of 2", "batch of 1000"),),
        program_size,
        "lines",
        1,
    ),
)
