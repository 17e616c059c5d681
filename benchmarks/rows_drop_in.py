"""Rows: the drop-ins beside JAX's functions of the same names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import pure_callback  # as libraries bind it
from jax.experimental import io_callback

import hostcall as hc
from benchmarks.harness import Case, Row, run_time, times_faster

SCALAR = jax.ShapeDtypeStruct((), np.float32)


def same(x: Any) -> Any:
    return x


def nothing(x: Any) -> None:
    pass


def compiled(step: Callable[[Any], Any], n: int) -> Callable[[Any], Any]:
    """A loop of n `step`s, compiled now, so that later patches don't matter."""
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, n, lambda i, c: step(c), x))
    return loop.lower(jnp.float32(1)).compile()  # type: ignore[no-any-return]


def pure_scalar(quick: bool) -> dict[str, Case]:
    x, n = jnp.float32(1), 200 if quick else 2000
    steps = {
        "hostcall": lambda c: hc.pure_callback(same, SCALAR, c),
        'arrays="numpy"': lambda c: hc.pure_callback(same, SCALAR, c, arrays="numpy"),
        "JAX": lambda c: pure_callback(same, SCALAR, c),
    }
    cases = {k: run_time(compiled(f, n), x, per=n) for k, f in steps.items()}
    with hc.patch_jax():
        early = compiled(lambda c: pure_callback(same, SCALAR, c), n)
    with hc.patch_jax(arrays="numpy"):
        early_numpy = compiled(lambda c: pure_callback(same, SCALAR, c), n)
    cases["JAX's function, patched"] = run_time(early, x, per=n)
    cases['patched, arrays="numpy"'] = run_time(early_numpy, x, per=n)
    return cases


def ordered_scalar(quick: bool) -> dict[str, Case]:
    x, n = jnp.float32(1), 200 if quick else 2000
    ours = lambda c: hc.io_callback(same, SCALAR, c, ordered=True)
    theirs = lambda c: io_callback(same, SCALAR, c, ordered=True)
    # jit, since an ordered effect keeps programs that were compiled ahead of time from
    # being called.
    loop = lambda f: jax.jit(lambda x: jax.lax.fori_loop(0, n, lambda i, c: f(c), x))
    return {
        "hostcall": run_time(loop(ours), x, per=n),
        "JAX": run_time(loop(theirs), x, per=n),
    }


def rows(quick: bool) -> dict[str, Case]:
    n = 200 if quick else 2000
    xs = jnp.ones(n, jnp.float32)

    def mapped(call: Callable[..., Any], **more: Any) -> Callable[[Any], Any]:
        one = lambda c: call(same, SCALAR, c, vmap_method="sequential", **more)
        return jax.jit(jax.vmap(one))

    return {
        "hostcall": run_time(mapped(hc.pure_callback), xs, per=n),
        'arrays="numpy"': run_time(mapped(hc.pure_callback, arrays="numpy"), xs, per=n),
        "JAX": run_time(mapped(pure_callback), xs, per=n),
    }


def debug_callback(quick: bool) -> dict[str, Case]:
    x, n = jnp.float32(1), 200 if quick else 2000

    def step(callback: Callable[..., Any], **more: Any) -> Callable[[Any], Any]:
        return lambda c: (callback(nothing, c, **more), c + 1)[1]

    return {
        "hostcall": run_time(compiled(step(hc.debug.callback), n), x, per=n),
        'arrays="numpy"': run_time(
            compiled(step(hc.debug.callback, arrays="numpy"), n), x, per=n
        ),
        "JAX": run_time(compiled(step(jax.debug.callback), n), x, per=n),
    }


@contextlib.contextmanager
def nowhere() -> Iterator[None]:
    with open(os.devnull, "w") as file, contextlib.redirect_stdout(file):
        yield


def debug_print(quick: bool) -> dict[str, Case]:
    x, n = jnp.float32(1), 200 if quick else 2000

    def silent(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(x: Any) -> Any:
            with nowhere():
                return jax.block_until_ready(f(x))

        return run

    ours = compiled(lambda c: (hc.debug.print("x = {}", c), c + 1)[1], n)
    theirs = compiled(lambda c: (jax.debug.print("x = {}", c), c + 1)[1], n)
    return {
        "hostcall": run_time(silent(ours), x, per=n),
        "JAX": run_time(silent(theirs), x, per=n),
    }


ROWS = (
    Row(
        "drop-in pure_callback, scalar, in a loop",
        (
            times_faster(4),
            times_faster(40, 'arrays="numpy"'),
            times_faster(4, "JAX's function, patched"),
            times_faster(40, 'patched, arrays="numpy"'),
        ),
        pure_scalar,
    ),
    Row("drop-in io_callback, ordered, in a loop", (times_faster(4),), ordered_scalar),
    Row(
        'drop-in pure_callback, vmap "sequential", a row',
        (times_faster(4), times_faster(40, 'arrays="numpy"')),
        rows,
    ),
    Row(
        "drop-in debug.callback, in a loop",
        (times_faster(4), times_faster(40, 'arrays="numpy"')),
        debug_callback,
    ),
    Row("drop-in debug.print, in a loop", (times_faster(4),), debug_print),
)
