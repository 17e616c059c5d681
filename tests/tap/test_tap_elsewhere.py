"""Taps on platforms that the engine doesn't serve: JAX's callback delivers the values.

No such platform is available here, so the CPU takes that path.
"""

from __future__ import annotations

import re

import elsewhere
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from older_jax import SMALL_CALLBACKS

import hostcall as hc


@pytest.fixture(autouse=True)
def through_jax():
    with elsewhere.taps():
        yield


@pytest.fixture
def seen():
    return []


def test_the_program_has_jaxs_call(seen):
    f = jax.jit(lambda x: hc.tap(seen.append, x))
    text = f.lower(jnp.arange(4.0)).as_text()
    assert re.search("python_[cg]pu_callback", text)
    assert "hostcall_tap" not in text


@pytest.mark.parametrize("order", ["unordered", "ordered"])
def test_a_loop_is_delivered_in_order(order, seen):
    @jax.jit
    def f(x):
        def body(i, c):
            hc.tap(lambda v: seen.append(int(v)), i, where=i != 3, order=order)
            return c

        return jax.lax.fori_loop(0, 10, body, x)

    f(1)
    hc.barrier()
    assert seen == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_the_flag_always(seen):
    def run(x, at):
        def body(i, c):
            hc.tap(lambda i, x: seen.append((int(i), x.tolist())), i, x, every=3600.0,
                   always=i == at)  # fmt: skip
            return c

        return jax.lax.fori_loop(0, 9, body, 0)

    jax.jit(run)(jnp.int32(1), 8)
    hc.barrier()
    jax.jit(jax.vmap(run))(jnp.arange(2), jnp.array([3, 5]))
    hc.barrier()
    assert seen == [(0, 1), (8, 1), (0, [0, 1]), (3, [0, 1]), (5, [0, 1])]


def test_every_counts_all_runs_together(seen):
    """JAX's callback knows neither the run nor the device."""

    @jax.jit
    def f(x):
        tap = lambda i: hc.tap(lambda v: seen.append(int(v)), i, every=4, where=i != 2)
        return jax.lax.fori_loop(0, 6, lambda i, c: (tap(i), c)[1], x)

    f(1)
    f(1)
    hc.barrier()
    assert seen == [0, 5, 4]


def test_rows_and_trees(seen):
    def note(tree):
        seen.append((float(tree["x"]), hc.current().row))

    jax.jit(jax.vmap(lambda v: hc.tap(note, {"x": v}, rows="each")))(jnp.arange(3.0))
    hc.barrier()
    assert seen == [(0, (0,)), (1, (1,)), (2, (2,))]


def test_small_elements_and_the_value_given_back(seen):
    x = jnp.arange(-8, 7, dtype=jnp.int4)
    f = jax.jit(lambda x: hc.tap_through(lambda a: seen.append(a.tolist()), x))
    if SMALL_CALLBACKS.is_missing:
        with pytest.raises(hc.errors.HostcallError, match="reads int4 right") as error:
            f(x)
        assert error.value.code == "hc-jax"
        return
    y = f(x)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(x))
    hc.barrier()
    assert seen == [list(range(-8, 7))]


def test_an_error_is_the_object_itself():
    error = ValueError("no")

    def fail(x):
        raise error

    assert jax.jit(lambda x: (hc.tap(fail, x), x)[1])(1) == 1
    with pytest.raises(ValueError, match="no") as caught:
        hc.barrier()
    assert caught.value is error


def test_other_platforms_are_refused(seen):
    elsewhere.taps_here()
    traced = jax.jit(lambda x: hc.tap(seen.append, x)).trace(np.float32(0))
    with pytest.raises(hc.errors.HostcallError, match="lowered for cpu, rocm"):
        traced.lower(lowering_platforms=("cpu", "rocm"))
