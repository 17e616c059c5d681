"""What type checkers see of hostcall: mypy and pyright read this file, nobody runs it.

An ignored line is a mistake that both have to find: an ignore without one is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_type

import jax
import numpy as np

import hostcall as hc


@hc.host(result=hc.results.like(0))
def scale(x: jax.Array, by: float = 2.0) -> jax.Array:
    return x * by


@hc.host(result=hc.results.like(0), vmap_method="parallel")
async def asked(x: jax.Array) -> jax.Array:
    return x


async def remote(x: jax.Array) -> jax.Array:
    return x


def length(x: jax.Array) -> jax.Array:
    return x


def calls(x: jax.Array) -> None:
    assert_type(hc.call(np.sin, x, x), jax.Array)
    assert_type(hc.call(np.sin, jax.ShapeDtypeStruct((3,), x.dtype), x), jax.Array)
    assert_type(hc.call(hc.host(len, timeout=1.0), 0, "text", where=True), jax.Array)
    assert_type(hc.call(np.sin, (x, x), x), Any)
    assert_type(hc.call(print, None, x, order="ordered", end=""), None)
    hc.call(np.sin, x, x, order="sorted")  # type: ignore
    hc.call("sin", x, x)  # type: ignore
    hc.call(np.sin, x, x, on=jax.devices()[0])


def host_functions(x: jax.Array) -> None:
    assert_type(scale(x), jax.Array)
    assert_type(scale(x, by=3.0), jax.Array)
    assert_type(scale.where(x > 0)(x, 1.0), jax.Array)
    scale("x")  # type: ignore
    scale(x, times=3.0)  # type: ignore
    made = hc.host(
        length, result=hc.results.like(0), vmap_method="parallel", tag="length"
    )
    assert_type(made(x), jax.Array)
    assert_type(hc.derivatives.finite_difference(made)(x), jax.Array)
    assert_type(asked(x), jax.Array)
    assert_type(hc.host(remote, result=hc.results.like(0), concurrency=8)(x), jax.Array)
    hc.host(np.multiply, result=hc.results.elementwise)(x, np.ones(3))
    assert_type(hc.call(hc.host(length, timeout=1.0), x, x), jax.Array)
    hc.host(length, result=hc.results.like(0), lend="in")  # type: ignore


def rules(x: jax.Array) -> None:
    @scale.defjvp
    def jvp(primals: tuple[jax.Array, float], tangents: tuple[jax.Array, None]) -> Any:
        return tangents[0] * primals[1]

    @scale.defjacobian(where="jax")
    def jacobian(x: jax.Array, by: float) -> jax.Array:
        return jax.numpy.diag(x * 0 + by)

    @scale.defbatch
    def batch(size: int, batched: tuple[bool, bool], x: jax.Array, by: float) -> Any:
        return scale(x, by), True

    assert_type(scale.deftranspose(length)(x), jax.Array)
    assert_type(jacobian(x, 1.0), jax.Array)
    assert_type(scale.defjvps(lambda t, y, x: t, None, where="jax"), None)
    assert_type(scale.defvjp(length, length), None)
    scale.defjvp(where="gpu")  # type: ignore
    scale.defjvps(2)  # type: ignore
    assert_type(hc.testing.check(scale, x), hc.testing.Report)


def taps(x: jax.Array) -> None:
    assert_type(hc.tap_through(lambda v: None, x, tag="x"), jax.Array)
    assert_type(hc.derivatives.tap_tangent(print, (x, x)), tuple[jax.Array, jax.Array])
    assert_type(hc.tap(print, x, every=10, end=""), None)
    assert_type(hc.print("{}", x, every=0.5), None)
    hc.print(x)  # type: ignore


def objects(x: jax.Array) -> None:
    with hc.Object(dict, methods={"get": x}) as kept:
        assert_type(kept, hc.Object)
        kept.get(x, where=True, fill=0)
    hc.Object(dict)  # type: ignore
    hc.Object(dict, methods={"get": x}, order="pure")  # type: ignore


def buffers(out: hc.buffers.Buffer) -> None:
    spec = jax.ShapeDtypeStruct(out.shape, out.dtype)
    assert_type(
        hc.buffers.buffer_callback(hc.buffers.native(7), spec), Callable[..., Any]
    )


def names() -> None:
    hc.SpecError  # type: ignore
    assert issubclass(hc.errors.SpecError, hc.errors.HostcallError)
    assert_type(hc.monitor.stats(), dict[str, hc.monitor.CallStats])
    assert_type(hc.barrier(1.0, programs=False), bool)
    with hc.testing.collect() as seen, hc.patch_jax():
        assert_type(list(seen), list[str])
