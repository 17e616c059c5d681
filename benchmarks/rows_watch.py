"""Rows: what `hc.watch` costs in each step of a loop, beside checkify and equinox."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify

import hostcall as hc
from benchmarks.harness import Case, Row, at_most, run_time

HAS_EQUINOX = importlib.util.find_spec("equinox") is not None


def looped(n: int, look: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A loop of `n` steps that are never bad. `look` checks the state in each.

    XLA would compile a simpler loop into one kernel, which no call to the host allows.
    """

    def body(_: Any, c: Any) -> Any:
        return look(jnp.sort(c, axis=0) * 0.999 + 1)

    return lambda x: jax.lax.fori_loop(0, n, body, x)


def checked(x: Any) -> Any:
    checkify.check(jnp.isfinite(x).all(), "not finite")
    return x


def error_if(x: Any) -> Any:
    import equinox

    return equinox.error_if(x, ~jnp.isfinite(x).all(), "not finite")


def added(n: int, x: Any) -> dict[str, Case]:
    """Microseconds that each way to check adds to a step, the check included."""
    looks: dict[str, Callable[[Any], Any]] = {
        "hostcall": hc.watch,
        "checkify": checked,
    }
    if HAS_EQUINOX:
        looks["equinox"] = error_if
    plain = run_time(jax.jit(looped(n, lambda c: c)), x, per=n)

    def case(name: str) -> Case:
        program = looped(n, looks[name])
        if name == "checkify":
            program = checkify.checkify(program)
        checks = run_time(jax.jit(program), x, per=n)

        def run() -> float:
            without = plain()
            return checks() - without

        return run

    return {name: case(name) for name in looks}


def small(quick: bool) -> dict[str, Case]:
    return added(20_000 if quick else 200_000, jnp.ones((4, 4)))


def large(quick: bool) -> dict[str, Case]:
    return added(200 if quick else 2000, jnp.ones((4, 4096)))


ROWS = (
    Row("a watch, added to a step on the device", (at_most(0.15, None),), small),
    Row(
        "a watch of 64 KiB, added to a step",
        (at_most(1.2, "checkify"),),
        large,
    ),
)
