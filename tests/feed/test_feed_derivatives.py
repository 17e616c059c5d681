"""Derivatives of loops that take items: each item once, or an error."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc
from hostcall.errors import DerivativeError


@pytest.fixture
def feed():
    with hc.feed((np.float32(i) for i in range(1, 20)), tag="odd") as feed:
        yield feed


def loop(feed, w):
    """Carries a count and a sum of items, which are not differentiated, and one that
    is: w times the sum.
    """

    def body(state):
        i, items, total = state
        item, _ = feed()
        return i + 1, items + item, total + w * item

    start = 0, jnp.float32(0), jnp.float32(0)
    return jax.lax.while_loop(lambda state: state[0] < 3, body, start)[1:]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_jvp_of_a_while_loop_takes_each_item_once(feed, wrap):
    f = wrap(lambda w: jax.jvp(lambda w: loop(feed, w), (w,), (1.0,)))
    (items, total), (_, slope) = f(2.0)
    assert (float(items), float(total), float(slope)) == (6, 12, 6)
    assert feed.state()["item"] == 3


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_while_loop_that_would_run_twice(feed, wrap):
    f = wrap(lambda w: jax.jit(lambda w: loop(feed, w))(w))
    with pytest.raises(DerivativeError) as found:
        jax.linearize(f, 2.0)
    assert str(found.value) == (
        "hostcall: jax.linearize or jax.grad of a while_loop that takes items of the"
        " feed `odd`, on which its derivative depends. JAX would run the loop twice,"
        " with other items the second time, so the derivative would not be that of the"
        " value. Use lax.scan, with where= for steps that take no item, or jax.jvp,"
        " which runs the loop once. If the loop has no derivative, put"
        " jax.lax.stop_gradient around what it starts with"
        "\n[hc-derivative] python -m hostcall explain hc-derivative"
    )
    assert feed.state()["item"] == 0


def test_a_scan_in_its_place(feed):
    def scan(w):
        def step(total, i):
            item, _ = feed(where=i < 3)
            return total + w * item, None

        return jax.lax.scan(step, jnp.float32(0), jnp.arange(5))[0]

    value, slope = jax.value_and_grad(scan)(2.0)
    assert (float(value), float(slope)) == (12, 6)
    assert feed.state()["item"] == 3


def test_a_while_loop_that_carries_nothing_differentiated(feed):
    def f(w):
        total = loop(feed, jax.lax.stop_gradient(w))[1]
        return w * total

    assert jax.grad(f)(2.0) == 12
    assert feed.state()["item"] == 3


def test_other_while_loops_are_split_as_before():
    seen = []

    def f(w):
        def body(state):
            hc.tap(lambda i: seen.append(int(i)), state[0])
            return state[0] + 1, state[1] * w

        return jax.lax.while_loop(lambda s: s[0] < 2, body, (0, 1.0))[1]

    value, slope = jax.linearize(f, 3.0)
    assert (float(value), float(slope(1.0))) == (9, 6)
    hc.barrier()
    assert set(seen) == {0, 1}
