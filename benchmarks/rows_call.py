"""Rows: calls in compiled programs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from benchmarks.harness import Case, Row, at_most, run_time, times_faster
from benchmarks.raw_handler import least_call, raw_call

SCALAR = jax.ShapeDtypeStruct((), np.float32)
MIB = jax.ShapeDtypeStruct((1 << 18,), np.float32)


LEAST = "array, device, result"


def same(x: Any) -> Any:
    return x


def looped(step: Callable[[Any], Any], n: int) -> Callable[[Any], Any]:
    """A compiled loop that runs `step` n times."""
    return jax.jit(lambda x: jax.lax.fori_loop(0, n, lambda i, c: step(c), x))


# --- Calls in a compiled loop ---------------------------------------------------------


def nothing() -> None:
    pass


def scalar_loop(quick: bool) -> dict[str, Case]:
    x, n = jnp.float32(1), 200 if quick else 2000
    more = 10 * n  # cheap steps run longer, so that starting the program counts little
    cases = {
        name: run_time(looped(step, more), x, per=more)
        for name, step in {
            "hostcall": lambda c: hc.call(same, SCALAR, c),
            "raw handler": raw_call(SCALAR, nothing),
            LEAST: least_call(SCALAR, same),
            "hostcall unordered": lambda c: hc.call(same, SCALAR, c, order="unordered"),
        }.items()
    }
    theirs = looped(lambda c: jax.pure_callback(same, SCALAR, c), n)
    return {**cases, "JAX": run_time(theirs, x, per=n)}


def jax_arrays_loop(quick: bool) -> dict[str, Case]:
    x, n = jnp.float32(1), 200 if quick else 2000
    ours = looped(lambda c: hc.call(same, SCALAR, c, arrays="jax"), n)
    theirs = looped(lambda c: jax.pure_callback(same, SCALAR, c), n)
    return {"hostcall": run_time(ours, x, per=n), "JAX": run_time(theirs, x, per=n)}


def rows_in_order(quick: bool) -> dict[str, Case]:
    n = 200 if quick else 2000
    xs = jnp.ones(n, jnp.float32)
    ours = jax.vmap(lambda c: hc.call(same, SCALAR, c, vmap_method="sequential"))
    theirs = jax.vmap(
        lambda c: jax.pure_callback(same, SCALAR, c, vmap_method="sequential")
    )
    return {
        "hostcall": run_time(jax.jit(ours), xs, per=n),
        "JAX": run_time(jax.jit(theirs), xs, per=n),
    }


def twenty_leaves(quick: bool) -> dict[str, Case]:
    n = 50 if quick else 300
    xs, specs = (jnp.float32(1),) * 20, (SCALAR,) * 20

    def many(*leaves: Any) -> Any:
        return leaves

    ours = looped(lambda c: hc.call(many, specs, *c), n)
    theirs = looped(lambda c: jax.pure_callback(many, specs, *c), n)
    return {"hostcall": run_time(ours, xs, per=n), "JAX": run_time(theirs, xs, per=n)}


def one_mib(chain: int) -> Callable[[bool], dict[str, Case]]:
    """Calls one after the other in straight-line code, each on 1 MiB.

    A loop would not do, since XLA would copy its carry. Each call passes 1 MiB to a
    function that returns it; with `out` the function must write it, so np.copyto is the
    floor.

    A program takes fresh memory for its buffers, and the page faults cost some 150 us
    per run, whatever it calls. That is half of a short chain's time with lend="out", so
    the call is judged in a long chain; the short one is there for comparison.
    """

    def cases(quick: bool) -> dict[str, Case]:
        del quick
        return _one_mib(chain)

    return cases


def _one_mib(chain: int) -> dict[str, Case]:
    x = jnp.ones(MIB.shape, MIB.dtype)

    def write(x: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out, x)

    steps = {
        "safe copies": lambda c: hc.call(same, MIB, c),
        'lend="out"': lambda c: hc.call(write, MIB, c, lend="out"),
        "JAX": lambda c: jax.pure_callback(same, MIB, c),
    }

    def chained(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def f(c: Any) -> Any:
            for _ in range(chain):
                c = step(c)
            return c

        return jax.jit(f)

    cases = {name: run_time(chained(f), x, per=chain) for name, f in steps.items()}
    a, b = np.ones(MIB.shape, MIB.dtype), np.ones(MIB.shape, MIB.dtype)

    def copies() -> None:
        for _ in range(chain // 2):
            np.copyto(a, b)
            np.copyto(b, a)

    cases["np.copyto alone"] = run_time(copies, per=chain)
    return cases


# --- Parallel rows --------------------------------------------------------------------


def parallel_rows(quick: bool) -> dict[str, Case]:
    del quick
    pool = futures.ThreadPoolExecutor(8)
    xs = jnp.arange(8, dtype=jnp.float32)

    def wait(x: Any) -> Any:
        time.sleep(0.05)  # releases the GIL
        return x

    ours = jax.vmap(
        lambda x: hc.call(
            hc.host(wait, executor=pool), SCALAR, x, vmap_method="parallel"
        )
    )
    theirs = jax.vmap(
        lambda x: jax.pure_callback(wait, SCALAR, x, vmap_method="sequential")
    )
    return {
        "hostcall": run_time(jax.jit(ours), xs, per=1000),
        "JAX": run_time(jax.jit(theirs), xs, per=1000),
    }


ROWS = (
    Row(
        "scalar call in a compiled loop",
        (times_faster(60), at_most(3, "raw handler"), at_most(1.5, LEAST)),
        scalar_loop,
    ),
    Row('vmap "sequential", a row', (times_faster(80),), rows_in_order),
    Row("20 scalar leaves in and out", (times_faster(60),), twenty_leaves),
    *(
        Row(
            f"1 MiB in and out, {chain} calls a program",
            (
                times_faster(1.7, "safe copies"),
                *([times_faster(5, 'lend="out"')] if chain == 32 else []),
            ),
            one_mib(chain),
        )
        for chain in (8, 32)
    ),
    Row('scalar call, arrays="jax", in a loop', (times_faster(4),), jax_arrays_loop),
    Row(
        'vmap "parallel", 8 rows of 50 ms, 8 workers',
        (at_most(100, None),),
        parallel_rows,
        unit="ms",
        rounds=5,
    ),
)
