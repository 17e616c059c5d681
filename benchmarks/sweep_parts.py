"""Programs of the pictures that compare few figures: what is called, and its parts.

sweep_sizes.py says what a Program is.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import hostcall as hc
from benchmarks.raw_handler import raw_call
from benchmarks.rows_call import SCALAR, nothing
from benchmarks.sweep_sizes import Host, Program, Programs, leaves, repeated, rows

Step = Callable[[Any, Any], Any]  # of a loop's carry and a flag that is False


BASE = "hostcall, an argument and a result"


def look(x: Any) -> None:
    pass


def cost(what: str, times: int, host: Host) -> Programs:
    """JAX, hostcall, and the floor, for a call, a tap or a row of a vmap."""
    if what == "call":
        made = leaves(1, times, host)
        ways = "JAX", "hostcall", "raw handler"
    elif what == "row":
        made = rows(1024, times, host)
        ways = "JAX, row by row", "hostcall, row by row", "Python alone"
    else:
        made = taps(times, host)
        ways = "JAX", "hostcall", "held back by where="
    return dict(zip(("JAX", "hostcall", "floor"), map(made.get, ways), strict=True))


def looped_with(step: Step, n: int) -> Any:
    def f(x: Any, no: Any) -> Any:
        return jax.lax.fori_loop(0, n, lambda i, c: step(c, no), x)

    return jax.jit(f)


def beside(effect: Step) -> Step:
    """A step that adds 1, and does something that gives no result."""

    def step(c: Any, no: Any) -> Any:
        effect(c, no)
        return c + 1

    return step


def start() -> tuple[Any, Any]:
    return jnp.float32(0), jnp.bool_(False)


def counting(step: Step, n: int, calls: int) -> Program:
    return Program(looped_with(step, n), start(), n, calls, lambda: np.float32(n))


def taps(times: int, host: Host) -> Programs:
    """Taps on the device: a run ends when the loop does.

    What is still queued then is delivered beside the next run, as in a program that
    goes on.
    """
    n = 10 * times
    ours = beside(lambda c, _: hc.tap(host, c))
    theirs = beside(lambda c, _: jax.debug.callback(host, c))
    held = beside(lambda c, no: hc.tap(host, c, where=no))
    return {
        "JAX": counting(theirs, times, times),
        "hostcall": counting(ours, n, n),
        "held back by where=": counting(held, n, 0),
    }


def alone(n: int, host: Host) -> Program:
    """Python calling the function on an array that is ready."""
    x = np.array(0, np.float32)

    def f() -> Any:
        for _ in range(n):
            out = host(x)
        return out

    return Program(f, (), n, n, lambda: host(x))


def parts(_: int, times: int, host: Host) -> Programs:
    """Loops of one call each, where most calls do a little more than the one before.

    Compiled loops add 1 at each step, so that XLA has the same work beside the call.
    """
    n, raw = 10 * times, raw_call(SCALAR, nothing)
    unordered = functools.partial(hc.call, order="unordered")
    held = beside(lambda c, no: unordered(nothing, None, where=no))

    def computing(call: Host, n: int, host: Host = host) -> Program:
        f = looped_with(lambda c, _: call(c) + 1, n)
        twin = lambda: repeated(lambda c: host(c) + 1, np.float32(0), n)
        return Program(f, start(), n, n, twin)

    def sine(x: Any) -> Any:
        return np.sin(host(x))

    jaxs = functools.partial(hc.call, host, SCALAR, arrays="jax")
    return {
        "no call": counting(lambda c, _: c + 1, n, 0),
        "Python alone": alone(n, host),
        "raw handler": counting(beside(lambda c, _: raw()), n, n),
        "hostcall, held back by where=": counting(held, n, 0),
        "hostcall, no argument": counting(
            beside(lambda c, _: unordered(nothing, None)), n, n
        ),
        "hostcall, an argument": counting(
            beside(lambda c, _: unordered(look, None, c)), n, n
        ),
        BASE: computing(lambda c: hc.call(host, SCALAR, c), n),
        "hostcall, np.sin": computing(lambda c: hc.call(sine, SCALAR, c), n, sine),
        'hostcall, arrays="jax"': computing(jaxs, times),
        "JAX": computing(lambda c: jax.pure_callback(host, SCALAR, c), times),
    }


NOTHING = "nothing"


class Dropped(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


def steps(_: int, times: int, host: Host) -> Programs:
    """A Python loop that calls a jitted step, as training loops do."""
    n = max(16, times // 16)

    def loop(step: Step, calls: int, twin: Host = lambda x: x + 1) -> Program:
        f = jax.jit(lambda x: step(x, None))

        def run(x: Any) -> Any:
            for _ in range(n):
                x = f(x)
            return x

        start = np.float32(0)
        return Program(run, (start,), n, calls, lambda: repeated(twin, start, n))

    def calling(call: Callable[..., Any], **how: Any) -> Program:
        twin = lambda x: host(x) + 1
        return loop(lambda x, _: call(host, SCALAR, x, **how) + 1, n, twin)

    def telling(tell: Callable[..., None], calls: int = n) -> Program:
        return loop(beside(lambda x, _: tell(x)), calls)

    return {
        NOTHING: loop(lambda x, _: x + 1, 0),
        "hostcall, tap": telling(lambda x: hc.tap(host, x)),
        "hostcall, print": telling(lambda x: hc.print("{}", x, file=Dropped()), 0),
        "hostcall, ordered call": calling(hc.call, order="ordered"),
        "hostcall, io_callback": calling(hc.io_callback, ordered=True),
        "hostcall, debug.callback": telling(lambda x: hc.debug.callback(host, x)),
        "JAX, io_callback": calling(io_callback, ordered=True),
        "JAX, debug.callback": telling(lambda x: jax.debug.callback(host, x)),
    }
