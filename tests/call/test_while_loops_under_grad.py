"""Host calls in while loops under derivatives: each once, or an error when it is traced.

JAX runs a while loop twice if only some of its carried values are differentiated.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcall as hc
from hostcall.errors import DerivativeError

STEPS = 3
I32 = jax.ShapeDtypeStruct((), np.int32)
F32 = jax.ShapeDtypeStruct((), np.float32)


# --- Effects: each shows a number and a value to host code, and returns an int ---------


class Log:
    """What host code has seen, as (number, value)."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.text = io.StringIO()

    def add(self, i: Any, v: Any) -> None:
        self.seen += [
            (int(j), round(float(w), 4))
            for j, w in np.broadcast(np.asarray(i), np.asarray(v))
        ]

    def count(self, i: Any, v: Any) -> Any:
        self.add(i, v)
        return np.int32(i + 1)

    def fill(self, _: Any, out: Any, i: Any, v: Any) -> None:
        np.asarray(out)[...] = self.count(np.array(i), np.array(v))

    def all(self) -> list[Any]:
        jax.effects_barrier()
        assert hc.barrier()
        lines = [line.split() for line in self.text.getvalue().splitlines()]
        return self.seen + [(int(i), round(float(v), 4)) for i, v in lines]


def calls(order: str) -> Callable[..., Any]:
    def run(log: Log, i: Any, v: Any) -> Any:
        hc.call(log.add, None, i, lax.stop_gradient(v), order=order)
        return i + 1

    return run


def ignored(log: Log, i: Any, v: Any) -> Any:
    hc.call(log.count, I32, i, lax.stop_gradient(v), order="ordered")
    return i + 1


def masked(log: Log, i: Any, v: Any) -> Any:
    hc.call(log.add, None, i, lax.stop_gradient(v), order="ordered", where=i != 1)
    return i + 1


def host(log: Log, i: Any, v: Any) -> Any:
    hc.host(log.count, result=I32, order="ordered")(i, lax.stop_gradient(v))
    return i + 1


def method(log: Log, i: Any, v: Any) -> Any:
    if not hasattr(log, "object"):
        log.object = hc.Object(lambda: log, methods={"count": I32})
    log.object.count(i, lax.stop_gradient(v))
    return i + 1


def tapped(log: Log, i: Any, v: Any) -> Any:
    hc.tap(log.add, i, v)
    return i + 1


def tapped_in_order(log: Log, i: Any, v: Any) -> Any:
    hc.tap(log.add, i, v, order="ordered", where=i != 1)
    return i + 1


def through(log: Log, i: Any, v: Any) -> Any:
    return hc.tap_through(lambda i: log.add(i, 0), i) + 1


def printed(log: Log, i: Any, v: Any) -> Any:
    hc.print("{} {}", i, v)
    return i + 1


def buffers(log: Log, i: Any, v: Any) -> Any:
    f = hc.buffers.buffer_callback(
        log.fill, I32, order="unordered", vmap_method="sequential"
    )
    f(i, lax.stop_gradient(v))
    return i + 1


EFFECTS = {
    "unordered": calls("unordered"),
    "ordered": calls("ordered"),
    "ignored result": ignored,
    "where": masked,
    "hc.host": host,
    "hc.Object": method,
    "tap": tapped,
    "ordered tap": tapped_in_order,
    "tap_through": through,
    "print": printed,
    "buffer_callback": buffers,
}


# --- Loops of an effect: float -> float ------------------------------------------------

# (number, value) -> number
Effect = Callable[[Any, Any], Any]


def while_loop(effect: Effect) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        def body(c: Any) -> Any:
            i, y = c
            return effect(i, y), y * x

        return lax.while_loop(lambda c: c[0] < STEPS, body, (0, x))[1]

    return run


def fori_loop(effect: Effect) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        def body(i: Any, y: Any) -> Any:
            effect(i, y)
            return jnp.sin(y) * x

        return lax.fori_loop(0, jnp.int32(STEPS), body, x)

    return run


def in_the_condition(effect: Effect) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        def go_on(c: Any) -> Any:
            effect(c[0], c[1])
            return c[0] < STEPS

        return lax.while_loop(go_on, lambda c: (c[0] + 1, c[1] * x), (0, x))[1]

    return run


