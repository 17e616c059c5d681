"""Rows: buffer callbacks beside JAX's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

import hostcall as hc
from benchmarks.harness import Case, Row, at_most, run_time, times_faster
from benchmarks.raw_handler import raw_call

RAW, MEMORYVIEWS = "raw handler", "two memoryviews"


def nothing(ctx: Any, out: Any, x: Any) -> None:
    pass


def copying(ctx: Any, out: Any, x: Any) -> None:
    np.asarray(out)[...] = np.asarray(x)


TO, FROM = (memoryview(bytearray(4)).cast("f") for _ in range(2))


def copying_elsewhere(ctx: Any, out: Any, x: Any) -> None:
    """The same with two of Python's memoryviews: the floor of what it costs NumPy."""
    np.asarray(TO)[...] = np.asarray(FROM)


def adding(ctx: Any, out: Any, x: Any) -> None:
    np.asarray(out)[0] += 1


def spec(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def loop(f: Callable[[Any], Any], n: int) -> Callable[[Any], Any]:
    return jax.jit(lambda x: jax.lax.fori_loop(0, n, lambda i, c: f(c), x))


def beside(host: Callable[..., None], floor: str) -> Callable[[bool], dict[str, Case]]:
    def cases(quick: bool) -> dict[str, Case]:
        x, n = jnp.float32(1), 200 if quick else 5000
        steps = {
            "hostcall": hc.buffers.buffer_callback(host, spec()),
            "JAX": buffer_callback(host, spec()),
            RAW: raw_call(spec(), lambda: None),
            MEMORYVIEWS: hc.buffers.buffer_callback(copying_elsewhere, spec()),
        }
        return {
            name: run_time(loop(steps[name], n), x, per=n)
            for name in ("hostcall", "JAX", floor)
        }

    return cases


def alone(quick: bool) -> dict[str, Case]:
    """Machine code: `labs` of the C library, which does not touch memory."""
    x, n = jnp.float32(1), 200 if quick else 5000
    code = hc.buffers.native(ctypes.CDLL(None).labs)
    native = hc.buffers.buffer_callback(code, spec(), input_output_aliases={0: 0})
    python = hc.buffers.buffer_callback(nothing, spec(), input_output_aliases={0: 0})
    return {
        "hc.buffers.native": run_time(loop(native, n), x, per=n),
        "hostcall": run_time(loop(python, n), x, per=n),
    }


def aliased(quick: bool) -> dict[str, Case]:
    """A loop's carry of 1 MiB, changed in place."""
    n, options = 50 if quick else 500, {"input_output_aliases": {0: 0}}
    small, large = spec(1), spec(1 << 18)

    def case(function: Any, like: Any, **more: Any) -> Case:
        x = jnp.zeros(like.shape, like.dtype)
        return run_time(loop(function(adding, like, **more), n), x, per=n)

    return {
        "hostcall": case(hc.buffers.buffer_callback, large, **options),
        "4 B": case(hc.buffers.buffer_callback, small, **options),
        "JAX": case(buffer_callback, large, **options),
    }


ROWS = (
    Row(
        "buffer_callback, empty",
        (times_faster(3), at_most(3.5, RAW)),
        beside(nothing, RAW),
    ),
    Row(
        "buffer_callback, numpy.asarray twice and a copy",
        (times_faster(1.8), at_most(1.25, MEMORYVIEWS)),
        beside(copying, MEMORYVIEWS),
    ),
    Row(
        "buffer_callback, machine code",
        (at_most(0.7, "hostcall", "hc.buffers.native"),),
        alone,
    ),
    Row(
        "buffer_callback, 1 MiB changed in place",
        (at_most(1.5, "4 B"),),
        aliased,
    ),
)
