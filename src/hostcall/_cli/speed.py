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
        hostcalls_loop = _loop(hc.call)
        jaxs_loop = _loop(jax.pure_callback)
        # The first run compiles and warms the allocator.
        _microseconds(hostcalls_loop)
        _microseconds(jaxs_loop)
        hostcalls_times = []
        jaxs_times = []
        for _ in range(_ROUNDS):  # in turns, so that both meet the same noise
            hostcalls_times.append(_microseconds(hostcalls_loop))
            jaxs_times.append(_microseconds(jaxs_loop))
    hostcalls = statistics.median(hostcalls_times)
    jaxs = statistics.median(jaxs_times)
    print(f"  {'':<36} {'hostcall':>9} {'JAX':>9} {'ratio':>8}")
    name = "scalar, in a loop"
    print(f"  {name:<36} {hostcalls:>9.2f} {jaxs:>9.1f} {jaxs / hostcalls:>7.1f}x")


def _loop(call: Callable[..., Any]) -> Callable[[jax.Array], jax.Array]:
    """A compiled program that makes `_CALLS` calls, one after the other."""
    scalar = jax.ShapeDtypeStruct((), jnp.float32)

    def body(_: object, x: jax.Array) -> jax.Array:
        result: jax.Array = call(lambda x: x, scalar, x)
        return result

    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _CALLS, body, x)

    program: Callable[[jax.Array], jax.Array] = jax.jit(loop)
    return program


def _microseconds(loop: Callable[[jax.Array], jax.Array]) -> float:
    """What one call of a loop takes."""
    begin = time.perf_counter()
    loop(jnp.float32(1)).block_until_ready()
    seconds = time.perf_counter() - begin
    return 1e6 * seconds / _CALLS