def in_both(effect: Effect) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        def go_on(c: Any) -> Any:
            effect(10 + c[0], c[1])
            return c[0] < STEPS

        def body(c: Any) -> Any:
            effect(c[0], c[1])
            return c[0] + 1, c[1] * x

        return lax.while_loop(go_on, body, (0, x))[1]

    return run


def while_in_scan(effect: Effect) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        return lax.scan(lambda y, _: (while_loop(effect)(y) * x, None), x, length=2)[0]

    return run


def scan_in_while(effect: Effect) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        def step(y: Any, i: Any) -> Any:
            effect(i, y)
            return y * x, None

        def body(c: Any) -> Any:
            return c[0] + 1, lax.scan(step, c[1], jnp.arange(2))[0]

        return lax.while_loop(lambda c: c[0] < STEPS, body, (0, x))[1]

    return run


def while_in_while(effect: Effect) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        def body(c: Any) -> Any:
            return effect(c[0], c[1]), while_loop(effect)(c[1]) * x

        return lax.while_loop(lambda c: c[0] < 2, body, (0, x))[1]

    return run


def known_while_in_while(effect: Effect) -> Callable[[Any], Any]:
    """The derivative needs what the inner loop gives, which is known."""

    def run(x: Any) -> Any:
        def body(c: Any) -> Any:
            n = lax.while_loop(lambda n: n < 2, lambda n: effect(n, jnp.float32(0)), 0)
            return c[0] + 1, c[1] * x * n

        return lax.while_loop(lambda c: c[0] < STEPS, body, (0, x))[1]

    return run


def while_in_cond(effect: Effect) -> Callable[[Any], Any]:
    return lambda x: lax.cond(x > 0, while_loop(effect), lambda x: x, x)


def cond_in_while(effect: Effect) -> Callable[[Any], Any]:
    def sometimes(i: Any, y: Any) -> Any:
        lax.cond(i % 2 == 0, effect, lambda i, y: i + 1, i, y)
        return i + 1

    return while_loop(sometimes)


def jit_in_while(effect: Effect) -> Callable[[Any], Any]:
    return while_loop(jax.jit(effect))


def remat_of_while(effect: Effect) -> Callable[[Any], Any]:
    return jax.checkpoint(lambda x: jnp.sin(while_loop(effect)(jnp.sin(x))))


def remat_in_while(effect: Effect) -> Callable[[Any], Any]:
    return while_loop(jax.checkpoint(effect))


def scan_of_remat_of_while(effect: Effect) -> Callable[[Any], Any]:
    inner = remat_of_while(effect)
    return lambda x: lax.scan(lambda y, _: (inner(y) * x, None), x, length=2)[0]


LOOPS = (
    *(while_loop, fori_loop, in_the_condition, in_both, while_in_scan, scan_in_while),
    *(while_in_while, while_in_cond, cond_in_while, jit_in_while, remat_of_while),
    *(remat_in_while, scan_of_remat_of_while),
)


# What tap_through returns is used nowhere, or only by a count that is the same in all
# steps of a scan, which JAX moves out. It has no effect, so it runs at most once.
FREE_TO_DROP = (
    *(fori_loop, in_the_condition, in_both, scan_in_while, cond_in_while),
    *(while_in_scan, scan_of_remat_of_while),
)


# --- Derivatives -----------------------------------------------------------------------

X = np.float32(1.25)
Run = Callable[[Any], Any]


def jvp(f: Run) -> Any:
    return jax.jit(lambda x: jax.jvp(f, (x,), (jnp.float32(3),)))(X)


def linearize(f: Run) -> Any:
    y, linear = jax.linearize(f, X)
    return y, linear(jnp.float32(1)), linear(jnp.float32(2))


def linearize_of_jit(f: Run) -> Any:
    return linearize(jax.jit(f))


def jit_of_linearize(f: Run) -> Any:
    return jax.jit(lambda: linearize(f))()


