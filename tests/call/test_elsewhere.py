"""Platforms that the engine doesn't serve: the path through JAX's own callback.

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
from platforms import without_xlas_words

import hostcall as hc


@pytest.fixture(autouse=True)
def through_jax():
    with elsewhere.calls():
        yield


def test_the_program_has_jaxs_call():
    x = jnp.arange(4.0)
    text = jax.jit(lambda x: hc.call(np.sin, x, x)).lower(x).as_text()
    assert re.search("python_[cg]pu_callback", text)
    assert "hostcall_call" not in text


@pytest.mark.parametrize("order", ["pure", "unordered", "ordered"])
def test_values(order):
    x = jnp.arange(6.0).reshape(2, 3)

    @jax.jit
    def f(x):
        return hc.call(lambda d: {"y": d["x"] * 2}, {"y": x}, {"x": x}, order=order)

    np.testing.assert_array_equal(f(x)["y"], np.asarray(x) * 2)


def test_vmap_with_where_calls_for_true_rows_only():
    seen = []

    def double(v):
        seen.append(float(v))
        return v * 2

    f = jax.jit(jax.vmap(lambda v: hc.call(double, v, v, where=v > 1)))
    np.testing.assert_array_equal(f(jnp.arange(4.0)), [0, 0, 4, 6])
    assert seen == [2, 3]


def test_ordered_calls_in_a_scan():
    seen = []

    @jax.jit
    def f(xs):
        def body(carry, x):
            hc.call(lambda v: seen.append(int(v)), None, x, order="ordered")
            return carry, None

        return jax.lax.scan(body, 0, xs)[0]

    f(jnp.arange(20))
    jax.effects_barrier()
    assert seen == list(range(20))


def test_small_elements_are_right():
    x = jnp.arange(-8, 7, dtype=jnp.int4)
    f = jax.jit(lambda x: hc.call(lambda a: a[::-1], x, x))
    if SMALL_CALLBACKS.is_missing:
        with pytest.raises(hc.errors.HostcallError, match="reads int4 right") as error:
            f(x)
        assert error.value.code == "hc-jax"
        return
    np.testing.assert_array_equal(np.asarray(f(x)), np.asarray(x)[::-1])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_callbacks_own_exception(caplog):
    error = ValueError("no")

    def fail(x):
        raise error

    f = jax.jit(lambda x: hc.call(fail, x, x))
    with pytest.raises(ValueError) as caught, hc.reraise():
        f(jnp.float32(1)).block_until_ready()
    assert caught.value is error


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("returned", "code"), [(None, "hc-result"), (ValueError("no"), "hc-failed")]
)
def test_the_report_of_jax_ends_with_the_code(returned, code):
    def host(x):
        if returned is not None:
            raise returned

    f = jax.jit(lambda x: hc.call(host, x, x))
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        f(jnp.float32(1)).block_until_ready()
    *_, last = without_xlas_words(str(caught.value)).strip().splitlines()
    assert last == f"[{code}] python -m hostcall explain {code}"


def test_other_platforms_are_refused():
    elsewhere.calls_here()
    spec = jax.ShapeDtypeStruct((), np.float32)
    traced = jax.jit(lambda x: hc.call(np.sin, spec, x)).trace(np.float32(0))
    with pytest.raises(hc.errors.HostcallError, match="lowered for cpu, rocm"):
        traced.lower(lowering_platforms=("cpu", "rocm"))
