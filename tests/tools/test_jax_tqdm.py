"""`hostcall.tools.jax_tqdm`: programs written for jax-tqdm run, with the same results."""

from __future__ import annotations

import inspect
import io

import jax
import jax.numpy as jnp
import pytest

import hostcall as hc
from hostcall.tools import jax_tqdm

N = 30


@pytest.fixture
def file():
    return io.StringIO()


def last(file):
    return file.getvalue().split("\r")[-1]


def test_scan(file):
    @jax_tqdm.scan_tqdm(N, print_rate=10, tqdm_type="std", desc="scan", file=file)
    def step(carry, x):
        return carry + x, carry

    total, _ = jax.jit(lambda: jax.lax.scan(step, 0, jnp.arange(N)))()
    hc.barrier()
    assert total == N * (N - 1) // 2
    assert last(file).startswith("scan: 100%")


def test_scan_over_a_tuple(file):
    @jax_tqdm.scan_tqdm(N, file=file)
    def step(carry, x):
        i, value = x
        return carry + value, i

    total, _ = jax.jit(lambda: jax.lax.scan(step, 0.0, (jnp.arange(N), jnp.ones(N))))()
    hc.barrier()
    assert total == N
    assert last(file).startswith("Running for 30 iterations: 100%")


def test_loop(file):
    @jax_tqdm.loop_tqdm(N, message="loop", unit="turn", total=7, file=file)
    def step(i, value):
        return value + i

    assert jax.jit(lambda: jax.lax.fori_loop(0, N, step, 0))() == N * (N - 1) // 2
    hc.barrier()
    assert last(file).startswith("loop: 100%")
    assert "30/30" in last(file)
    assert "turn/s" in last(file)


def test_bars_of_rows(file):
    @jax_tqdm.scan_tqdm(N, desc="row", file=file)
    def scan_step(carry, x):
        return carry + x, None

    @jax_tqdm.loop_tqdm(N, desc="row", file=file)
    def loop_step(i, value):
        return value + i

    def scanned(number):
        bar = jax_tqdm.PBar(id=number, carry=number)
        return jax.lax.scan(scan_step, bar, jnp.arange(N))[0]

    def looped(number):
        bar = jax_tqdm.PBar(id=number, carry=number)
        return jax.lax.fori_loop(0, N, loop_step, bar)

    numbers = jnp.arange(3)
    for f in (scanned, looped):
        out = jax.jit(jax.vmap(f))(numbers)
        hc.barrier()
        assert out.id.tolist() == [0, 1, 2]
        assert (out.carry == numbers + N * (N - 1) // 2).all()


def test_a_bar_has_replace():
    bar = jax_tqdm.PBar(id=1, carry=2.0)
    new = bar.replace(carry=3.0)
    assert (new.id, new.carry) == (1, 3.0)
    assert type(new) is jax_tqdm.PBar


@pytest.mark.parametrize("xs", [jnp.arange(float(N)), (jnp.arange(float(N)), 1)])
def test_steps_may_be_floats(xs, file):
    @jax_tqdm.scan_tqdm(N, desc="floats", file=file)
    def step(carry, x):
        return carry + (x[0] if isinstance(x, tuple) else x), None

    if isinstance(xs, tuple):
        xs = xs[0], jnp.ones(N)
    assert jax.jit(lambda: jax.lax.scan(step, 0.0, xs)[0])() == N * (N - 1) // 2
    hc.barrier()
    assert last(file).startswith("floats: 100%")
    assert f"{N}/{N}" in last(file)


@pytest.mark.parametrize("decorator", [jax_tqdm.scan_tqdm, jax_tqdm.loop_tqdm])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tqdm_type": "foo"}, "'auto' or 'std' or 'notebook', got 'foo'"),
        ({"tqdm_type": None}, "got None"),
        ({"print_rate": 0}, "at least 1 .* got 0"),
        ({"print_rate": -1}, "got -1"),
        ({"print_rate": N + 1}, f"the number of steps, {N}, got {N + 1}"),
    ],
)
def test_wrong_options_are_value_errors(decorator, options, said):
    with pytest.raises(ValueError, match=said):
        decorator(N, **options)


def test_signatures_are_those_of_the_package():
    theirs = pytest.importorskip("jax_tqdm")
    for name in ("scan_tqdm", "loop_tqdm"):
        parameters = inspect.signature(getattr(theirs, name)).parameters
        ours = inspect.signature(getattr(jax_tqdm, name)).parameters
        assert list(parameters) == list(ours)
        for key in parameters:
            assert parameters[key].default == ours[key].default
