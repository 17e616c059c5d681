"""current(), status(), stats() and timeouts."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc

SCALAR = jax.ShapeDtypeStruct((), np.float32)
MODES = pytest.mark.parametrize("mode", [jax.jit, lambda f: f], ids=["jit", "eager"])


def test_there_is_no_current_call_outside_of_one():
    assert hc.current() is None


@MODES
@pytest.mark.parametrize("order", ["pure", "unordered", "ordered"])
def test_current_describes_the_call(mode, order):
    seen = []

    def host(a):
        seen.append(hc.current())
        return a

    mode(lambda v: hc.call(host, SCALAR, v, order=order))(jnp.float32(1))
    jax.effects_barrier()
    (now,) = seen
    assert now.name.endswith("host")
    assert now.order == order
    assert now.place.file == __file__
    assert now.device == jax.devices()[0]
    assert now.mesh_coords == {}
    assert now.row == ()


@MODES
@pytest.mark.parametrize("timeout", [None, 30.0])
def test_status_shows_a_call_with_its_stack(mode, timeout):
    entered, leave = threading.Event(), threading.Event()

    def waits_here(a):
        entered.set()
        assert leave.wait(60)
        return a

    program = mode(lambda v: hc.call(hc.host(waits_here, timeout=timeout), SCALAR, v))
    thread = threading.Thread(
        target=lambda: jax.block_until_ready(program(jnp.float32(1)))
    )
    thread.start()
    assert entered.wait(60)
    (call,) = hc.monitor.status()
    leave.set()
    thread.join()
    assert call.name.endswith("waits_here")
    assert call.seconds > 0
    assert "in waits_here" in call.stack
    assert "waits_here" in str(call)
    assert hc.monitor.status() == []


@MODES
def test_stats_count_what_a_function_cost(mode):
    def counted(a):
        if a.sum() < 0:
            raise ValueError
        return a[:2]

    def mine():
        (found,) = [
            s
            for name, s in hc.monitor.stats().items()
            if "cost.<locals>.counted" in name
        ]
        return found

    spec = jax.ShapeDtypeStruct((2,), np.float32)
    f = mode(lambda v, w: hc.call(counted, spec, v, where=w))
    x = jnp.ones(5)
    jax.block_until_ready(f(x, True))
    start = mine()
    jax.block_until_ready(f(x, True))
    jax.block_until_ready(f(x, False))
    with pytest.raises(ValueError), hc.reraise():
        jax.block_until_ready(f(-x, True))
    now = mine()
    assert now.calls - start.calls == 2
    assert now.masked - start.masked == 1
    assert now.errors - start.errors == 1
    assert now.bytes_in - start.bytes_in == 2 * 20
    assert now.bytes_out - start.bytes_out == 8
    assert now.python_seconds > start.python_seconds
    assert now.gil_seconds >= start.gil_seconds
    assert mine() == now  # whenever it is asked


def calls_of(part):
    return sum(s.calls for name, s in hc.monitor.stats().items() if part in name)


def tagged(kind, fn, tag):
    if kind == "host":
        return hc.host(fn, result=SCALAR, tag=tag)
    if kind == "call":
        return lambda x: hc.call(fn, SCALAR, x, tag=tag)
    return lambda x: (getattr(hc, kind)(fn, x, tag=tag), x)[1]


@MODES
@pytest.mark.parametrize("kind", ["call", "host", "tap"])
def test_a_tag_is_the_name_in_status_and_stats(mode, kind):
    seen = []

    def untold(x):
        seen.append([call.name for call in hc.monitor.status()])
        return x

    tag = f"mine {mode} {kind}"
    untagged = calls_of("untold")
    f = mode(tagged(kind, untold, tag))
    f(jnp.float32(1)), f(jnp.float32(2))
    hc.barrier()
    assert seen == [[tag], [tag]]
    assert hc.monitor.stats()[tag].calls == 2
    assert calls_of("untold") == untagged
    f = mode(tagged(kind, untold, None))  # the same function without a tag
    f(jnp.float32(1))
    hc.barrier()
    assert "untold" in seen[2][0]
    assert calls_of("untold") == untagged + 1
    assert hc.monitor.stats()[tag].calls == 2


def test_rules_count_under_their_functions_tag():
    f = hc.host(np.sin, result=hc.results.like(0), tag="sine with rules")
    f.defjvp(lambda p, t: np.cos(p[0]) * t[0])
    jax.jvp(f, (1.0,), (1.0,))  # value and tangent in one call
    assert hc.monitor.stats()["sine with rules"].calls == 1


@pytest.mark.parametrize("kind", ["call", "host", "tap", "tap_through"])
@pytest.mark.parametrize("tag", [3, ""])
def test_other_tags_are_refused(kind, tag):
    with pytest.raises(
        hc.errors.SpecError, match="tag= of .*`cos` should be a non-empty string"
    ):
        tagged(kind, np.cos, tag)(1.0)


@MODES
def test_a_late_function_fails_its_program_only(mode):
    go = threading.Event()

    def sometimes_slow(a):
        go.wait(60)
        return a

    # Long enough for the call that is not late, on a machine with other work.
    f = mode(lambda v: hc.call(hc.host(sometimes_slow, timeout=2.0), SCALAR, v))
    with pytest.raises(hc.errors.CallTimeoutError) as caught, hc.reraise():
        jax.block_until_ready(f(jnp.float32(1)))
    text = str(caught.value)
    assert "sometimes_slow`(float32[]) took longer than timeout=2.0 s" in text
    assert "go.wait(60)" in text
    go.set()
    assert f(jnp.float32(3)) == 3


@MODES
def test_a_late_row_is_named(mode):
    leave = threading.Event()

    def host(a):
        if a == 2:
            leave.wait(60)
        return a

    f = mode(
        jax.vmap(
            lambda v: hc.call(
                hc.host(host, timeout=2.0), SCALAR, v, vmap_method="parallel"
            )
        )
    )
    with pytest.raises(hc.errors.CallTimeoutError, match="row 2 of 4"), hc.reraise():
        jax.block_until_ready(f(jnp.arange(4.0)))
    leave.set()
