"""Times calls and taps on this machine's CPU, beside JAX's own callbacks."""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import hostcall as hc
from hostcall._cli.machine import heading

Call = Callable[..., Any]
Program = Any  # what jax.jit makes
# Name -> (what makes a program from a call, that program's argument, its calls).
Rows = dict[str, tuple[Callable[[Call], Program], Any, int]]


SHORT = "time calls beside JAX's own"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer and coarser times")


def main(options: argparse.Namespace) -> int:
    n, rounds = (100, 3) if options.quick else (1000, 7)
    jax.config.update("jax_default_device", jax.local_devices(backend="cpu")[0])
    heading("Microseconds per call, in compiled programs")
    compare(hc.call, jax.pure_callback, programs(n), rounds)
    heading("Microseconds per step, in compiled programs that log each step")
    compare(hc.tap, jax.debug.callback, logs(n), rounds)
    return 0


def one() -> None:
    """Prints what a call in a loop costs on the CPU."""
    heading("Microseconds per call, in a compiled program on the CPU")
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        name, row = next(iter(programs(1000).items()))
        compare(hc.call, jax.pure_callback, {name: row}, 3)


def compare(ours: Call, theirs: Call, rows: Rows, rounds: int) -> None:
    """Prints what programs of both cost, measured in turns."""
    print(f"  {'':<36} {'hostcall':>9} {'JAX':>9} {'ratio':>8}")
    for name, (make, x, times) in rows.items():
        ways = make(ours), make(theirs)
        # The first run compiles and warms the allocator.
        found = [[timed(way, x, times) for way in ways] for _ in range(1 + rounds)][1:]
        a, b = map(statistics.median, zip(*found, strict=True))
        print(f"  {name:<36} {a:>9.2f} {b:>9.1f} {b / a:>7.1f}x")


def programs(n: int) -> Rows:
    """Programs that call hc.call or jax.pure_callback."""

    def same(x: Any) -> Any:
        return x

    scalar = jax.ShapeDtypeStruct((), jnp.float32)

    def loop(call: Call) -> Program:
        def body(_: object, c: Any) -> Any:
            return call(same, jax.eval_shape(same, c), c)

        return jax.jit(lambda x: jax.lax.fori_loop(0, n, body, x))

    def rows(call: Call) -> Program:
        one = functools.partial(call, same, scalar, vmap_method="sequential")
        return jax.jit(jax.vmap(one))

    def once(call: Call) -> Program:
        return jax.jit(lambda x: call(same, jax.eval_shape(same, x), x))

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

    def note(*values: object) -> None:
        """Gets what is logged."""

    def logged(log: Call) -> Program:
        def step(_: jax.Array, c: jax.Array) -> jax.Array:
            log(note, jnp.sum(c))
            return 0.9 * jnp.tanh(c)

        return jax.jit(lambda x: jax.lax.fori_loop(0, n, step, x))

    one, weights = jnp.float32(1), jnp.ones((256, 256), jnp.float32)
    return {
        "scalar, in a loop": (logged, one, n),
        "sum of 256 KiB, in a loop": (logged, weights, n),
    }


def timed(f: Program, x: Any, calls: int) -> float:
    """Microseconds per call; a short program is repeated until 20 ms have passed."""
    runs, seconds, begin = 0, 0.0, time.perf_counter()
    while seconds < 0.02:
        jax.block_until_ready(f(x))
        runs += 1
        seconds = time.perf_counter() - begin
    jax.effects_barrier()
    hc.barrier()
    return seconds / (runs * calls) * 1e6
