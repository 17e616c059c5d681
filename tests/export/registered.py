"""Registered host code, as a library has it: tests and their processes import it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np

import hostcall as hc

SEEN: list[float] = []


@hc.register("tests.sine", version=2)
def sine(x):
    return np.sin(x)


@hc.register("tests.seen")
def seen(x):
    SEEN.append(float(np.sum(x)))


@hc.register("tests.failing")
def failing(x):
    raise ValueError(f"no {float(x[0])}")


@hc.register("tests.slow")
async def slow(x):
    await asyncio.sleep(0)
    return 2 * x


@hc.register("tests.scaled")
def scaled(tree, *, by, how):
    assert how == "up"
    return {"a": tree["a"] * by, "b": (tree["b"][0] + 1,)}


class Pair(NamedTuple):
    left: np.ndarray
    right: np.ndarray


jax.export.register_namedtuple_serialization(Pair, serialized_name="tests.Pair")


@hc.register("tests.swapped")
def swapped(pair):
    return Pair(pair.right, pair.left)


@hc.register("tests.drawn")
def drawn(key):
    return jax.random.fold_in(key, 1)


cube = hc.register("tests.cube")(hc.host(lambda x: x**3, result=hc.results.like(0)))
cube.defvjp(lambda x: (x**3, x), lambda x, ct: (3 * x**2 * ct,))

pushed = hc.register("tests.pushed")(hc.host(lambda x: x**2, result=hc.results.like(0)))
pushed.defjvp(lambda xs, dots: (xs[0] ** 2, 2 * xs[0] * dots[0]))

product = hc.register("tests.product")(
    hc.derivatives.finite_difference(
        hc.host(lambda x, y: x * y**2, result=hc.results.elementwise)
    )
)

limited = hc.register("tests.limited")(hc.host(lambda x: x + 2, timeout=60.0))

pooled = hc.register("tests.pooled")(
    hc.host(
        lambda x: x + 1,
        result=hc.results.like(0),
        vmap_method="parallel",
        executor=ThreadPoolExecutor(2),
    )
)

effect = hc.register("tests.effect")(
    hc.host(lambda x: x - 1, result=hc.results.like(0), order="ordered")
)


@hc.register("tests.Walk")
class Walk:
    def __init__(self):
        self.at = 0.0

    def step(self, by):
        self.at += float(by)
        return np.float32(self.at)


walk = hc.Object(Walk, methods={"step": jax.ShapeDtypeStruct((), np.float32)})
feed = hc.register("tests.feed")(hc.feed(lambda: iter(np.arange(9.0)), prefetch=1))


# --- What tests do with them ------------------------------------------------------------


def travelled(f, *specs, **options):
    """`f` after it was exported and loaded."""
    return hc.load(bytes(hc.export(f, **options)(*specs)))


def tapped(x):
    hc.tap(seen, x)
    return x
