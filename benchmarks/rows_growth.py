"""Rows: what one of many costs.

One leaf, MiB, row, call in a program, program, thread or tap. The cases of a row differ
in how many there are, and one should not cost more for being among many.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import hostcall as hc
from benchmarks.harness import (
    Case,
    Row,
    Target,
    at_most,
    resident_kib,
    run_time,
    times_faster,
)
from benchmarks.rows_call import SCALAR, same


def leaves(quick: bool) -> dict[str, Case]:
    def case(call: Callable[..., Any], n: int) -> Case:
        xs = [jnp.float32(i) for i in range(n)]
        return run_time(jax.jit(lambda xs: call(same, xs, xs)), xs, per=n)

    many = 200 if quick else 2000
    floor = jax.jit(jax.lax.optimization_barrier)
    xs = [jnp.float32(i) for i in range(many)]
    return {
        "hostcall, 2,000": case(hc.call, many),
        "hostcall, 100": case(hc.call, 100),
        "hostcall, 1": case(hc.call, 1),
        "JAX, 2,000": case(jax.pure_callback, many),
        "no call, 2,000": run_time(floor, xs, per=many),
    }


def size(quick: bool) -> dict[str, Case]:
    def case(call: Callable[..., Any], mib: float) -> Case:
        x = jnp.ones(int(mib * 2**18))
        f = jax.jit(lambda x: call(lambda x: np.float32(1), SCALAR, x))
        return run_time(f, x, per=mib)  # type: ignore[arg-type]

    lent = functools.partial(hc.call, lend=True)
    gib = 4 if quick else 1024
    return {
        "hostcall, 1 GiB": case(hc.call, gib),
        "hostcall, 64 MiB": case(hc.call, gib / 16),
        "hostcall, 1 MiB": case(hc.call, 1),
        "lent, 1 GiB": case(lent, gib),
        "JAX, 1 GiB": case(jax.pure_callback, gib),
    }


def rows(quick: bool) -> dict[str, Case]:
    def case(call: Callable[..., Any], n: int) -> Case:
        def row(x: Any) -> Any:
            return call(same, SCALAR, x, vmap_method="sequential")

        return run_time(jax.jit(jax.vmap(row)), jnp.ones(n), per=n)

    million = 10_000 if quick else 1_000_000
    return {
        "hostcall, 1,000,000": case(hc.call, million),
        "hostcall, 1,000": case(hc.call, 1000),
        "JAX, 1,000": case(jax.pure_callback, 1000),
    }


def places(quick: bool) -> dict[str, Case]:
    """Milliseconds to trace and lower, per call in the program."""

    def case(call: Callable[..., Any], n: int) -> Case:
        def run() -> float:
            def program(x: Any) -> Any:
                for _ in range(n):
                    x = call(same, SCALAR, x)
                return x

            begin = time.perf_counter()
            jax.jit(program).lower(jnp.float32(1))
            return (time.perf_counter() - begin) / n * 1e3

        return run

    many = 200 if quick else 5000
    return {
        "hostcall, 5,000": case(hc.call, many),
        "hostcall, 100": case(hc.call, 100),
        "JAX, 5,000": case(jax.pure_callback, many),
    }


@functools.cache
def _programs(kind: str, n: int) -> dict[str, float]:
    """`_make_programs`, in a process that has made no other programs."""
    command = [sys.executable, "-m", __name__, kind, str(n)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def _make_programs(kind: str, n: int) -> dict[str, float]:
    """Makes `n` programs that stay.

    Returns ms and KiB per program, for the first tenth of them and for the last.
    """
    calls: dict[str, Callable[..., Any]] = {
        "hostcall": lambda i, x: hc.call(lambda x: x + i, SCALAR, x),
        "JAX": lambda i, x: jax.pure_callback(lambda x: x + i, SCALAR, x),
        "jit(x + i)": lambda i, x: x + i,
    }
    kept, tenth, found = [], n // 10, {}
    x = jnp.float32(1)
    seconds, memory = time.perf_counter(), resident_kib()
    for i in range(n):
        if i == n - tenth:
            seconds, memory = time.perf_counter(), resident_kib()
        kept.append(jax.jit(functools.partial(calls[kind], i)))
        kept[-1](x).block_until_ready()
        if i in (tenth - 1, n - 1):
            which = "first" if i < n - 1 else "last"
            found[f"ms {which}"] = (time.perf_counter() - seconds) / tenth * 1e3
            found[f"KiB {which}"] = (resident_kib() - memory) / tenth
    return found


def programs(unit: str) -> Callable[[bool], dict[str, Case]]:
    def cases(quick: bool) -> dict[str, Case]:
        n = 100 if quick else 3000

        def case(kind: str, which: str) -> Case:
            return lambda: _programs(kind, n)[f"{unit} {which}"]

        return {
            "hostcall, of 3,000 the last": case("hostcall", "last"),
            "hostcall, of 3,000 the first": case("hostcall", "first"),
            "JAX, the last": case("JAX", "last"),
            "jit(x + i), the last": case("jit(x + i)", "last"),
        }

    return cases


def threads(order: str) -> Callable[[bool], dict[str, Case]]:
    """Microseconds per run, over all threads together."""

    def cases(quick: bool) -> dict[str, Case]:
        def case(f: Callable[[Any], Any], n: int, runs: int) -> Case:
            f, x = jax.jit(f), jnp.float32(1)

            def work() -> None:
                for _ in range(runs // n):
                    f(x).block_until_ready()

            def run() -> float:
                started = [threading.Thread(target=work) for _ in range(n)]
                begin = time.perf_counter()
                for thread in started:
                    thread.start()
                for thread in started:
                    thread.join()
                return (time.perf_counter() - begin) / (runs // n * n) * 1e6

            return run

        def plus_1(x: Any) -> Any:
            return x + 1

        def ours(x: Any) -> Any:
            return hc.call(same, SCALAR, x, order=order)

        def theirs(x: Any) -> Any:
            if order == "pure":
                return jax.pure_callback(same, SCALAR, x)
            return io_callback(same, SCALAR, x, ordered=order == "ordered")

        runs = 64 if quick else 1024
        return {
            "hostcall, 16": case(ours, 16, runs),
            "hostcall, 1": case(ours, 1, runs),
            "JAX, 16": case(theirs, 16, runs // 4),
            "JAX, 1": case(theirs, 1, runs // 4),
            "jit(x + 1), 16": case(plus_1, 16, runs),
        }

    return cases


def taps(quick: bool) -> dict[str, Case]:
    """Microseconds per tap until it is delivered.

    From some 4 million taps on, the queue is full and the device waits.
    """

    def case(tap: Callable[..., Any], n: int) -> Case:
        def step(i: Any, x: Any) -> Any:
            tap(lambda x: None, x)
            return x + 1

        f = jax.jit(lambda x: jax.lax.fori_loop(0, n, step, x))

        def run() -> float:
            begin = time.perf_counter()
            f(jnp.float32(0))
            jax.effects_barrier()
            hc.barrier()
            return (time.perf_counter() - begin) / n * 1e6

        return run

    most = 10_000 if quick else 10_000_000
    return {
        "hostcall, 10,000,000": case(hc.tap, most),
        "hostcall, 100,000": case(hc.tap, most // 100),
        "hostcall, 1,000": case(hc.tap, 1000),
        "JAX, 1,000": case(jax.debug.callback, 1000),
    }


def _no_more(many: str, few: str, bound: float = 2) -> Target:
    return at_most(bound, few, many)


ROWS = (
    Row(
        "growth: a leaf of a call",
        (
            _no_more("hostcall, 2,000", "hostcall, 100"),
            at_most(2, "no call, 2,000", "hostcall, 2,000"),
            times_faster(5, "hostcall, 2,000", "JAX, 2,000"),
        ),
        leaves,
        rounds=5,
    ),
    Row(
        "growth: a MiB of an argument",
        # Above a size that the allocator chooses, each array is fresh memory.
        (
            _no_more("hostcall, 1 GiB", "hostcall, 64 MiB", 3),
            times_faster(2, "hostcall, 1 GiB", "JAX, 1 GiB"),
        ),
        size,
        rounds=3,
    ),
    Row(
        "growth: a row of a vmap",
        (_no_more("hostcall, 1,000,000", "hostcall, 1,000"),),
        rows,
        rounds=3,
    ),
    Row(
        "growth: tracing and lowering a place of a program",
        (
            _no_more("hostcall, 5,000", "hostcall, 100"),
            at_most(2, "JAX, 5,000", "hostcall, 5,000"),
        ),
        places,
        "ms",
        3,
    ),
    Row(
        "growth: a live program, time",
        (_no_more("hostcall, of 3,000 the last", "hostcall, of 3,000 the first", 1.5),),
        programs("ms"),
        "ms",
        1,
    ),
    Row(
        "growth: a live program, memory",
        (_no_more("hostcall, of 3,000 the last", "hostcall, of 3,000 the first", 1.5),),
        programs("KiB"),
        "KiB",
        1,
    ),
    Row(
        "growth: a thread that dispatches a pure call",
        # The threads share the cores and the GIL, which any program needs.
        (at_most(1.5, "jit(x + 1), 16", "hostcall, 16"),),
        threads("pure"),
        rounds=5,
    ),
    Row(
        "growth: a thread that dispatches an ordered call",
        (
            at_most(1.5, "jit(x + 1), 16", "hostcall, 16"),
            at_most(1, "JAX, 16", "hostcall, 16"),
        ),
        threads("ordered"),
        rounds=5,
    ),
    Row(
        "growth: a tap in the queue",
        (_no_more("hostcall, 10,000,000", "hostcall, 100,000"),),
        taps,
        rounds=1,
    ),
)


if __name__ == "__main__":
    print(json.dumps(_make_programs(sys.argv[1], int(sys.argv[2]))))
