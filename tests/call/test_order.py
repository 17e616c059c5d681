"""Which calls run, how often, and in which order."""

import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from meshes import line, over

import hostcall as hc

ANY = jax.ShapeDtypeStruct((), jnp.int32)
EFFECTS = pytest.mark.parametrize("order", ["unordered", "ordered"])


class Log(list):
    """Appends one entry for each call: the argument, or `key` of it."""

    def __init__(self, order, key=int, wait=None):
        super().__init__()
        self.order, self.key, self.wait = order, key, wait

    def __call__(self, *args, result=ANY, **options):
        return hc.call(self.host, result, *args, order=self.order, **options)

    def tell(self, *args):
        """A call without results."""
        hc.call(self.silent, None, *args, order=self.order)

    def silent(self, *args):
        self.host(*args)

    def host(self, number, *rest):
        if self.wait is not None:
            time.sleep(self.wait())  # upsets an order that nothing enforces
        self.append(self.key(number))
        return np.int32(number)


def upset():
    """Sleeps up to 0.3 ms, to upset an order that nothing enforces."""
    return random.random() * 3e-4


# --- Exactly once ------------------------------------------------------------------------


@EFFECTS
def test_equal_calls_are_neither_merged_nor_dropped(order):
    log = Log(order)

    @jax.jit
    def f(x):
        a, b = log(x), log(x)
        log.tell(x)
        log(x)
        return a + b

    assert f(7) == 14
    jax.effects_barrier()
    assert log == [7, 7, 7, 7]


@EFFECTS
def test_loop_invariant_call_runs_every_time_round(order):
    log = Log(order)
    f = jax.jit(lambda x: lax.fori_loop(0, 10, lambda _, c: c + log(x) * 0 + 1, 0))
    assert f(3) == 10
    jax.effects_barrier()
    assert log == [3] * 10


@EFFECTS
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_calls_without_arguments_and_results(order, wrap):
    count = []
    f = wrap(lambda: [hc.call(lambda: count.append(1), None, order=order)] * 2)
    for _ in range(3):
        assert f() == [None, None]
    jax.effects_barrier()
    assert len(count) == 3


# --- Unordered: straight-line code -------------------------------------------------------


@pytest.mark.parametrize("results", [True, False], ids=["results", "silent"])
def test_straight_line_unordered_calls_come_in_program_order(results):
    log = Log("unordered", wait=upset)
    block = jnp.ones(2048)

    @jax.jit
    def f(x):
        outs = []
        for n in range(20):
            block = x * n + n  # 8 KiB; ready in no particular order
            if results:
                outs.append(log(n, block, jnp.sin(block)))
            else:
                log.tell(n, block, jnp.sin(block))
        return outs

    for _ in range(50):
        log.clear()
        jax.block_until_ready(f(block))
        jax.effects_barrier()
        assert log == list(range(20))


def test_unordered_calls_of_a_loop_body_come_in_program_order():
    log = Log("unordered", wait=upset)

    @jax.jit
    def f(x):
        def body(i, c):
            return c + sum(log(i * 5 + n, x + n) for n in range(5)) * 0

        return lax.fori_loop(0, 20, body, 0)

    f(jnp.ones(1024)).block_until_ready()
    jax.effects_barrier()
    assert log == list(range(100))


@pytest.mark.parametrize("name", ["one function", "several functions", "mixed"])
def test_unordered_calls_in_nested_jitted_functions_come_in_program_order(name):
    log = Log("unordered", wait=upset)

    def once(n, x):
        return log(n, jnp.sin(x * n))

    same = jax.jit(once)

    @jax.jit
    def f(x):
        outs = []
        for n in range(10):
            inner = same if name == "one function" else jax.jit(lambda n, x: once(n, x))
            if name == "mixed" and n % 2:
                inner = once
            outs.append(inner(n, x))
        return outs

    for _ in range(20):
        log.clear()
        jax.block_until_ready(f(jnp.ones(1024)))
        jax.effects_barrier()
        assert log == list(range(10))


# --- Ordered -----------------------------------------------------------------------------


def test_ordered_calls_keep_program_order_across_control_flow():
    log = Log("ordered", wait=upset)

    @jax.jit
    def inner(x):
        log(x)
        log.tell(x + 1)
        return x + 2

    def program(x, scan, cond, while_loop, inner):
        x = inner(x)

        def step(c, _):
            c = inner(c)
            return cond(
                c % 4 == 0, lambda v: inner(inner(v)), lambda v: log(v) + 1, c
            ), None

        x, _ = scan(step, x, 5)
        log.tell(x)
        x = while_loop(
            lambda v: log(v) < 60,
            lambda v: cond(v % 3 == 0, lambda u: u + 1, lambda u: inner(u) + 3, v),
            x,
        )
        return inner(x)

    # The oracle: the same program with Python's own control flow, eagerly.
    def plain_scan(step, carry, n):
        for _ in range(n):
            carry, _ = step(carry, None)
        return carry, None

    def plain_while(condition, body, value):
        while condition(value):
            value = body(value)
        return value

    want = program(
        jnp.int32(0),
        plain_scan,
        lambda p, t, f, v: t(v) if p else f(v),
        plain_while,
        inner.__wrapped__,
    )
    plain = list(log)
    assert len(plain) > 20
    log.clear()
    f = jax.jit(
        lambda x: program(
            x,
            lambda step, c, n: lax.scan(step, c, None, length=n),
            lax.cond,
            lax.while_loop,
            inner,
        )
    )
    got = f(0)
    jax.effects_barrier()
    assert (got, list(log)) == (want, plain)


