"""Rows: coroutine functions, beside threads and JAX's callback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
import numpy as np

import hostcall as hc
from benchmarks.harness import Case, Row, at_most, run_time
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
)
