"""`hc.observe(nans=True)` in loops that pause: they go on with what they had, and a bad
value is found beside innocent ones, whenever it comes.
"""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hostcall import observe

X = jnp.linspace(0.5, 2.0, 6)


def comes_and_goes(carry, i):
    """Infinities that are literals, more in some steps than in the one before."""
    x, shown = carry
    x = jnp.cos(x) + 0.1 * i
    shown = jnp.where(jnp.arange(6) < i % 4, jnp.inf, x)
    return (x, shown), (x * i, jnp.where(i % 3 == 0, -jnp.inf, shown[5]))


def forward(x):
    return lax.scan(comes_and_goes, (x, x), jnp.arange(20))


def backward(x):
    return lax.scan(comes_and_goes, (x, x), jnp.arange(20), reverse=True)


def unrolled(x):
    return lax.scan(comes_and_goes, (x, x), jnp.arange(20), unroll=3)


def while_it_lasts(x):
    def body(s):
        i, carry, rows = s
        carry, (row, _) = comes_and_goes(carry, i)
        rows = lax.cond(i % 2 == 0, lambda r: r.at[i].set(row), lambda r: r, rows)
        return i + 1, carry, rows

    start = 0, (x, x), jnp.full((20, 6), jnp.inf)
    return lax.while_loop(lambda s: s[0] < 17, body, start)


