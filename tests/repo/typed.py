"""What type checkers see of hostcall: mypy and pyright read this file, nobody runs it.

An ignored line is a mistake that both have to find: an ignore without one is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, assert_type

import jax
import numpy as np
import numpy.typing as npt

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


Floats = npt.NDArray[np.float32]


@hc.host(result=hc.results.like(0), vmap_method="expand_dims")
def cube(x: Floats) -> Floats:
    return x**3


def split(x: Floats, by: float) -> tuple[Floats, float]:
    return x / by, by


async def fetched(x: Floats) -> Floats:
    return x


def norm(x: Floats) -> float:
    return float(np.linalg.norm(x))


def tree(x: Floats) -> Any:
    return {"x": x}


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
    assert_type(hc.host(np.sin)(x), jax.Array)
    assert_type(hc.host(np.hypot, dtype=np.float32).where(x.any())(x, x), jax.Array)
    assert_type(hc.host(np.frexp)(x), Any)
    assert_type(hc.host(norm, result="(n)->()", sizes=None)(x), jax.Array)
    assert_type(hc.call(np.sin, ..., x), Any)
    hc.host(np.sin, sizes=3)  # type: ignore
    assert_type(hc.call(hc.host(length, timeout=1.0), x, x), jax.Array)
    hc.host(length, result=hc.results.like(0), lend="in")  # type: ignore


def functions_of_numpy(x: jax.Array) -> None:
    """In a program they take and return jax.Arrays, whatever they say."""
    assert_type(cube(x), jax.Array)
    assert_type(cube.where(x.any())(x), jax.Array)
    assert_type(hc.host(norm, result=x)(x), jax.Array)
    assert_type(hc.host(fetched, result=x)(x), jax.Array)
    assert_type(hc.host(split, result=(x, 0.0))(x, 2.0), tuple[jax.Array, ...])
    assert_type(hc.host(tree, result={"x": x})(cube.fn(np.ones(3, np.float32))), Any)
    assert_type(hc.host(lambda v: v, result=x)(x), Any)
    assert_type(hc.derivatives.finite_difference(cube)(x), jax.Array)
    of_arrays: Callable[[jax.Array], jax.Array] = cube
    of_arrays(x)


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


@hc.register("typed.program")
def named(x: Floats) -> Floats:
    return x


def rows() -> Iterator[Floats]:
    yield np.ones(3, np.float32)


def a_program(x: jax.Array) -> jax.Array:
    """Every face in one program, as a user would write it."""
    feed = hc.feed(rows, jax.ShapeDtypeStruct((3,), x.dtype), on_end="repeat")
    assert_type(feed, hc.typing.Feed)
    batch, _ = feed()
    value = hc.call(named, x, x, tag="named")
    hc.tap(print, value, every=1.0, where=value.any())
    hc.print("mean {:.3f}", value.mean(), on="once")
    value = hc.tap_through(print, hc.watch(cube(value), also={"x": x}))
    hc.progress(0, 10, desc="fit", loss=value.mean())
    root: Any = hc.pure_callback(np.sqrt, x, x, vmap_method="expand_dims")
    logged: Any = hc.io_callback(named, x, x, ordered=True)
    hc.debug.print("x is {}", x, ordered=True)
    hc.debug.callback(print, x)
    here = hc.current()
    assert_type(here, hc.typing.Current | None)
    total: jax.Array = value + root + logged + batch.sum()
    return total


def around_a_program(x: jax.Array) -> None:
    with hc.Recorder("runs/1") as recorder:
        with hc.reraise(), hc.Object(dict, methods={"get": x}) as table:
            jax.jit(a_program)(x)
            recorder(step=0, loss=x.mean())
            table.get(x)
        assert_type(hc.barrier(), bool)
        assert_type(recorder.flush(), None)
    exported = hc.export(a_program)(x)
    assert_type(exported, hc.typing.Exported)
    again = hc.load(bytes(exported))
    again.call(x)
    hc.configure(tap_queue_bytes=1 << 20, fail="together")
    hc.configure(tap_queue_byte=1)  # type: ignore
    hc.tools.read("runs/1")
    hc.watch(x, name=3)  # type: ignore
    hc.progress("0")  # type: ignore


def names() -> None:
    hc.SpecError  # type: ignore
    assert issubclass(hc.errors.SpecError, hc.errors.HostcallError)
    assert_type(hc.monitor.stats(), dict[str, hc.monitor.CallStats])
    assert_type(hc.barrier(1.0, programs=False), bool)
    with hc.testing.collect() as seen, hc.patch_jax():
        assert_type(list(seen), list[str])
