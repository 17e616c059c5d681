"""Rows: vmap_method="parallel" on pools, beside the pools' own map functions."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import jax
import numpy as np

import hostcall as hc
from benchmarks.harness import Case, Row, at_most, run_time
from benchmarks.rows_call import SCALAR, same

SPAWN = multiprocessing.get_context("spawn")


def waits(x: Any) -> Any:
    time.sleep(0.005)
    return x


def entry(x: Any, table: Any) -> Any:
    return x + table[5]


def _pools() -> Iterator[tuple[str, Any, Callable[..., Any]]]:
    """Pools, each with its own function that maps over all rows."""
    threads = futures.ThreadPoolExecutor(2)
    yield "threads", threads, threads.map
    processes = futures.ProcessPoolExecutor(2, mp_context=SPAWN)
    yield "processes", processes, processes.map
    pool = SPAWN.Pool(2)
    yield "multiprocessing.Pool", pool, pool.imap


def _all(each: Callable[..., Any]) -> Callable[..., Any]:
    return lambda fn, xs: list(each(fn, xs))


def _on(pool: Any, fn: Callable[..., Any], *more: Any) -> Callable[..., Any]:
    host = hc.host(fn, executor=pool)

    def row(x: Any, *more: Any) -> Any:
        return hc.call(host, SCALAR, x, *more, vmap_method="parallel")

    return jax.jit(jax.vmap(row, (0, *[None] * len(more))))


def beside(fn: Callable[..., Any], n: int) -> Callable[[bool], dict[str, Case]]:
    def cases(quick: bool) -> dict[str, Case]:
        xs = np.arange(n // 10 if quick else n, dtype=np.float32)
        made = {}
        for name, pool, each in _pools():
            made[name] = run_time(_on(pool, fn), xs, per=len(xs))
            made[f"{name}, their own"] = run_time(_all(each), fn, xs, per=len(xs))
        return made

    return cases


def shared(quick: bool) -> dict[str, Case]:
    """Milliseconds per call of 8 rows that share one large argument."""
    table = np.ones(100_000 if quick else 16_000_000, np.float32)
    xs = np.arange(8, dtype=np.float32)
    made = {}
    for name, pool, _ in _pools():
        made[name] = run_time(_on(pool, entry, table), xs, table, per=1000)
    return made


def _as_their_own(bound: float) -> tuple[Any, ...]:
    names = ("threads", "processes", "multiprocessing.Pool")
    return tuple(at_most(bound, f"{name}, their own", name) for name in names)


ROWS = (
    Row(
        "parallel rows of 5 ms, two workers, a row",
        _as_their_own(1.3),
        beside(waits, 40),
        rounds=3,
    ),
    Row(
        "parallel rows of nothing, two workers, a row",
        (),
        beside(same, 200),
        rounds=5,
    ),
    Row(
        "64 MB that 8 parallel rows share, two workers",
        tuple(
            at_most(500, None, name)
            for name in ("threads", "processes", "multiprocessing.Pool")
        ),
        shared,
        "ms",
        3,
    ),
)
