"""Measures what a call costs on this machine, beside JAX's own callbacks."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import hostcall as hc
from hostcall._cli.report import heading

# Name -> (what makes a program from a call, that program's argument, its calls).
Rows = dict[str, tuple[Callable[[Any], Any], Any, int]]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m hostcall costs",
        description="Times calls and taps on this machine's CPU, beside JAX's own.",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and coarser times")
    n, rounds = (100, 3) if parser.parse_args(arguments).quick else (1000, 7)
    jax.config.update("jax_default_device", jax.local_devices(backend="cpu")[0])
    heading("Microseconds per call, in compiled programs")
    compare(hc.call, jax.pure_callback, programs(n), rounds)
    heading("Microseconds per step, in compiled programs that log each step")
    compare(hc.tap, jax.debug.callback, logs(n), rounds)


def compare(ours: Any, theirs: Any, rows: Rows, rounds: int) -> None:
    """Prints what programs of both cost, measured in turns."""
    print(f"  {'':<36} {'hostcall':>9} {'JAX':>9} {'ratio':>8}")
    for name, (make, x, times) in rows.items():
        ways = make(ours), make(theirs)
        found: list[list[float]] = [[], []]
        for _ in range(1 + rounds):  # the first run compiles and warms the allocator
            for way, each in zip(ways, found, strict=True):
                each.append(timed(way, x, times))
                jax.effects_barrier()
                hc.barrier()
        a, b = (statistics.median(each[1:]) for each in found)
        print(f"  {name:<36} {a:>9.2f} {b:>9.1f} {b / a:>7.1f}x")


def programs(n: int) -> Rows:
    """Programs that call hc.call or jax.pure_callback."""

    def same(x: Any) -> Any:
        return x

    def spec(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    def loop(call: Any) -> Any:
        def body(_: Any, c: Any) -> Any:
            return call(same, jax.tree.map(spec, c), c)

        return jax.jit(lambda x: jax.lax.fori_loop(0, n, body, x))

    def rows(call: Any) -> Any:
        method = "sequential"
        return jax.jit(jax.vmap(lambda x: call(same, spec(x), x, vmap_method=method)))

    def once(call: Any) -> Any:
        return jax.jit(lambda x: call(same, spec(x), x))

    one, mib = jnp.float32(1), jnp.ones(1 << 18, jnp.float32)
    return {
        "scalar, in a loop": (loop, one, n),
        "scalar, per row of a vmap": (rows, jnp.ones(n, jnp.float32), n),
        "a tree of 20 scalars, in a loop": (loop, (one,) * 20, n),
        "scalar, one program per call": (once, one, 1),
        "1 MiB, one program per call": (once, mib, 1),
    }


def logs(n: int) -> Rows:
    """Programs that log with hc.tap or jax.debug.callback."""

    def note(*values: Any) -> None:
        """Gets what is logged."""

    def logged(log: Any) -> Any:
        def step(_: Any, c: Any) -> Any:
            log(note, jax.tree.map(jnp.sum, c))
            return jax.tree.map(lambda x: 0.9 * jnp.tanh(x), c)

        return jax.jit(lambda x: jax.lax.fori_loop(0, n, step, x))

    one, weights = jnp.float32(1), jnp.ones((256, 256), jnp.float32)
    return {
        "scalar, in a loop": (logged, one, n),
        "sum of 256 KiB, in a loop": (logged, weights, n),
    }


def timed(f: Callable[[Any], Any], x: Any, calls: int) -> float:
    """Microseconds per call; a short program is repeated until 20 ms have passed."""
    runs, begin = 0, time.perf_counter()
    while True:
        jax.block_until_ready(f(x))
        runs += 1
        seconds = time.perf_counter() - begin
        if seconds >= 0.02:
            return seconds / (runs * calls) * 1e6
