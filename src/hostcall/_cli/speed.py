"""Times a call on this machine's CPU, beside JAX's own callback."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import hostcall as hc
from hostcall._cli.machine import heading

_CALLS = 1000
_ROUNDS = 3


def report() -> None:
    """Prints what a call of a scalar in a loop costs."""
    heading("Microseconds per call, in a compiled program on the CPU")
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        ways = _loop(hc.call), _loop(jax.pure_callback)
        # Measured in turns. The first run compiles and warms the allocator.
        rounds = [[_timed(loop) for loop in ways] for _ in range(1 + _ROUNDS)][1:]
        own_time, jaxs = map(statistics.median, zip(*rounds, strict=True))
    print(f"  {'':<36} {'hostcall':>9} {'JAX':>9} {'ratio':>8}")
    name = "scalar, in a loop"
    print(f"  {name:<36} {own_time:>9.2f} {jaxs:>9.1f} {jaxs / own_time:>7.1f}x")


def _loop(call: Callable[..., Any]) -> Any:
    scalar = jax.ShapeDtypeStruct((), jnp.float32)

    def body(_: object, c: Any) -> Any:
        return call(lambda x: x, scalar, c)

    return jax.jit(lambda x: jax.lax.fori_loop(0, _CALLS, body, x))


def _timed(f: Any) -> float:
    begin = time.perf_counter()
    f(jnp.float32(1)).block_until_ready()
    return (time.perf_counter() - begin) / _CALLS * 1e6
