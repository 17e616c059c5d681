"""`hc.call(keep=)`: the executions before a call, in `hc.current().history`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import hostcall as hc
from hostcall.errors import SpecError


def test_the_function_finds_the_executions_before():
    seen = []

    def fn(x, *, tree):
        here = hc.current()
        seen.append((float(x), here.execution))
        for one in here.history:
            assert one.run == here.run
            assert one.kwargs["tree"] == {"n": one.args[0] + 1, "text": "hello"}
        seen.append([(one.execution, float(one.args[0])) for one in here.history])

    def body(i, _):
        x = i * 1.0
        tree = {"n": x + 1, "text": "hello"}
        hc.call(fn, None, x, tree=tree, order="unordered", where=i % 5 == 4, keep=2)

    jax.jit(lambda: jax.lax.fori_loop(0, 10, body, None))()
    jax.effects_barrier()
    assert seen == [(4, 4), [(2, 2), (3, 3)], (9, 9), [(7, 7), (8, 8)]]


def test_results_and_rows():
    def fn(x):
        return sum((one.args[0] for one in hc.current().history), x * 0)

    def f(x):
        def body(c, i):
            y = hc.call(fn, c, c, where=i == 3, keep=8, fill=0.0)
            return c + 1, y

        return jax.lax.scan(body, x, jnp.arange(4))[1]

    assert jax.jit(f)(1.0).tolist() == [0, 0, 0, 6]
    rows = jax.jit(jax.vmap(f))(jnp.array([1.0, 10.0]))
    assert rows.tolist() == [[0, 0, 0, 6], [0, 0, 0, 33]]


def test_calls_without_keep_have_none():
    def fn(x):
        here = hc.current()
        assert here.history == ()
        assert here.execution is None
        return x

    assert jax.jit(lambda x: hc.call(fn, x, x, where=x > 0))(1.0) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep": -1, "where": True}, "should be a number of executions, an int of 0"),
        ({"keep": 2.0, "where": True}, "or more, got 2.0"),
        ({"keep": 2}, "has keep= and no where="),
        (
            {"keep": 2, "where": True, "vmap_method": "expand_dims"},
            "keep= and vmap_method='expand_dims'",
        ),
    ],
)
def test_mistakes(options, text):
    with pytest.raises(SpecError, match=text):
        hc.call(lambda x: x, 1.0, 1.0, **options)