def rows_that_stop(x):
    def one(x, n):
        def body(s):
            i, x, low = s
            x = jnp.cos(x) + 0.1
            return i + 1, x, jnp.where(i > n // 2, jnp.minimum(low, x), jnp.inf)

        return lax.while_loop(lambda s: s[0] < n, body, (0, x, jnp.inf))

    return jax.vmap(one)(x, jnp.array([3, 9, 0, 12, 1, 5]))


def without_rows(x):
    return lax.scan(lambda c, _: (c * 0.5 + 1, None), x, None, length=0)


def keys_that_are_carried(x):
    def body(carry, _):
        key, x = carry
        key, sub = jax.random.split(key)
        return (key, x * jax.random.uniform(sub)), x.sum()

    (key, x), sums = lax.scan(body, (jax.random.key(0), x), None, length=5)
    return jax.random.key_data(key), x, sums


LOOPS = [
    *(forward, backward, unrolled, while_it_lasts, rows_that_stop, without_rows),
    keys_that_are_carried,
]


@pytest.mark.parametrize("f", LOOPS, ids=lambda f: f.__name__)
def test_a_loop_goes_on_after_its_pauses(f):
    program = jax.jit(f)
    expected = program(X)
    with observe(nans=True):
        found = [program(X) for _ in range(2)]
    for each in found:
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(each), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def line_of(fn):
    lines, first = inspect.getsourcelines(fn)
    (at,) = (i for i, line in enumerate(lines) if "# BAD" in line)
    return f"{inspect.getsourcefile(fn)}:{first + at} "


def late(x, at, reverse):
    """A mask from the first step on, and one bad value in step number `at`."""

    def step(carry, i):
        x, mask = carry
        x = jnp.where(i == at, jnp.log(x - x), jnp.cos(x))  # BAD
        kept = jnp.where(jnp.isfinite(x), x, 1.0)  # which does not stay
        mask = jnp.where(jnp.arange(6) < 2, -jnp.inf, mask)
        return (kept, mask), x[3]

    return lax.scan(step, (x, x), jnp.arange(3000), reverse=reverse)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("at", [0, 1, 2998, 2999])
def test_a_bad_value_of_one_step_beside_innocent_ones(at, reverse):
    program = jax.jit(late, static_argnames="reverse")
    with observe(nans=True):
        jax.block_until_ready(program(X, -1, reverse=reverse))
        with pytest.raises(FloatingPointError) as caught:
            jax.block_until_ready(program(X, at, reverse=reverse))
    assert line_of(late) in str(caught.value)
    assert f"in step {at} of the scan" in str(caught.value)


@pytest.mark.parametrize("n", [256, 181])
def test_as_many_bad_values_as_half_of_an_integer_does_not_hold(n):
    """All elements are bad in one step, and none in the next."""

    def step(x, i):
        y = jnp.tanh(weights @ weights)
        z = jnp.log(-1 - y * y)  # BAD
        return jnp.where(i == 3, z, y), None

    weights = jnp.ones((n, n)) / n
    program = jax.jit(lambda x: lax.scan(step, x, jnp.arange(6))[0])
    with pytest.raises(FloatingPointError) as caught, observe(nans=True):
        jax.block_until_ready(program(weights))
    assert line_of(step) in str(caught.value)
    assert "in step 3 of the scan" in str(caught.value)


def moved(mask, x):
    hidden = jnp.where(mask, jnp.inf, x)
    return jnp.where(mask, hidden, jnp.log(x))


@pytest.mark.parametrize("in_loop", [False, True])
def test_as_many_bad_values_as_were_innocent_but_elsewhere(in_loop):
    def looped(mask, x):
        return lax.fori_loop(0, 3, lambda i, _: moved(mask, x), jnp.zeros(6))

    program = jax.jit(looped if in_loop else moved)
    first = jnp.arange(6) == 0
    with observe(nans=True):
        assert np.isinf(program(first, X)[0])
        with pytest.raises(FloatingPointError, match="log made the first bad value"):
            jax.block_until_ready(program(first & False, X.at[4].set(0)))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("at", [0, 1, 4095, 4096, 8191, 8192, 9998, 9999])
def test_a_row_of_a_scans_result_alone(at, reverse):
    """Rows are looked at in pauses, which come once in some thousands of steps."""

    def step(carry, i):
        return carry * 0.5, jnp.where(i == bad, jnp.log(-carry), carry)  # BAD

    bad = at
    program = jax.jit(
        lambda x: lax.scan(step, x, jnp.arange(10_000), reverse=reverse)[1]
    )
    with observe(nans=True), pytest.raises(FloatingPointError) as caught:
        jax.block_until_ready(program(jnp.float32(1)))
    assert f"in step {at} of the scan" in str(caught.value)


def test_a_loop_that_a_nan_never_ends():
    """It ends where the bad value is made, also if its results can't be waited for."""

    def body(x):
        return jnp.sqrt(x) - 0.5

    program = jax.jit(lambda x: lax.while_loop(lambda x: ~(x < -9), body, x))
    with pytest.raises(FloatingPointError, match="sqrt made"), observe(nans=True):
        jax.block_until_ready(program(jnp.float32(0.1)))


def test_positions_that_differ_each_time():
    program = jax.jit(lambda mask, x: jnp.where(mask, -jnp.inf, x))
    masks = np.random.default_rng(0).random((600, 6)) < 0.5
    with observe(nans=True):
        for mask in masks:
            np.testing.assert_array_equal(program(mask, X), np.where(mask, -np.inf, X))
        with pytest.raises(FloatingPointError):
            jax.block_until_ready(program(masks[0], X * np.nan + jnp.log(-X)))


def many_types(x, last):
    """A loop that carries numbers, flags and keys of many types and shapes."""

    def body(i, carry):
        key, half, count, is_even, z, row, wide, x = carry
        key, other = jax.random.split(key)
        count = count + jax.random.randint(other, (2,), 0, 3)
        half = half * jnp.float16(0.5)
        z = z * 1j
        row = jnp.roll(row, 1) + half.astype(row.dtype).sum()
        wide = wide + row[0]
        x = x + jnp.log(last - i)  # BAD
        return key, half, count, ~is_even, z, row, wide, x

    start = (
        jax.random.key(3),
        jnp.ones((2, 2), jnp.float16),
        jnp.zeros(2, int),
        jnp.array([True, False]),
        jnp.ones(3, jnp.complex64),
        x,
        jnp.zeros((30, 20)),
        x[0],
    )
    key, *others = lax.fori_loop(0, 12, body, start)
    return jax.random.key_data(key), others


def test_the_last_pause_of_a_loop_that_carries_many_types():
    """What it carried there is handed to the host, which runs the steps again."""
    f = jax.jit(many_types)
    expected = f(X, 20.0)
    with observe(nans=True):
        found = f(X, 20.0)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    with pytest.raises(FloatingPointError) as caught, observe(nans=True):
        jax.block_until_ready(f(X, 7.0))
    assert line_of(many_types) in str(caught.value)
    assert "from 0 (forward pass, in step 7 of " in str(caught.value)


def a_quotient(x):
    zero = jnp.zeros_like(x)
    return zero / zero  # BAD


def an_overflow(x):
    return jnp.full_like(x, 1e30) * 1e30  # BAD


@pytest.mark.parametrize("start", [a_quotient, an_overflow])
def test_a_loop_that_starts_with_what_constants_have_made(start):
    def f(x):
        best = lax.fori_loop(0, 3, lambda i, c: jnp.minimum(c, x), start(x))
        return best

    with pytest.raises(FloatingPointError) as caught, observe(nans=True):
        jax.block_until_ready(jax.jit(f)(X))
    assert line_of(start) in str(caught.value)


def test_constants_that_are_good():
    def f(x):
        low = jnp.minimum(jnp.float32(3), 4 * jnp.float32(0.5))
        starts = low - 1, jnp.where(low > 1, jnp.inf, 0.0), jnp.full(6, -jnp.inf) * low
        return lax.fori_loop(0, 3, lambda i, c: (c[0] * x[i], c[1], c[2] + 1), starts)

    f = jax.jit(f)
    expected = f(X)
    with observe(nans=True):
        found = f(X)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
