"""Rows of `hc.host(cache=)`: a hit, beside the function's own call."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from benchmarks.harness import Case, Row, at_most, run_time


def same(x: Any) -> Any:
    return x


def slow(x: Any) -> Any:
    time.sleep(0.001)
    return x


def _loop(f: Any, steps: int) -> Any:
    """Calls `f` again and again with 16 values, in one program."""

    def body(i: Any, total: Any) -> Any:
        return total + f(total * 0 + (i % 16).astype(jnp.float32))

    return jax.jit(lambda x: jax.lax.fori_loop(0, steps, body, x))


def _kept(fn: Any, cache: Any = "memory") -> Any:
    return hc.host(fn, result=hc.results.like(0), cache=cache, version=1)


def hits(shape: tuple[int, ...]) -> Any:
    def cases(quick: bool) -> dict[str, Case]:
        steps, x = (200 if quick else 2000), np.zeros(shape, np.float32)
        plain = hc.host(same, result=hc.results.like(0))
        slowly = hc.host(slow, result=hc.results.like(0))
        made = {
            "memory": run_time(_loop(_kept(same), steps), x, per=steps),
            "no cache": run_time(_loop(plain, steps), x, per=steps),
            "a call of 1 ms": run_time(_loop(slowly, steps // 20), x, per=steps // 20),
        }
        try:
            import diskcache
        except ImportError:
            return made
        disk = diskcache.Cache(tempfile.mkdtemp())
        on_disk = _loop(_kept(same, disk), steps // 10)
        made["diskcache"] = run_time(on_disk, x, per=steps // 10)
        return made

    return cases


ROWS = (
    Row("a hit in hc.host(cache=), a scalar", (at_most(30, None, "memory"),), hits(())),
    Row("a hit in hc.host(cache=), 64 KiB", (), hits((16384,))),
)