def grad_beside(f: Run) -> Any:
    """The loop has tangents, which the program drops."""
    return jax.jit(jax.value_and_grad(lambda x: x * lax.stop_gradient(f(x))))(X)


def vjp_beside(f: Run) -> Any:
    y, pull = jax.vjp(lambda x: x * lax.stop_gradient(f(jnp.sin(x))), X)
    return y, pull(jnp.float32(1)), pull(jnp.float32(2))


def grad_of_constant(f: Run) -> Any:
    """The loop has no tangents."""
    return jax.jit(jax.value_and_grad(lambda x: x * f(lax.stop_gradient(x))))(X)


def jacfwd(f: Run) -> Any:
    return jax.jacfwd(lambda x: f(x[0]) * x)(jnp.float32([X, 2]))


def linearize_twice(f: Run) -> Any:
    slope = lambda x: jax.linearize(f, x)[1](jnp.float32(1))
    return jax.linearize(slope, X)[1](jnp.float32(1))


def jvp_twice(f: Run) -> Any:
    """The same number (LOOPS_LINEARIZED_TWICE in tests/older_jax.py)."""
    slope = lambda x: jax.jvp(f, (x,), (jnp.float32(1),))[1]
    return jax.jvp(slope, (X,), (jnp.float32(1),))[1]


def checkpointed(f: Run) -> Any:
    g = jax.checkpoint(lambda x: jnp.sin(x) * lax.stop_gradient(f(jnp.sin(x))))
    return jax.jit(jax.value_and_grad(g))(X)


DERIVATIVES = (
    *(jvp, linearize, linearize_of_jit, jit_of_linearize, grad_beside, vjp_beside),
    *(grad_of_constant, jacfwd, linearize_twice, checkpointed),
)


def outcome(name: str, loop: Any, derivative: Any) -> tuple[Any, list[Any]]:
    log = Log()
    with contextlib.redirect_stdout(log.text):
        value = derivative(loop(lambda i, v: EFFECTS[name](log, i, v)))
        jax.block_until_ready(value)
        return value, log.all()


@functools.cache
def wanted(loop: Any, derivative: Any) -> Any:
    """The value without calls. It is the same for all effects."""
    derivative = jvp_twice if derivative is linearize_twice else derivative
    with jax.disable_jit():  # the loops run in Python
        return jax.tree.map(np.asarray, derivative(loop(lambda i, v: i + 1)))


