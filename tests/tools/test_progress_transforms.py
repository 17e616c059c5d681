"""`hc.progress` under transformations, and that it changes no result."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest

import hostcall as hc

N = 12
LEFT = (True, True)


def loop(show):
    """A loop of sines with a bar, as a function of a float."""

    def body(c, i):
        c = jnp.sin(c) * 1.1 + 0.01 * i
        show(i, c)
        return c, c

    def run(x):
        last, all_ = jax.lax.scan(body, x, jnp.arange(N))
        return last + all_.sum()

    return run


def fori(show):
    def body(i, c):
        show(i, c)
        return jnp.sin(c) * 1.1

    return lambda x: jax.lax.fori_loop(0, N, body, x)


def whiled(show):
    def body(s):
        show(s[0], s[1])
        return s[0] + 1, s[1] * 1.3 + 0.1

    return lambda x: jax.lax.while_loop(lambda s: s[1] < 50, body, (0, x))[1]


def sharded(show):
    mesh = meshes.line()
    spec = jax.sharding.PartitionSpec("x")
    f = jax.shard_map(jax.vmap(loop(show)), mesh=mesh, in_specs=spec, out_specs=spec)
    return lambda x: f(
        jax.device_put(x + jnp.arange(8.0), jax.NamedSharding(mesh, spec))
    )


BATCH = jnp.linspace(0.1, 1, 5)
PROGRAMS = {
    "scan": lambda show: lambda: jax.jit(loop(show))(0.3),
    "fori": lambda show: lambda: jax.jit(fori(show))(0.3),
    "while": lambda show: lambda: jax.jit(whiled(show))(0.3),
    "vmap": lambda show: lambda: jax.jit(jax.vmap(loop(show)))(BATCH),
    "vmap of while": lambda show: lambda: jax.jit(jax.vmap(whiled(show)))(BATCH),
    "grad": lambda show: lambda: jax.jit(jax.grad(loop(show)))(0.3),
    "remat": lambda show: lambda: jax.jit(jax.grad(jax.checkpoint(loop(show))))(0.3),
    "vmap of grad": lambda show: lambda: jax.jit(jax.vmap(jax.grad(loop(show))))(BATCH),
    "hessian": lambda show: lambda: jax.jit(jax.hessian(loop(show)))(0.3),
    "jvp": lambda show: lambda: jax.jvp(jax.jit(loop(show)), (0.3,), (1.0,)),
    "shard_map": lambda show: lambda: jax.jit(sharded(show))(0.3),
}


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_the_same_bits(name, screen, optimized, monkeypatch):
    total = None if "while" in name else N

    def show(i, c):
        hc.progress(i, total, bar=screen, every=1, c=c)

    without = PROGRAMS[name](lambda i, c: None)()
    with_bar = PROGRAMS[name](show)()
    hc.barrier()
    assert screen.bars
    seen = len(screen.bars)
    monkeypatch.setenv("HOSTCALL_PROGRESS", "0")
    switched_off = PROGRAMS[name](show)()
    hc.barrier()
    assert len(screen.bars) == seen
    assert bits(without) == bits(with_bar) == bits(switched_off)


def test_switched_off_nothing_is_in_the_program(screen, monkeypatch):
    def show(i, c):
        hc.progress(i, N, bar=screen, c=c)

    plain = str(jax.make_jaxpr(loop(lambda i, c: None))(0.3))
    assert str(jax.make_jaxpr(loop(show))(0.3)) != plain
    monkeypatch.setenv("HOSTCALL_PROGRESS", "0")
    assert str(jax.make_jaxpr(loop(show))(0.3)) == plain


@pytest.mark.parametrize(
    "name", ["grad", "remat", "vmap", "vmap of grad", "hessian", "shard_map"]
)
def test_one_bar_counts_once(name, screen, undelayed):
    show = lambda i, c: hc.progress(i, N, bar=screen, every=1)
    PROGRAMS[name](show)()
    hc.barrier()
    (bar,) = screen.bars
    assert screen.ends == [(N, *LEFT)]
    assert bar.restarts == 0
    if name != "shard_map":  # where the first device may be ahead of the others
        assert sorted(bar.shown) == bar.shown


# --- Rows -----------------------------------------------------------------------------


def test_metrics_of_a_batch_are_mean_and_range(screen):
    def body(i, x):
        hc.progress(i, N, bar=screen, x=x, two=2 * i, text="abc", none=jnp.nan)
        return x

    jax.jit(jax.vmap(lambda x: jax.lax.fori_loop(0, N, body, x)))(jnp.arange(4.0))
    hc.barrier()
    assert screen.ends == [(N, *LEFT)]
    wanted = {"none=nan", "text=abc", "two=22", "x=1.5 [0", "3]"}
    assert set(screen.bars[0].postfix.split(", ")) == wanted


def steps_of(screen, rows):
    """A while loop that ends after another number of steps in each row."""

    def body(n, i):
        hc.progress(i, n, bar=screen, every=1, rows=rows, desc="row")
        return i + 1

    return lambda n: jax.lax.while_loop(lambda i: i < n, lambda i: body(n, i), 0)


def test_a_batch_shows_its_slowest_row(screen, undelayed):
    lengths = jnp.array([3, 9, 6])
    ends = jax.jit(jax.vmap(steps_of(screen, "batched")))(lengths)
    hc.barrier(programs=False)
    assert (ends == lengths).all()
    (bar,) = screen.bars
    assert sorted(bar.shown) == bar.shown, bar.shown
    assert screen.ends == [(9, *LEFT)]


def test_a_batch_without_a_total_shows_its_fastest_row(screen, undelayed):
    def body(i):
        hc.progress(i, bar=screen, every=1)
        return i + 1

    f = lambda n: jax.lax.while_loop(lambda i: i < n, body, 0)
    jax.jit(jax.vmap(f))(jnp.array([3, 9, 6]))
    hc.barrier()
    assert screen.ends == [(9, *LEFT)]


def test_a_bar_for_each_row(screen, undelayed):
    lengths = jnp.array([3, 9, 6])
    jax.jit(jax.vmap(steps_of(screen, "each")))(lengths)
    hc.barrier(programs=False)
    assert [(b.desc, b.total) for b in screen.bars] == [
        ("row [0]", 3),
        ("row [1]", 9),
        ("row [2]", 6),
    ]
    assert screen.ends == [(n, *LEFT) for n in (3, 9, 6)]


def test_at_most_sixteen_rows_have_a_bar(screen):
    def body(i, x):
        hc.progress(i, N, bar=screen, rows="each", x=x)
        return x

    jax.jit(jax.vmap(lambda x: jax.lax.fori_loop(0, N, body, x)))(jnp.arange(20))
    hc.barrier()
    assert [b.postfix for b in screen.bars] == [f"x={i}" for i in range(16)]
    assert screen.ends == [(N, *LEFT)] * 16


def test_rows_of_two_vmaps(screen):
    def body(x, y):
        def step(i, c):
            hc.progress(i, N, bar=screen, rows="each", x=x, y=y)
            return c

        return jax.lax.fori_loop(0, N, step, x)

    inner = jax.vmap(body, (None, 0))
    jax.jit(jax.vmap(inner, (0, None)))(jnp.arange(2), jnp.arange(3))
    hc.barrier()
    wanted = [f"x={x}, y={y}" for x in range(2) for y in range(3)]
    assert [b.postfix for b in screen.bars] == wanted


# --- Devices --------------------------------------------------------------------------


def test_devices_share_a_bar(screen, undelayed):
    mesh = meshes.line()
    spec = jax.sharding.PartitionSpec("x")

    def run(x):
        def body(i, c):
            hc.progress(i, N, bar=screen, every=1, x=c[0])
            return c

        return jax.lax.fori_loop(0, N, body, x)

    f = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))
    x = jax.device_put(jnp.arange(4.0), jax.NamedSharding(mesh, spec))
    for _ in range(2):
        f(x)
        hc.barrier()
        (bar,) = screen.bars
        assert screen.ends == [(N, *LEFT)]
        assert bar.postfix == "x=1.5 [0, 3]"
        screen.bars.clear()


def test_a_program_that_the_compiler_partitions(screen):
    mesh = meshes.line()
    x = jax.device_put(
        jnp.arange(8.0), jax.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    )

    def body(i, c):
        hc.progress(i, N, bar=screen, total_of_c=c.sum())
        return c + 1

    jax.jit(lambda x: jax.lax.fori_loop(0, N, body, x))(x)
    hc.barrier()
    assert screen.ends == [(N, *LEFT)]
    assert screen.bars[0].postfix == f"total_of_c={28 + 8 * (N - 1)}"
