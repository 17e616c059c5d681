"""Programs of the sweeps over bytes, leaves, rows, devices and threads.

A function here gets a point of its sweep, how often a program repeats its step, and the
host function that it calls. It returns the same work done in several ways, by name.
Each program has a twin of plain Python, so that a test can compare the two with a host
function that changes its argument; sweeps.py measures them with one that returns it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import hostcall as hc
from benchmarks.raw_handler import raw_call
from benchmarks.rows_call import SCALAR, looped, nothing

Host = Callable[[Any], Any]
CHAIN = 16  # calls in straight-line code, so that a loop copies its carry once in 16


@dataclass(frozen=True)
class Program:
    """One way to do the work.

    Attributes:
        f: what runs.
        args: its arguments.
        per: units of work (calls, rows) in one run.
        calls: how often a run enters Python functions.
        twin: what a run returns, without JAX; None if the result is not written.
    """

    f: Callable[..., Any]
    args: tuple[Any, ...]
    per: int
    calls: int
    twin: Callable[[], Any] | None


Programs = dict[str, Program]


def repeated(host: Host, x: Any, times: int) -> Any:
    for _ in range(times):
        x = host(x)
    return x


def size(count: int, times: int, host: Host) -> Programs:
    """Calls with `count` bytes as their argument and as many as their result."""
    x = jnp.arange(count // 4, dtype=jnp.float32)
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def chained(step: Host, repeat: int, known: bool = True) -> Program:
        repeat = max(1, min(repeat // CHAIN, (1 << 22) // count))
        f = looped(lambda c: repeated(step, c, CHAIN), repeat)
        n = repeat * CHAIN
        return Program(f, (x,), n, n, (lambda: repeated(host, x, n)) if known else None)

    first, second = np.array(x), np.zeros_like(x)

    def copies(x: Any) -> Any:
        for _ in range(CHAIN // 2):
            np.copyto(second, first)
            np.copyto(first, second)
        return first

    return {
        "JAX": chained(lambda c: jax.pure_callback(host, spec, c), times),
        "hostcall": chained(lambda c: hc.call(host, spec, c), 10 * times),
        "hostcall, lend=True": chained(
            lambda c: hc.call(host, spec, c, lend=True), 10 * times
        ),
        "np.copyto": Program(copies, (x,), CHAIN, 0, lambda: x),
        "raw handler": chained(raw_call(spec, nothing), 10 * times, known=False),
    }


def leaves(count: int, times: int, host: Host) -> Programs:
    """Calls with `count` scalars as their arguments and as many as their results."""
    xs = tuple(jnp.float32(i) for i in range(count))
    specs = (SCALAR,) * count
    # Long loops, since a program's start takes longer with more arguments.
    cheap, few = 10 * times, times // max(1, count // 8)

    def each(*leaves: Any) -> Any:
        return tuple([host(leaf) for leaf in leaves])

    def program(step: Callable[..., Any], n: int) -> Program:
        f = looped(lambda c: tuple(step(*c)), n)
        return Program(
            f, (xs,), n, n * count, lambda: tuple(repeated(host, x, n) for x in xs)
        )

    raw = raw_call(specs, nothing)
    floor = looped(lambda c: tuple(raw(*c)), cheap)
    return {
        "JAX": program(lambda *c: jax.pure_callback(each, specs, *c), few),
        "hostcall": program(lambda *c: hc.call(each, specs, *c), cheap),
        "raw handler": Program(floor, (xs,), cheap, cheap, None),
    }


def rows(count: int, times: int, host: Host) -> Programs:
    """A row of a vmap of `count`, in a loop, so that starting it counts little."""
    xs = jnp.arange(count, dtype=jnp.float32)
    ready = [np.array(x) for x in np.asarray(xs)]

    def mapped(call: Callable[..., Any], method: str, repeat: int) -> Program:
        alone = method == "sequential"
        repeat = max(1, repeat // count if alone else repeat)
        row = lambda c: call(host, SCALAR, c, vmap_method=method)
        return Program(
            looped(jax.vmap(row), repeat),
            (xs,),
            repeat * count,
            repeat * count if alone else repeat,
            lambda: repeated(host, np.asarray(xs), repeat),
        )

    again = max(1, 10 * times // count)

    def loop() -> Any:
        for _ in range(again):
            for row in ready:
                out = host(row)
        return out

    return {
        "JAX, row by row": mapped(jax.pure_callback, "sequential", times),
        "hostcall, row by row": mapped(hc.call, "sequential", 10 * times),
        "JAX, expand_dims": mapped(jax.pure_callback, "expand_dims", times // 4),
        "hostcall, expand_dims": mapped(hc.call, "expand_dims", times),
        "Python alone": Program(
            loop, (), again * count, again * count, lambda: host(ready[-1])
        ),
    }


def devices(count: int, times: int, host: Host) -> Programs:
    """Calls of all shards of a shard_map; the devices work at the same time."""
    mesh = Mesh(np.array(jax.devices()[:count]), ("d",))
    over = PartitionSpec("d")
    xs = np.arange(count, dtype=np.float32)

    def program(step: Host, n: int, known: bool = True) -> Program:
        def shard(x: Any) -> Any:
            return jax.lax.fori_loop(0, n, lambda i, c: step(c), x[0])[None]

        f = jax.shard_map(
            shard, mesh=mesh, in_specs=over, out_specs=over, check_vma=False
        )
        twin = (lambda: repeated(host, xs, n)) if known else None
        return Program(jax.jit(f), (xs,), n * count, n * count, twin)

    few, cheap = times // 4, 2 * times
    return {
        "JAX": program(lambda c: jax.pure_callback(host, SCALAR, c), few),
        "hostcall": program(lambda c: hc.call(host, SCALAR, c), cheap),
        "raw handler": program(raw_call(SCALAR, nothing), cheap, known=False),
    }


def threads(count: int, times: int, host: Host) -> Programs:
    """Calls of threads that each run a loop, at the same time."""
    x = jnp.float32(0)
    native = hc.buffers.buffer_callback(
        hc.buffers.native(ctypes.CDLL(None).labs),  # it does not touch memory
        SCALAR,
        input_output_aliases={0: 0},
    )

    def program(step: Host, n: int, twin: Callable[[], Any] | None) -> Program:
        f = looped(step, n)

        def together() -> Any:
            results: list[Any] = [None] * count

            def work(i: int) -> None:
                results[i] = f(x).block_until_ready()

            started = [threading.Thread(target=work, args=(i,)) for i in range(count)]
            for thread in started:
                thread.start()
            for thread in started:
                thread.join()
            return results

        whole = None if twin is None else lambda: [twin()] * count
        calls = 0 if step is native else n * count
        return Program(together, (), n * count, calls, whole)

    def called(n: int) -> Callable[[], Any]:
        return lambda: repeated(host, np.float32(0), n)

    few, cheap = times // 4, 10 * times
    return {
        "JAX": program(lambda c: jax.pure_callback(host, SCALAR, c), few, called(few)),
        "hostcall": program(lambda c: hc.call(host, SCALAR, c), cheap, called(cheap)),
        "hostcall, machine code": program(native, cheap, lambda: x),
        "raw handler": program(raw_call(SCALAR, nothing), cheap, None),
    }