@pytest.mark.parametrize("nested", [False, True], ids=["vmap", "vmap of vmap"])
@pytest.mark.parametrize("tells", ["call", "tap", "tap of a constant"])
def test_batched_conditions_with_ordered_calls(tells, nested):
    """JAX's rule for ordered effects would let stopped rows run on, so hostcall uses
    its own.
    """
    asked = []

    def smaller(i, n):
        return np.asarray(i < n)

    def program(n, m):
        def condition(carry):
            i, *_ = carry
            if tells == "call":
                result = jax.ShapeDtypeStruct((), bool)
                return hc.call(smaller, result, i, n, order="ordered")
            told = i if tells == "tap" else 7
            hc.tap(lambda v: asked.append(np.asarray(v)), told, order="ordered")
            return i < n

        def body(carry):
            i, value, key, (low,) = carry
            hc.tap(lambda i: None, i, order="ordered")
            key = jax.random.split(key)[0]
            return i + 1, value * 2 + m, key, (low + low.dtype.type(1),)

        key = jax.random.key(3)
        i, value, key, (low,) = lax.while_loop(
            condition, body, (0, jnp.ones(3), key, (jnp.zeros((2, 1), jnp.bfloat16),))
        )
        return i, value, jax.random.key_data(key), low

    ns, ms = jnp.array([0, 2, 5]), jnp.array([1.0, 4.0])
    with jax.disable_jit():  # the loops run in Python
        rows = [[program(n, m) for n in ns] for m in ms[: 1 + nested]]
    hc.barrier(programs=False)
    asked.clear()
    f = jax.vmap(program, (0, None))
    f = jax.vmap(f, (None, 0)) if nested else f
    out = jax.jit(f)(ns, ms if nested else ms[0])
    hc.barrier(programs=False)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(r for row in rows for r in row))
    for got, want in zip(out, stacked, strict=True):
        np.testing.assert_array_equal(got.reshape(want.shape), want)
    if tells != "call":
        assert len(asked) == 6  # once for each round of all rows, and at the end


@pytest.mark.parametrize("start", ["varying", "the same on all devices"])
def test_batched_conditions_inside_shard_map(start):
    """Stopped rows keep values that vary over devices although the carry's types deny
    it.
    """

    def program(order, n):
        def condition(carry):
            hc.tap(lambda i: None, carry[0], order=order)
            return carry[0] < n

        def body(carry):
            i, value = carry
            return i + 1, value * 2 + (n if start == "varying" else 1)

        first = n * 0 if start == "varying" else 0
        return lax.while_loop(condition, body, (jnp.int32(0), first + jnp.int32(1)))

    def over_devices(order):
        rows = jax.vmap(lambda n: program(order, n))
        return over(line(), rows, jax.P("x"))(jnp.arange(8))

    ordered, unordered = over_devices("ordered"), over_devices("unordered")
    jax.tree.map(np.testing.assert_array_equal, ordered, unordered)
    np.testing.assert_array_equal(ordered[0], np.arange(8))


def test_ordered_calls_keep_order_across_dispatches():
    log = Log("ordered", wait=upset)
    functions = [
        jax.jit(lambda n, x, k=k: (log(n), log.tell(n + 1), x @ x + k)[2])
        for k in range(3)
    ]
    x = jnp.eye(100)
    for n in range(0, 120, 2):
        functions[n % 3](n, x)  # nobody waits for this call
    jax.effects_barrier()
    assert log == list(range(120))


def test_eager_ordered_calls_come_after_what_was_dispatched():
    log = Log("ordered", wait=lambda: 2e-3)
    f = jax.jit(lambda n: lax.fori_loop(0, 3, lambda i, c: c + log(n + i), 0))
    for n in range(0, 40, 4):
        f(n)
        log(n + 3)
    jax.effects_barrier()
    assert log == list(range(40))


def test_ordered_and_unordered_mix():
    seen = []
    ordered = Log("ordered", key=lambda n: seen.append(("ordered", int(n))), wait=upset)
    unordered = Log(
        "unordered", key=lambda n: seen.append(("unordered", int(n))), wait=upset
    )

    @jax.jit
    def f(x):
        for n in range(10):
            ordered.tell(n, x + n)
            unordered.tell(n, x * n)

        def body(i, c):
            return c + ordered(i + 10) * 0 + unordered(i + 10) * 0

        return lax.fori_loop(0, 10, body, 0)

    f(jnp.ones(1024))
    jax.effects_barrier()
    assert seen == [(k, n) for n in range(20) for k in ("ordered", "unordered")]


def test_pure_calls_follow_their_data():
    log = Log("pure")
    f = jax.jit(lambda x: log(log(log(x) + 1) + 1))
    assert f(0) == 2
    assert log == [0, 1, 2]
