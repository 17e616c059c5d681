"""Rows: what a trace adds to a call and to a tap. The flight recorder is always on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import hostcall as hc
from benchmarks.harness import Case, Row, at_most


def loop(n: int, body: Callable[[Any], Any]) -> dict[str, Case]:
    """The cost of a step, in us, without a trace and what a trace adds to it."""
    run = jax.jit(lambda x: jax.lax.fori_loop(0, n, lambda i, c: body(c), x))

    def seconds() -> float:
        begin = time.perf_counter()
        run(jnp.float32(0)).block_until_ready()
        return time.perf_counter() - begin

    def off() -> float:
        took = seconds() / n * 1e6
        hc.barrier()
        return took

    def added() -> float:
        without = off()
        with hc.monitor.events() as events:
            took = seconds() / n * 1e6
            hc.barrier()
            taken = len(events.take())
        assert taken + events.dropped >= n
        return took - without

    off()
    return {"hostcall": added, "no trace": off}


def calls(quick: bool) -> dict[str, Case]:
    spec = jax.ShapeDtypeStruct((), jnp.float32)
    return loop(20_000, lambda c: hc.call(lambda x: x, spec, c))


def taps(quick: bool) -> dict[str, Case]:
    def body(c: Any) -> Any:
        hc.tap(lambda x: None, c)
        return c + 1

    return loop(20_000, body)


ROWS = (
    Row("a trace, added to a scalar call", (at_most(0.3, None),), calls),
    Row("a trace, added to a scalar tap", (at_most(0.3, None),), taps),
)
