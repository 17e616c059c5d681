"""Rows: host functions with derivatives beside custom_vjp over jax.pure_callback."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from benchmarks.harness import Case, Row, run_time, times_faster

SCALAR = jax.ShapeDtypeStruct((), np.float32)


def forward(x: Any) -> tuple[Any, Any]:
    x = np.asarray(x)
    return np.sin(x), np.cos(x)


def backward(cos: Any, ct: Any) -> tuple[Any]:
    return (np.asarray(ct) * np.asarray(cos),)


def ours(**options: Any) -> Any:
    f = hc.host(np.sin, result=hc.results.like(0))
    f.defvjp(forward, backward, **options)
    return f


TWO_CALLS = "custom_vjp over hc.call"


def by_rules(call: Any) -> Any:
    """A gradient by the two calls that it can't do without."""
    f = jax.custom_vjp(lambda x: call(np.sin, SCALAR, x))
    f.defvjp(
        lambda x: call(forward, (SCALAR, SCALAR), x),
        lambda cos, ct: call(backward, (SCALAR,), cos, ct),
    )
    return f


def gradient(f: Any, n: int) -> Any:
    """A compiled loop of n forward and backward passes."""
    return jax.jit(lambda x: jax.lax.fori_loop(0, n, lambda i, c: jax.grad(f)(c), x))


def gradients(quick: bool) -> dict[str, Case]:
    x, n = jnp.float32(1), 100 if quick else 1000
    return {
        "hostcall": run_time(gradient(ours(), n), x, per=n),
        "residuals=": run_time(gradient(ours(residuals=SCALAR), n), x, per=n),
        TWO_CALLS: run_time(gradient(by_rules(hc.call), n), x, per=n),
        "JAX": run_time(gradient(by_rules(jax.pure_callback), n), x, per=n),
    }


def dispatch(quick: bool) -> dict[str, Case]:
    x = jnp.float32(1)
    return {
        "hostcall": run_time(jax.jit(jax.grad(ours())), x),
        "residuals=": run_time(jax.jit(jax.grad(ours(residuals=SCALAR))), x),
        TWO_CALLS: run_time(jax.jit(jax.grad(by_rules(hc.call))), x),
        "JAX": run_time(jax.jit(jax.grad(by_rules(jax.pure_callback))), x),
    }


ROWS = (
    Row(
        "gradient of a host function with a vjp, in a loop",
        (times_faster(8), times_faster(8, "residuals=")),
        gradients,
    ),
    Row("gradient of a host function, a program", (times_faster(8),), dispatch),
)
