"""Rows: what an item of a feed costs, and how well source and program overlap."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import hostcall as hc
from benchmarks.harness import Case, Row, at_most, times_faster

F32 = jnp.float32
ITEM = np.ones(16384, np.float32)  # 64 KiB
SPEC = jax.ShapeDtypeStruct(ITEM.shape, ITEM.dtype)


def rest(v: Any, seconds: float) -> Any:
    time.sleep(float(seconds))
    return v


def slow(seconds: float) -> Callable[[], Iterator[np.ndarray]]:
    def items() -> Iterator[np.ndarray]:
        while True:
            time.sleep(seconds)
            yield ITEM

    return items


def per_step(run: Callable[[], Any], n: int) -> Case:
    """Microseconds a step of a program of `n` steps."""
    jax.block_until_ready(run())

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run())
        return (time.perf_counter() - start) / n * 1e6

    return once


def looped(take: Callable[[], Any], n: int, work: float = 0.0) -> Callable[[], Any]:
    """A compiled loop that takes an item, and works for so many seconds, a step."""

    def f() -> Any:
        def body(_: Any, c: Any) -> Any:
            c = c + take()[0]
            if work:
                c = hc.call(rest, jax.ShapeDtypeStruct((), F32), c, work)
            return c

        return jax.lax.fori_loop(0, n, body, F32(0))

    return jax.jit(f)


def filled(item: np.ndarray, n: int) -> Case:
    """A round takes `n` items that are all there, while the feed's thread sleeps."""
    tag = f"bench {n}"
    feed = hc.feed(lambda: itertools.repeat(item), prefetch=5 * n, tag=tag)
    run = per_step(looped(lambda: feed()[0], n), n)

    def ready() -> int:
        (found,) = (f for f in hc.monitor.feeds() if f.name == tag)
        return found.ready

    def once() -> float:
        before = -1
        while ready() < n or ready() != before:  # until the thread sleeps
            before = ready()
            time.sleep(0.002)
        return run()

    return once


def small(quick: bool) -> dict[str, Case]:
    n = 20_000
    ones = jnp.ones(n)
    empty = jax.jit(lambda: jax.lax.fori_loop(0, n, lambda i, c: c + ones[i], F32(0)))
    fed, without = filled(np.ones(1, np.float32), n), per_step(empty, n)
    return {"hostcall": lambda: fed() - without(), "without items": without}


def from_python(quick: bool) -> dict[str, Case]:
    """A program that takes items as fast as a generator makes them.

    The least for such an item is what its thread does for each: it asks the generator,
    looks at the array, and copies it into the ring's memory.
    """
    n = 2_000 if quick else 20_000
    ones = np.ones(1, np.float32)

    def items() -> Iterator[np.ndarray]:
        while True:
            yield ones.copy()

    feed = hc.feed(items)
    source, ring = items(), np.empty((n, 1), np.float32)

    def by_hand() -> float:
        begin = time.perf_counter()
        for slot in ring:
            value = np.asarray(next(source))
            if value.shape != ones.shape or value.dtype != ones.dtype:
                raise TypeError(value)
            np.copyto(slot, value)
        return (time.perf_counter() - begin) / n * 1e6

    def alone() -> float:
        begin = time.perf_counter()
        for _ in range(n):
            next(source)
        return (time.perf_counter() - begin) / n * 1e6

    return {
        "hostcall": per_step(looped(lambda: feed()[0], n), n),
        BY_HAND: by_hand,
        "the source alone": alone,
    }


BY_HAND = "next, a check and a copy"


def large(quick: bool) -> dict[str, Case]:
    n = 256
    source = itertools.repeat(ITEM)
    target, cold = np.empty_like(ITEM), np.ones((n, ITEM.size), np.float32)

    def copies(rows: Any) -> Case:
        def once() -> float:
            start = time.perf_counter()
            for each in rows:
                np.copyto(target, each)
            return (time.perf_counter() - start) / n * 1e6

        return once

    by_call = looped(lambda: hc.call(lambda: next(source), SPEC, order="ordered"), n)
    by_jax = looped(lambda: io_callback(lambda: next(source), SPEC, ordered=True), n)
    return {
        "hostcall": filled(ITEM, n),
        # The ring's items are not in the cache here; those of hc.call and JAX are.
        "one memcpy": copies([ITEM] * n),
        "one memcpy, not in the cache": copies(cold),
        "hc.call(next, ...)": per_step(by_call, n),
        "JAX": per_step(by_jax, n),
    }


def overlap(milliseconds: float) -> Callable[[bool], dict[str, Case]]:
    def cases(quick: bool) -> dict[str, Case]:
        seconds, n = milliseconds * 1e-3, max(10, int(100 / milliseconds))
        feed = hc.feed(slow(seconds))
        fed = looped(lambda: feed()[0], n, seconds)
        source = slow(seconds)()
        jitted = jax.jit(
            lambda c, x: hc.call(rest, jax.ShapeDtypeStruct((), F32), c + x[0], seconds)
        )

        def loop() -> Any:
            c = F32(0)
            for _ in range(n):
                c = jitted(c, next(source))
            return c

        alone = looped(lambda: (F32(0),), n, seconds)
        by_jax = looped(
            lambda: io_callback(lambda: next(source), SPEC, ordered=True), n, seconds
        )
        return {
            "hostcall": per_step(fed, n),
            "without items": per_step(alone, n),
            "hc.call(next, ...)": per_step(
                looped(
                    lambda: hc.call(lambda: next(source), SPEC, order="ordered"),
                    n,
                    seconds,
                ),
                n,
            ),
            "JAX": per_step(by_jax, n),
            "a Python loop": per_step(loop, n),
        }

    return cases


ROWS = (
    Row("an item of 4 bytes that is ready", (at_most(0.3, None),), small),
    Row("an item of a Python generator", (at_most(5, BY_HAND),), from_python),
    Row(
        "an item of 64 KiB that is ready",
        (times_faster(4), at_most(1.5, "one memcpy, not in the cache")),
        large,
    ),
    *(
        Row(
            f"a step of {t:g} ms with a source of {t:g} ms",
            (at_most(1.1, "without items"),),
            overlap(t),
        )
        for t in (0.5, 5)
    ),
)
