"""Rows: coroutine functions, beside threads and JAX's callback; merged calls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from benchmarks.harness import Case, Row, at_most, run_time, times_faster
from benchmarks.rows_call import SCALAR

ROWS_AT_ONCE = 256
PAUSE = 0.05  # seconds


def _batch(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    host = hc.host(fn, **options)
    return jax.jit(jax.vmap(lambda x: hc.call(host, SCALAR, x, vmap_method="parallel")))


def waiting(pause: float) -> Callable[[bool], dict[str, Case]]:
    """A batch of rows that each wait for so many seconds, or for nothing."""

    async def row(x: Any) -> Any:
        await asyncio.sleep(pause)
        return x

    def plain(x: Any) -> Any:
        time.sleep(pause)
        return x

    async def gathered(xs: Any) -> Any:
        return await asyncio.gather(*map(row, xs))

    def run(xs: Any) -> Any:
        return np.array(asyncio.run(gathered(np.asarray(xs))), np.float32)

    def jaxs(x: Any) -> Any:
        how = {"vmap_method": "expand_dims"}
        return jax.pure_callback(run, SCALAR, x, **how)

    def cases(quick: bool) -> dict[str, Case]:
        xs = np.arange(ROWS_AT_ONCE, dtype=np.float32)
        pool = futures.ThreadPoolExecutor(ROWS_AT_ONCE)
        per = 1000 if pause else ROWS_AT_ONCE
        ours = _batch(row, concurrency=ROWS_AT_ONCE)
        return {
            "hostcall": run_time(ours, xs, per=per),
            "JAX, asyncio.run": run_time(jax.jit(jax.vmap(jaxs)), xs, per=per),
            "threads": run_time(_batch(plain, executor=pool), xs, per=per),
        }

    return cases


def merged(quick: bool) -> dict[str, Case]:
    """Milliseconds for 8 threads with 20 programs each, which call a simulator that
    takes 2 ms a call, however many entries it has, and makes one call at a time.
    """
    lock = threading.Lock()

    def simulate(x: Any) -> Any:
        with lock:
            time.sleep(0.002)
        return 2 * x

    def one(x: Any) -> Any:
        return hc.call(simulate, SCALAR, x)

    def together(x: Any) -> Any:
        return hc.call(hc.host(simulate, coalesce=8), SCALAR, x)

    def jaxs(x: Any) -> Any:
        return jax.pure_callback(simulate, SCALAR, x)

    def case(fn: Callable[..., Any]) -> Case:
        program = jax.jit(fn).lower(jnp.float32(0)).compile()

        def work() -> None:
            for _ in range(5 if quick else 20):
                program(jnp.float32(1)).block_until_ready()

        def run() -> float:
            threads = [threading.Thread(target=work) for _ in range(8)]
            begin = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return (time.perf_counter() - begin) * 1e3

        return run

    return {"hostcall": case(together), "one by one": case(one), "JAX": case(jaxs)}


ROWS = (
    Row(
        "256 rows that wait 50 ms, coroutines",
        (at_most(80, None),),
        waiting(PAUSE),
        "ms",
        5,
    ),
    Row(
        "256 rows that wait for nothing, coroutines, a row",
        (at_most(2, "JAX, asyncio.run"),),
        waiting(0),
        rounds=9,
    ),
    Row(
        "8 threads, a simulator of 2 ms a call, coalesce=8",
        (times_faster(3, base="one by one"),),
        merged,
        "ms",
        5,
    ),
)
