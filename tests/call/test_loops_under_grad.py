"""Calls, taps and feeds in loops run as often, and in the same order, under grad.

JAX moves known equations with loop-invariant operands out of a scan when it splits the
scan for a derivative. The number and order of host calls must not depend on that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc

STEPS = 4
Log = list[Any]


def ordered(log: Log, w: Any) -> Any:
    """A call without operands, and one with a loop-invariant one."""
    spec = jax.ShapeDtypeStruct((), np.float32)
    a = hc.call(lambda: log.append("a") or np.float32(2), spec, order="ordered")
    hc.call(lambda v: log.append(float(v)), None, jnp.float32(7), order="ordered")
    return a


def unordered(log: Log, w: Any) -> Any:
    spec = jax.ShapeDtypeStruct((), np.float32)
    return hc.call(
        lambda v: log.append(float(v)) or np.float32(2), spec, 1.0, order="unordered"
    )


def tapped(log: Log, w: Any) -> Any:
    hc.tap(lambda v: log.append(float(v)), 5.0)
    hc.tap(lambda v: log.append(float(v)), jax.lax.stop_gradient(w))
    return 2.0


def fed(log: Log, w: Any) -> Any:
    item, _ = log[0]()
    return item


CALLS = (ordered, unordered, tapped)
Step = Callable[[Any], Any]


def scan(step: Step) -> Callable[[Any], Any]:
    return lambda w: jax.lax.scan(lambda c, _: (c * step(w), None), w, length=STEPS)[0]


def scan_of_jit(step: Step) -> Callable[[Any], Any]:
    return scan(jax.jit(step))


def scan_of_cond(step: Step) -> Callable[[Any], Any]:
    return scan(lambda w: jax.lax.cond(w > 0, step, lambda w: w, w))


def scan_of_scan(step: Step) -> Callable[[Any], Any]:
    return scan(scan(step))


def scan_of_remat(step: Step) -> Callable[[Any], Any]:
    return scan(jax.checkpoint(lambda w: jnp.sin(w) * step(w)))


def remat_of_scan(step: Step) -> Callable[[Any], Any]:
    return jax.checkpoint(scan(lambda w: jnp.sin(w) * step(w)))


def fori_loop(step: Step) -> Callable[[Any], Any]:
    return lambda w: jax.lax.fori_loop(0, STEPS, lambda i, c: c * step(w), w)


def while_loop(step: Step) -> Callable[[Any], Any]:
    """A loop that has no reverse mode, beside what is differentiated."""

    def run(w: Any) -> Any:
        n = jax.lax.while_loop(
            lambda s: s[0] < STEPS,
            lambda s: (s[0] + 1, s[1] + step(jnp.float32(1.5))),
            (0, jnp.float32(0)),
        )[1]
        return w * n

    return run


LOOPS = (
    *(scan, scan_of_jit, scan_of_cond, scan_of_scan),
    *(scan_of_remat, remat_of_scan, fori_loop, while_loop),
)


def seen(call: Callable[[Log, Any], Any], loop: Any, transform: Any) -> Log:
    log: Log = []
    run = loop(lambda w: call(log, w))
    jax.block_until_ready(jax.jit(transform(run))(1.5))
    assert hc.barrier()
    return log


@pytest.mark.parametrize("transform", [jax.grad, jax.value_and_grad, jax.linearize])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("call", CALLS)
def test_as_often_and_in_the_same_order(call, loop, transform):
    if transform is jax.linearize:
        transform = lambda f: lambda w: jax.linearize(f, w)[0]
    plain = seen(call, loop, lambda f: f)
    assert len(plain) >= STEPS
    assert seen(call, loop, transform) == plain


@pytest.mark.parametrize("loop", LOOPS)
def test_feeds_give_the_same_items(loop):
    counts = []
    for transform in (lambda f: f, jax.grad):
        with hc.feed(lambda: map(np.float32, range(1, 1000))) as feed:
            jax.jit(transform(loop(lambda w: fed([feed], w))))(1.5)
            counts.append(feed.state()["item"])
    assert counts[0] == counts[1] >= STEPS


def test_each_step_sees_its_own_item():
    def loss(w, feed):
        def body(total, _):
            return total + w * feed()[0], None

        return jax.lax.scan(body, 0.0, length=4)[0]

    items = [np.float32(v) for v in (1, 10, 100, 1000)]
    with hc.feed(items) as feed:
        assert float(jax.jit(jax.grad(lambda w: loss(w, feed)))(2.0)) == 1111


def test_other_equations_are_still_hoisted():
    """A loop-invariant residual has no axis for the steps."""

    def loss(w):
        def body(c, _):
            hc.call(lambda: None, None, order="ordered")
            return jnp.sin(c * jnp.cos(w)), None

        return jax.lax.scan(body, 1.0, length=STEPS)[0]

    def residuals(f):
        return sorted(x.shape for x in jax.tree.leaves(jax.vjp(f, jnp.ones(()))[1]))

    def without(w):
        step = lambda c, _: (jnp.sin(c * jnp.cos(w)), None)
        return jax.lax.scan(step, 1.0, length=STEPS)[0]

    assert residuals(loss) == residuals(without)
