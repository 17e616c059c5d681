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
from hostcall._cli.report import heading, line


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m hostcall costs",
        description="Times calls and taps on this machine's CPU, beside JAX's own.",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and coarser times")
    quick = parser.parse_args(arguments).quick
    jax.config.update("jax_default_device", jax.local_devices(backend="cpu")[0])
    costs(quick)
    logging(quick)


def costs(quick: bool) -> None:
    """Prints microseconds per call beside jax.pure_callback, measured in turns."""
    heading("Microseconds per call, in compiled programs")
    n, rounds = (100, 3) if quick else (1000, 7)
    print(f"  {'':<36} {'hostcall':>9} {'JAX':>9} {'ratio':>8}")
    for name, (call, x, times) in programs(n).items():
        ours, theirs = call(hc.call), call(jax.pure_callback)
        mine, yours = [], []
        for _ in range(1 + rounds):  # the first run compiles and warms the allocator
            mine.append(timed(ours, x, times))
            yours.append(timed(theirs, x, times))
        a, b = statistics.median(mine[1:]), statistics.median(yours[1:])
        print(f"  {name:<36} {a:>9.2f} {b:>9.1f} {b / a:>7.1f}x")


def logging(quick: bool) -> None:
    """Prints microseconds per step of one compiled loop in which each step logs."""
    heading("Microseconds per step, in a compiled training loop that logs each step")
    steps, rounds = (500, 2) if quick else (5000, 5)
    key = jax.random.key(0)
    inputs = jax.random.normal(key, (32, 8), jnp.float32)
    target = jnp.sin(inputs.sum(1))
    count = 0

    def note(value: Any) -> None:
        nonlocal count
        count += 1

    def trained(log: Callable[..., Any] | None) -> Program:
        def loss(w: Any) -> Any:
            return ((jnp.tanh(inputs @ w) - target) ** 2).mean()

        def step(w: Any, _: Any) -> Any:
            value, slope = jax.value_and_grad(loss)(w)
            if log is not None:
                log(note, value)
            return w - 0.1 * slope, None

        program: Program = jax.jit(lambda w: jax.lax.scan(step, w, length=steps)[0])
        return program

    weights = jnp.zeros(8, jnp.float32)
    ways = {
        "no logging": trained(None),
        "hc.tap": trained(hc.tap),
        "jax.debug.callback": trained(jax.debug.callback),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + rounds):
        for name, program in ways.items():
            seconds[name].append(timed(program, weights, steps))
            jax.effects_barrier()
            hc.barrier()
    for name, figures in seconds.items():
        line(name, f"{statistics.median(figures[1:]):.2f}")
    line("losses that arrived", f"{count}")
    assert count > 0
    assert count % steps == 0


Program = Callable[[Any], Any]


def programs(n: int) -> dict[str, tuple[Program, Any, int]]:
    """Name -> (function from hc.call or jax.pure_callback to a program, argument of
    that program, its calls).
    """

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


def timed(f: Callable[[Any], Any], x: Any, calls: int) -> float:
    """Microseconds per call; a short program is repeated until 20 ms have passed."""
    runs, begin = 0, time.perf_counter()
    while True:
        jax.block_until_ready(f(x))
        runs += 1
        seconds = time.perf_counter() - begin
        if seconds >= 0.02:
            return seconds / (runs * calls) * 1e6
