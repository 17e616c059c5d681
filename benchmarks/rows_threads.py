"""Rows: Python code on one thread and on two.

Without the GIL (CPython 3.14t) two threads should do nearly twice as much; with it, no
more than one.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
import numpy as np

import hostcall as hc
from benchmarks.harness import Case, Row, Target, at_most, run_time
from benchmarks.rows_call import SCALAR

GIL = getattr(sys, "_is_gil_enabled", lambda: True)()
# A speed-up of 1.7 on two cores; with a GIL, no loss.
SCALES: tuple[Target, ...] = (
    at_most(1.3 if GIL else 1 / 1.7, "one thread", "two threads"),
)


def compute(x: Any, loops: int = 10_000) -> Any:
    """Pure Python, some 0.4 ms, that makes no NumPy array."""
    total = float(x)
    for i in range(loops):
        total += i % 7
    return np.float32(total)


def rows(quick: bool) -> dict[str, Case]:
    xs = np.arange(8 if quick else 40, dtype=np.float32)

    def case(workers: int) -> Case:
        pool = futures.ThreadPoolExecutor(workers)
        program = jax.jit(
            jax.vmap(
                lambda x: hc.call(
                    hc.host(compute, executor=pool), SCALAR, x, vmap_method="parallel"
                )
            )
        )
        return run_time(program, xs, per=len(xs))

    return {"one thread": case(1), "two threads": case(2)}


def on_threads(work: list[Callable[[], Any]], per: int) -> Callable[[], float]:
    """Microseconds of each of `per` pieces of work, on a thread for each function."""

    def run() -> float:
        started = [threading.Thread(target=function) for function in work]
        begin = time.perf_counter()
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        return (time.perf_counter() - begin) / per * 1e6

    return run


def loops(loops: int) -> Callable[[bool], dict[str, Case]]:
    """Threads that each run a program of their own with a loop of calls."""

    def cases(quick: bool) -> dict[str, Case]:
        xs = np.arange(50 if quick else 500, dtype=np.float32)

        def program() -> Any:
            def host(x: Any) -> Any:
                return compute(x, loops)

            f = jax.jit(lambda xs: jax.lax.map(lambda x: hc.call(host, SCALAR, x), xs))
            f(xs)
            return lambda: f(xs).block_until_ready()

        def case(n: int) -> Case:
            return on_threads([program() for _ in range(n)], per=len(xs) * n)

        return {"one thread": case(1), "two threads": case(2)}

    return cases


def numpy_alone(quick: bool) -> dict[str, Case]:
    """Threads that add to small arrays of their own, without JAX or hostcall."""
    count = 2_000 if quick else 200_000

    def add() -> None:
        x = np.zeros(4, np.float32)
        for _ in range(count):
            x = x + 1

    def case(n: int) -> Case:
        return on_threads([add] * n, per=count * n)

    return {"one thread": case(1), "two threads": case(2)}


ROWS = (
    Row("threads: parallel rows of pure Python, a row", SCALES, rows, rounds=25),
    Row("threads: loops of calls of 0.04 ms, a call", SCALES, loops(1000), rounds=25),
    Row("threads: loops of calls of nothing, a call", (), loops(0), rounds=25),
    Row(
        "threads: NumPy alone, sums of small arrays, a sum", (), numpy_alone, rounds=15
    ),
)
