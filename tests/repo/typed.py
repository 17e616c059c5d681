"""What type checkers see of hostcall: `make check` reads this file, nobody runs it."""

from __future__ import annotations

from typing import assert_type

import jax
import numpy as np

import hostcall as hc


@hc.host(result=hc.like(0))
def scale(x: jax.Array, by: float = 2.0) -> jax.Array:
    return x * by


def length(x: jax.Array) -> jax.Array:
    return x


def host_functions(x: jax.Array) -> None:
    assert_type(scale(x), jax.Array)
    assert_type(scale(x, by=3.0), jax.Array)
    assert_type(scale.where(x > 0)(x, 1.0), jax.Array)
    scale("x")  # type: ignore[arg-type]
    scale(x, times=3.0)  # type: ignore[call-arg]
    made = hc.host(length, result=hc.like(0), vmap_method="parallel", tag="length")
    assert_type(made(x), jax.Array)
    assert_type(hc.finite_difference(made)(x), jax.Array)
    hc.host(np.multiply, result=hc.elementwise)(x, np.ones(3))
    hc.host(length)  # type: ignore[call-overload]


def taps(x: jax.Array) -> None:
    assert_type(hc.tap_through(lambda v: None, x, tag="x"), jax.Array)
    assert_type(hc.derivatives.tap_tangent(print, (x, x)), tuple[jax.Array, jax.Array])
    hc.tap(print, x, on="somewhere")  # type: ignore[arg-type]
    hc.call(np.sin, x, x, on=jax.devices()[0])


def names() -> None:
    hc.SpecError  # type: ignore[attr-defined]
    assert issubclass(hc.errors.SpecError, hc.HostcallError)
    assert_type(hc.monitor.stats(), dict[str, hc.monitor.CallStats])
    assert_type(hc.barrier(1.0, programs=False), bool)
    with hc.testing.collect() as seen, hc.patch_jax():
        assert_type(list(seen), list[str])
