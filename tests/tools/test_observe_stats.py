"""`hc.observe(stats=True)`: statistics of lines, beside NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import hostcall as hc
from hostcall.tools.observing import observe

P = PartitionSpec


def rows_of(f, *args):
    expected = f(*args)
    with observe(stats=True) as seen:
        found = f(*args)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        assert a.sharding == b.sharding
    return {(row.text, row.backward): row for row in seen.rows()}


def check(row, values, calls=1):
    """A row beside what NumPy says of the same numbers."""
    x = np.asarray(values, np.float64).ravel()
    finite = x[np.isfinite(x)]
    assert (row.calls, row.size) == (calls, x.size)
    expected = [finite.min(), finite.max(), finite.mean(), (finite**2).mean() ** 0.5]
    found = [row.min, row.max, row.mean, row.rms]
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
    assert row.zeros == (x == 0).mean()
    assert row.nonfinite == (~np.isfinite(x)).mean()
    with np.errstate(over="ignore"):
        half = finite.astype(np.float16)
        bf16 = finite.astype(jnp.bfloat16).astype(np.float64)
    beyond = np.isinf(half) | ((half == 0) & (finite != 0))
    assert row.beyond_f16 == pytest.approx(beyond.mean())
    assert row.beyond_bf16 == pytest.approx(np.isinf(bf16).mean())


NUMBERS = {
    "plain": [1.0, -2.0, 3.5],
    "zeros": [0.0, -0.0, 1.0, 2.0],
    "small": [1e-8, 3e-8, 2e-8, 6e-8, 1e-7, 0.0],
    "large": [65504.0, 65519.0, 65520.0, -1e6, 1.0],
    "huge": [3.38e38, 3.4e38, 1.0],
    "bad": [np.nan, np.inf, -np.inf, 1.0, 0.0],
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_numbers(name, dtype):
    with np.errstate(over="ignore"):
        x = np.array(NUMBERS[name]).astype(dtype)

    @jax.jit
    def f(x):
        y = -x
        return y

    (row,) = rows_of(f, x).values()
    if row.max > 1e30 or row.min < -1e30:  # whose squares are infinite in float32
        assert row.rms == np.inf
        return
    check(row, -x.astype(np.float64))


def test_more_numbers_than_float32_counts():
    """Adding 1 to 2**24 in float32 changes nothing."""
    x = jnp.zeros(2**24 + 8, jnp.float16)

    @jax.jit
    def f(x):
        y = -x
        return y

    (row,) = rows_of(f, x).values()
    assert (row.size, row.zeros) == (x.size, 1)


def test_no_finite_numbers():
    (row,) = rows_of(jax.jit(lambda x: -x), np.float32([np.nan, np.inf])).values()
    assert row.nonfinite == 1
    assert np.isnan([row.min, row.max, row.mean, row.rms]).all()


def body(c, x):
    new = c * 0.5 + x
    out = jnp.sin(new)
    return new, out


def test_scan_and_its_backward_pass():
    def f(c, xs):
        ys = jax.lax.scan(body, c, xs)[1]
        return ys.sum()

    xs = np.arange(5, dtype=np.float32)
    c, news = np.float32(0), []
    for x in xs:
        c = c * np.float32(0.5) + x
        news.append(c)
    rows = rows_of(jax.jit(f), c * 0, xs)
    check(rows["new = c * 0.5 + x", False], news, calls=5)
    check(rows["out = jnp.sin(new)", False], np.sin(news), calls=5)
    rows = rows_of(jax.jit(jax.grad(f)), c * 0, xs)
    assert rows["new = c * 0.5 + x", True].calls == 5


def test_a_line_that_runs_many_times():
    """More executions than a tap hands over at once."""
    f = jax.jit(lambda xs: jax.lax.scan(body, 0.0, xs)[1])
    xs = np.linspace(0, 1, 500, dtype=np.float32)
    row = rows_of(f, xs)["out = jnp.sin(new)", False]
    assert row.calls == 500


def test_inside_other_levels():
    def inner(x):
        y = x * 3
        return jnp.where(y > 2, y, 0)

    def f(x):
        a = jax.jit(inner)(x)
        b = jax.checkpoint(lambda x: jnp.sin(x) * 2)(a)
        return jax.lax.cond(b.sum() > 0, lambda b: b + 1, lambda b: b - 1, b)

    x = np.array([0.5, 1.0], np.float32)
    rows = rows_of(jax.jit(f), x)
    check(rows["y = x * 3", False], x * 3)
    check(rows["a = jax.jit(inner)(x)", False], np.array([0, 3]))


def test_vmap():
    f = jax.jit(jax.vmap(lambda x: body(0.0, x)[1]))
    x = np.array([1, 2, 3], np.float32)
    check(rows_of(f, x)["out = jnp.sin(new)", False], np.sin(x))


def test_shards():
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = np.arange(8, dtype=np.float32)

    def local(x):
        y = x * 2
        return y + jax.lax.psum(x, "i")

    f = jax.shard_map(local, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    check(rows_of(jax.jit(f), x)["y = x * 2", False], x * 2, calls=4)
    sharded = jax.device_put(x, NamedSharding(mesh, P("i")))
    f = jax.jit(lambda x: body(0.0, x)[1])
    check(rows_of(f, sharded)["out = jnp.sin(new)", False], np.sin(x))


def test_beside_calls():
    @jax.jit
    def f(x):
        hc.call(lambda x: None, None, x, order="ordered")
        y = hc.call(lambda x: x * 2, x, x)
        return y

    x = np.array([1, 2], np.float32)
    check(rows_of(f, x)["y = hc.call(lambda x: x * 2, x, x)", False], x * 2)


def test_table():
    with observe(stats=True) as seen:
        jax.jit(jax.grad(lambda x: body(0.0, x)[1]))(2.0)
    lines = seen.table().splitlines()
    assert lines[0].split()[:3] == ["line", "calls", "min"]
    assert any(line.endswith("out = jnp.sin(new)") for line in lines)
    assert any(line.startswith("<-") for line in lines)


def test_several_blocks_add_up():
    seen = observe(stats=True)
    f = jax.jit(lambda x: body(0.0, x)[1])
    for _ in range(3):
        with seen:
            f(1.0)
    f(1.0)
    hc.barrier()
    assert {row.calls for row in seen.rows()} == {3}


def test_without_stats():
    with observe(nans=True) as seen:
        pass
    with pytest.raises(hc.errors.SpecError, match="stats=True"):
        seen.table()


def test_with_the_other_uses():
    got = []
    f = jax.jit(lambda x: body(0.0, x)[1])
    with observe("new", nans=True, stats=True, to=lambda r, v: got.append(v)) as seen:
        f(1.0)
    assert got == [1.0]
    assert len(seen.rows()) >= 2
    with pytest.raises(FloatingPointError, match="sin made the first"), seen:
        f(np.inf)
