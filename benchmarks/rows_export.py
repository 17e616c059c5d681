"""Rows of programs that were exported: their calls, and what loading them takes."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from benchmarks.harness import Case, Row, at_most, run_time


@hc.register("benchmarks.same")
def same(x: Any) -> Any:
    return x


def _loop(order: Any, steps: int) -> Any:
    def body(_: Any, x: Any) -> Any:
        return hc.call(same, x, x, order=order)

    return jax.jit(lambda x: jax.lax.fori_loop(0, steps, body, x))


def calls(order: str) -> Any:
    def cases(quick: bool) -> dict[str, Case]:
        steps, x = (200 if quick else 10_000), np.zeros(8, np.float32)
        loop = _loop(order, steps)
        loaded = hc.load(bytes(hc.export(loop)(x)))
        return {
            "loaded": run_time(jax.jit(loaded.call), x, per=steps),
            "compiled here": run_time(loop, x, per=steps),
        }

    return cases


def loads(quick: bool) -> dict[str, Case]:
    """To load a program of one call, compile it and run it once."""
    x = jnp.zeros(8)
    ours = bytes(hc.export(lambda x: hc.call(same, x, x))(x))
    plain = bytes(jax.export.export(jax.jit(jnp.sin))(x).serialize())

    def measured(load: Any) -> Case:
        def run() -> float:
            jax.clear_caches()
            start = time.perf_counter()
            jax.block_until_ready(load().call(x))
            return (time.perf_counter() - start) * 1e6

        return run

    return {
        "hc.load": measured(lambda: hc.load(ours)),
        "jax.export, without host code": measured(
            lambda: jax.export.deserialize(bytearray(plain))
        ),
    }


ROWS = (
    Row(
        "a call in an exported program",
        (at_most(1.1, "compiled here", "loaded"),),
        calls("pure"),
    ),
    Row("an ordered call in an exported program", (), calls("ordered")),
    Row("to load and run an exported program", (), loads),
)
