"""Rows on a GPU: calls, taps and a training loop. There are none without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback

import hostcall as hc
from benchmarks.harness import (
    Case,
    Row,
    at_most,
    dispatch_time,
    run_time,
    times_faster,
)

SIZES = {"4 B": 1, "4 KiB": 1 << 10, "1 MiB": 1 << 18, "64 MiB": 1 << 24}


def gpu() -> Any | None:
    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        return None


def same(x: Any) -> Any:
    return x


def through(size: int) -> Callable[[bool], dict[str, Case]]:
    """Sends an array through a function that returns it.

    The floor is two copies between the GPU and pinned memory, each waited for, and the
    function's own work: its result is not its argument's memory.
    """

    def cases(quick: bool) -> dict[str, Case]:
        device = gpu()
        x = jax.device_put(jnp.zeros(size, jnp.float32), device)
        spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
        pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        there = jax.sharding.SingleDeviceSharding(device, memory_kind="device")

        source, result = np.ones(size, np.float32), np.empty(size, np.float32)

        def copies(x: Any) -> Any:
            on_host = jax.block_until_ready(jax.device_put(x, pinned))
            np.copyto(result, source)
            return jax.device_put(on_host, there)

        return {
            "hostcall": run_time(
                jax.jit(lambda x: hc.call(same, spec, x, lend=True)), x
            ),
            "JAX": run_time(jax.jit(lambda x: jax.pure_callback(same, spec, x)), x),
            "two copies, np.copyto": run_time(copies, x),
        }

    return cases


def training(quick: bool) -> dict[str, Case]:
    """One step of a small network, with and without a tap of its loss."""
    n, device = 20 if quick else 200, gpu()
    rng = np.random.default_rng(0)
    make = lambda *shape: jax.device_put(
        jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32), device
    )
    weights, x = [make(1024, 1024) for _ in range(4)], make(512, 1024)

    def loss(weights: Any) -> Any:
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return (y**2).mean()

    def step(weights: Any, tap: Callable[[Any], None]) -> Any:
        value, grads = jax.value_and_grad(loss)(weights)
        tap(value)
        return [w - 1e-2 * g for w, g in zip(weights, grads, strict=True)]

    def loop(tap: Callable[[Any], None]) -> Callable[[Any], Any]:
        return jax.jit(lambda w: jax.lax.fori_loop(0, n, lambda i, w: step(w, tap), w))

    return {
        "hostcall": run_time(loop(lambda v: hc.tap(ignore, v)), weights, per=n),
        "no tap": run_time(loop(ignore), weights, per=n),
        "debug.callback": run_time(
            loop(lambda v: jax.debug.callback(ignore, v)), weights, per=n
        ),
    }


def scalar(n: int) -> Callable[[bool], dict[str, Case]]:
    """A loop that XLA's host thread drives, with a call in its body."""

    def cases(quick: bool) -> dict[str, Case]:
        x = jax.device_put(jnp.float32(1), gpu())
        spec = jax.ShapeDtypeStruct((), jnp.float32)

        def loop(call: Callable[[Any], Any]) -> Case:
            f = jax.jit(lambda x: jax.lax.fori_loop(0, n, lambda i, x: call(x + 1), x))
            return run_time(f, x, per=n)

        return {
            "hostcall": loop(lambda x: hc.call(same, spec, x)),
            "JAX": loop(lambda x: jax.pure_callback(same, spec, x)),
            "x + 1 alone": loop(same),
        }

    return cases


def rows(n: int) -> Callable[[bool], dict[str, Case]]:
    """A vmap that runs a function row by row."""

    def cases(quick: bool) -> dict[str, Case]:
        x = jax.device_put(jnp.zeros(n, jnp.float32), gpu())
        spec = jax.ShapeDtypeStruct((), jnp.float32)
        ours = lambda x: hc.call(same, spec, x)
        theirs = lambda x: jax.pure_callback(same, spec, x, vmap_method="sequential")
        return {
            "hostcall": run_time(jax.jit(jax.vmap(ours)), x, per=n),
            "JAX": run_time(jax.jit(jax.vmap(theirs)), x, per=n),
        }

    return cases


def buffers(quick: bool) -> dict[str, Case]:
    """A function that is given the GPU's memory and its stream, and does nothing."""
    n = 100
    x = jax.device_put(jnp.float32(1), gpu())
    spec = jax.ShapeDtypeStruct((), jnp.float32)
    nothing = lambda ctx, out, x: None

    def loop(function: Any, **options: Any) -> Case:
        f = function(nothing, spec, input_output_aliases={0: 0}, **options)
        g = jax.jit(lambda x: jax.lax.fori_loop(0, n, lambda i, x: f(x + 1), x))
        return run_time(g, x, per=n)

    alone = jax.jit(lambda x: jax.lax.fori_loop(0, n, lambda i, x: x + 1, x))
    return {
        "hostcall": loop(hc.buffers.buffer_callback),
        "JAX": loop(buffer_callback),
        "x + 1 alone": run_time(alone, x, per=n),
    }


def dispatch(ours: Any, theirs: Any) -> Callable[[bool], dict[str, Case]]:
    def cases(quick: bool) -> dict[str, Case]:
        x = jax.device_put(jnp.float32(1), gpu())
        programs = {
            "hostcall": lambda x: (ours(x), x + 1)[1],
            "jit(x + 1)": lambda x: x + 1,
            "JAX": lambda x: (theirs(x), x + 1)[1],
        }
        return {
            name: dispatch_time(jax.jit(f), x, repeat=64)
            for name, f in programs.items()
        }

    return cases


def ignore(value: Any) -> None:
    pass


ROWS: tuple[Row, ...] = ()
if gpu() is not None:
    ROWS = (
        *(
            Row(
                f"GPU, {name} in and out",
                (times_faster(3),)
                if size < 1 << 18
                else (times_faster(3), at_most(1.3, "two copies, np.copyto")),
                through(size),
            )
            for name, size in SIZES.items()
        ),
        Row("GPU, scalar call in a compiled loop", (times_faster(3),), scalar(100)),
        Row("GPU, vmap row by row, a row", (times_faster(80),), rows(1000)),
        Row(
            "GPU, empty buffer callback in a loop",
            (at_most(1.1, "x + 1 alone"),),
            buffers,
        ),
        Row("GPU, a training step with a tap", (at_most(1.03, "no tap"),), training),
        Row(
            "GPU, dispatch, one tap",
            (),
            dispatch(
                lambda x: hc.tap(ignore, x), lambda x: jax.debug.callback(ignore, x)
            ),
        ),
        Row(
            "GPU, dispatch, one ordered call",
            (),
            dispatch(
                lambda x: hc.call(ignore, None, x, order="ordered"),
                lambda x: io_callback(ignore, None, x, ordered=True),
            ),
        ),
    )