def close(got: Any, want: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


PAIRS = [(name, loop) for name in EFFECTS for loop in LOOPS]


def in_turn(name: str, loop: Any) -> Any:
    """A derivative: over all pairs, each meets each effect and each loop."""
    return DERIVATIVES[PAIRS.index((name, loop)) % len(DERIVATIVES)]


def test_each_derivative_meets_each_effect_and_each_loop():
    met = {(part, in_turn(*pair)) for pair in PAIRS for part in pair}
    parts = [*EFFECTS, *LOOPS]
    assert met == {(part, derivative) for part in parts for derivative in DERIVATIVES}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", EFFECTS)
def test_each_call_runs_once(name, loop):
    derivative = in_turn(name, loop)
    got, seen = outcome(name, loop, derivative)
    argument = jnp.sin if derivative in (vjp_beside, checkpointed) else lambda x: x
    with jax.disable_jit():  # the loops run in Python
        _, want_seen = outcome(name, loop, lambda f: f(argument(X)))
    if name == "tap_through" and loop in FREE_TO_DROP:
        with jax.disable_jit():
            full = outcome("tap", loop, lambda f: f(X))[1]
        assert not Counter(seen) - Counter((i, 0.0) for i, _ in full)
    else:
        assert want_seen
        assert sorted(seen) == sorted(want_seen)
    close(got, wanted(loop, derivative))


@pytest.mark.parametrize("derivative", [linearize, jit_of_linearize, checkpointed])
@pytest.mark.parametrize("name", EFFECTS)
def test_a_known_loop_inside_is_computed_again_without_its_calls(name, derivative):
    loop = known_while_in_while
    got, seen = outcome(name, loop, derivative)
    with jax.disable_jit():
        _, want_seen = outcome(name, loop, lambda f: f(X))
    if name == "tap_through":  # nothing that the first loop gives needs its result
        assert not Counter(seen) - Counter(want_seen)
    else:
        assert sorted(seen) == sorted(want_seen)
    close(got, wanted(loop, derivative))


DROP_INS = {
    "debug.callback": (hc.debug.callback, jax.debug.callback),
    "io_callback": (hc.io_callback, jax.experimental.io_callback),
}


@pytest.mark.parametrize("loop", [while_loop, in_both, while_in_scan, scan_in_while])
@pytest.mark.parametrize("name", DROP_INS)
def test_drop_ins_run_as_often_as_jaxs_own(name, loop):
    def run(log: Log, callback: Any, i: Any, v: Any) -> Any:
        if name == "io_callback":
            callback(log.count, I32, i, lax.stop_gradient(v))
        else:
            callback(log.add, i, v)
        return i + 1

    for derivative in (linearize, grad_beside):
        outcomes = []
        for callback in DROP_INS[name]:
            log = Log()
            try:
                value = derivative(loop(lambda i, v: run(log, callback, i, v)))
            except ValueError as error:  # JAX 0.10.2 has no rule for some
                outcomes.append(str(error).splitlines()[0])
            else:
                outcomes.append((jax.tree.map(float, value), sorted(log.all())))
        if loop is in_both:
            _add_what_jax_drops(outcomes)
        assert outcomes[0] == outcomes[1]


def _add_what_jax_drops(outcomes: list[Any]) -> None:
    """In a jitted gradient, JAX's own lowering of a loop drops the callbacks of its
    condition, all of them. Those of a drop-in run as often as the loop does.
    """
    ours, jaxs = outcomes
    if isinstance(jaxs, str) or any(i >= 10 for i, _ in jaxs[1]):
        return
    runs = sum(i == 0 for i, _ in jaxs[1])
    of_condition = [(i, v) for i, v in ours[1] if i >= 10]
    assert Counter(i for i, _ in of_condition) == dict.fromkeys(
        range(10, 11 + STEPS), runs
    )
    outcomes[1] = jaxs[0], sorted([*jaxs[1], *of_condition])


def factor(order: str) -> Callable[..., Any]:
    """A loop whose derivative needs what the call returns."""

    def run(x: Any) -> Any:
        def body(c: Any) -> Any:
            by = hc.call(lambda i: np.float32(i + 1), F32, c[0], order=order)
            return c[0] + 1, c[1] * by * x

        return lax.while_loop(lambda c: c[0] < STEPS, body, (0, x))[1]

    return run


def steps(order: str) -> Callable[..., Any]:
    """A loop whose condition needs what the call returns."""
    return lambda x: while_loop(
        lambda i, v: hc.call(lambda i: np.int32(i + 1), I32, i, order=order)
    )(x)


@pytest.mark.parametrize("derivative", [linearize, jit_of_linearize])
@pytest.mark.parametrize("name", ["unordered", "tap", "tap_through", "print"])
def test_a_loop_that_needs_a_result_of_jaxs_own_callback_is_refused(name, derivative):
    log = Log()

    def run(i: Any, v: Any) -> Any:
        EFFECTS[name](log, i, v)
        return jax.experimental.io_callback(lambda i: np.int32(i + 1), I32, i)

    with pytest.raises(DerivativeError, match=r"while_loop .* Use lax\.scan"):
        derivative(while_loop(run))
    assert log.all() == []


@pytest.mark.parametrize("derivative", [linearize, linearize_of_jit, jit_of_linearize])
@pytest.mark.parametrize("loop", [factor, steps])
@pytest.mark.parametrize("order", ["unordered", "ordered"])
def test_results_that_the_derivative_needs_are_refused(order, loop, derivative):
    wanted = jvp(loop("pure"))
    np.testing.assert_allclose(jvp(loop(order)), wanted)  # runs the loop once
    with pytest.raises(DerivativeError, match=r"with order='.*Use lax\.scan"):
        derivative(loop(order))
    y, slope, twice = derivative(loop("pure"))
    np.testing.assert_allclose(
        [y, 3 * slope, 1.5 * twice], [wanted[0], wanted[1], wanted[1]]
    )
