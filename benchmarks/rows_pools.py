"""Rows of 0, 1 and 10 ms on each kind of executor=, beside the pool's own map."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
import numpy as np

import hostcall as hc
from benchmarks.harness import Case, Row, run_time
from benchmarks.rows_call import SCALAR

WORKERS = 2
SPAWN = multiprocessing.get_context("spawn")


def row_of_0_ms(x: Any) -> Any:
    return x


def row_of_1_ms(x: Any) -> Any:
    time.sleep(0.001)
    return x


def row_of_10_ms(x: Any) -> Any:
    time.sleep(0.01)
    return x


# Each makes a pool, and its own function that maps over rows.


def _threads() -> tuple[Any, Any]:
    pool = futures.ThreadPoolExecutor(WORKERS)
    return pool, pool.map


def _processes() -> tuple[Any, Any]:
    pool = futures.ProcessPoolExecutor(WORKERS, mp_context=SPAWN)
    return pool, pool.map


def _multiprocessing() -> tuple[Any, Any]:
    pool = SPAWN.Pool(WORKERS)
    atexit.register(pool.terminate)
    return pool, pool.imap


def _loky() -> tuple[Any, Any]:
    import loky

    pool = loky.ProcessPoolExecutor(WORKERS)
    return pool, pool.map


def _dask() -> tuple[Any, Any]:
    import distributed

    cluster = distributed.LocalCluster(
        n_workers=WORKERS,
        threads_per_worker=1,
        host="127.0.0.1",
        dashboard_address=None,
    )
    client = distributed.Client(cluster)
    atexit.register(cluster.close)
    atexit.register(client.close)
    return client, lambda fn, xs: client.gather(client.map(fn, xs, pure=False))


def _ray() -> tuple[Any, Any]:
    import ray.util.multiprocessing

    paths = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    ray.init(num_cpus=WORKERS, include_dashboard=False, runtime_env=paths)
    pool = ray.util.multiprocessing.Pool(WORKERS)
    return pool, pool.imap


KINDS = {
    "threads": (None, _threads),
    "processes": (None, _processes),
    "multiprocessing.Pool": (None, _multiprocessing),
    "loky": ("loky", _loky),
    "Dask": ("distributed", _dask),
    "Ray": ("ray", _ray),
}


@functools.cache
def _made(name: str) -> tuple[Any, Any]:
    return KINDS[name][1]()


def beside(fn: Callable[..., Any], n: int) -> Callable[[bool], dict[str, Case]]:
    """Microseconds of one row, on two workers: half a row's time, and the overhead."""

    def cases(quick: bool) -> dict[str, Case]:
        xs = np.arange(n // 4 if quick else n, dtype=np.float32)
        made = {}
        for name, (package, _) in KINDS.items():
            if package is not None and importlib.util.find_spec(package) is None:
                continue
            pool, each = _made(name)
            host = hc.host(fn, executor=pool)
            row = functools.partial(hc.call, host, SCALAR, vmap_method="parallel")
            made[name] = run_time(jax.jit(jax.vmap(row)), xs, per=len(xs))
            own = functools.partial(_all, each)
            made[f"{name}, their own"] = run_time(own, fn, xs, per=len(xs))
        return made

    return cases


def _all(each: Callable[..., Any], fn: Callable[..., Any], xs: Any) -> list[Any]:
    return list(each(fn, xs))


ROWS = (
    Row("rows of 0 ms on a pool of two", (), beside(row_of_0_ms, 200), rounds=3),
    Row("rows of 1 ms on a pool of two", (), beside(row_of_1_ms, 200), rounds=3),
    Row("rows of 10 ms on a pool of two", (), beside(row_of_10_ms, 40), rounds=3),
)
