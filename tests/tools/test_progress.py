"""`hc.progress` in loops: which bar a step moves, and when bars close."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import pytest

import hostcall as hc

N = 20
LEFT, ERASED, OPEN = (True, True), (True, False), (False, True)


def scanned(screen, n=N, total=None, **options):
    def body(c, i):
        hc.progress(i, total or n, bar=screen, **options)
        return c + 1.0, None

    return jax.jit(lambda x: jax.lax.scan(body, x, jnp.arange(n))[0])


# --- Loops ----------------------------------------------------------------------------


def test_scan(screen):
    scanned(screen, desc="fit", unit="epoch")(0.0)
    hc.barrier()
    (bar,) = screen.bars
    assert (bar.desc, bar.total, bar.unit, bar.initial) == ("fit", N, "epoch", 0)
    assert bar.shown[0] == 1
    assert bar.shown[-1] == N
    assert screen.ends == [(N, *LEFT)]


def test_each_step_is_shown_with_an_int(screen, undelayed):
    scanned(screen, every=1)(0.0)
    hc.barrier()
    (bar,) = screen.bars
    assert sorted(set(bar.shown)) == list(range(1, N + 1))


def test_the_engine_throttles(screen):
    scanned(screen, every=3600.0)(0.0)
    hc.barrier()
    (bar,) = screen.bars
    assert set(bar.shown) == {1, N}


def test_fori_loop(screen):
    def body(i, x):
        hc.progress(i, N, bar=screen, loss=x)
        return x + 0.5

    jax.jit(lambda x: jax.lax.fori_loop(0, N, body, x))(0.0)
    hc.barrier()
    assert screen.ends == [(N, *LEFT)]
    assert screen.bars[0].postfix == "loss=9.5"


def whiled(screen, **options):
    def body(s):
        hc.progress(s[0], bar=screen, every=1, **options)
        return s[0] + 1, s[1] * 1.5

    return jax.jit(lambda x: jax.lax.while_loop(lambda s: s[1] < 100, body, (0, x))[0])


def test_while_loop_counts_and_closes_at_a_barrier(screen):
    n = int(whiled(screen)(1.0))
    hc.barrier()
    assert screen.bars[0].total is None
    assert screen.ends == [(n, *LEFT)]


def test_while_loop_closes_when_it_begins_anew(screen, undelayed):
    f = whiled(screen)
    n = int(f(1.0))
    hc.barrier(programs=False)
    assert screen.ends == [(n, *OPEN)]
    m = int(f(10.0))
    hc.barrier(programs=False)
    assert screen.ends == [(n, *LEFT), (m, *OPEN)]
    hc.progress.close()
    assert screen.ends == [(n, *LEFT), (m, *LEFT)]


def test_a_traced_total(screen):
    def run(n):
        def body(i, x):
            hc.progress(i, n, bar=screen)
            return x + 1

        return jax.lax.fori_loop(0, n, body, 0)

    assert jax.jit(run)(7) == 7
    hc.barrier(programs=False)
    assert screen.ends == [(7, *LEFT)]
    assert screen.bars[0].total == 7


def test_a_later_part_of_a_loop(screen):
    def body(i, x):
        hc.progress(i, 30, bar=screen, initial=10)
        return x + 1

    jax.jit(lambda: jax.lax.fori_loop(10, 30, body, 0))()
    hc.barrier()
    assert screen.bars[0].initial == 10
    assert screen.bars[0].shown[0] == 11
    assert screen.ends == [(30, *LEFT)]


def steps_of_one_program(screen, n):
    scanned(screen, n, every=1, total=N)(0.0)


def steps_of_several(screen, n):
    step = jax.jit(lambda i: hc.progress(i, N, bar=screen, every=1))
    for i in range(n):
        step(i)


def steps_of_python(screen, n):
    for i in range(n):
        hc.progress(i, N, bar=screen, every=1)


@pytest.mark.parametrize(
    "steps", [steps_of_one_program, steps_of_several, steps_of_python]
)
def test_steps_beyond_the_total_are_not_shown(screen, steps):
    for _ in range(2):
        steps(screen, N + 5)
        hc.barrier()
    assert screen.ends == [(N, *LEFT)] * 2


def test_each_run_has_a_bar(screen):
    f = scanned(screen)
    for _ in range(3):
        f(0.0)
    hc.barrier()
    assert screen.ends == [(N, *LEFT)] * 3


def test_two_loops_in_one_program(screen):
    def body(c, i):
        hc.progress(i, N, bar=screen)
        return c, None

    def both(x):
        for _ in range(2):
            x, _ = jax.lax.scan(body, x, jnp.arange(N))
        return x

    jax.jit(both)(0.0)
    hc.barrier()
    assert screen.ends == [(N, *LEFT)] * 2


# --- Python loops ---------------------------------------------------------------------


def test_a_jitted_step_in_a_python_loop(screen, undelayed):
    @jax.jit
    def step(x, i):
        hc.progress(i, N, bar=screen, every=1, x=x)
        return x + 1

    x = 0
    for i in range(N):
        x = step(x, i)
        if i in (10, 11):
            hc.barrier()  # which leaves the bar of a Python loop alone
    hc.barrier()
    assert screen.ends == [(N, *LEFT)]
    assert screen.bars[0].postfix == "x=19"


def test_a_barrier_after_the_first_step_leaves_no_line(screen, undelayed):
    @jax.jit
    def step(i):
        hc.progress(i, N, bar=screen, every=1)

    for i in range(N):
        step(i)
        if i == 0:
            hc.barrier()
    hc.barrier()
    assert screen.ends == [(1, *ERASED), (N, *LEFT)]


def test_a_loop_in_parts(screen):
    @jax.jit
    def part(begin):
        def body(i, x):
            hc.progress(begin + i, 3 * N, bar=screen)
            return x

        return jax.lax.fori_loop(0, N, body, 0)

    for begin in range(0, 3 * N, N):
        part(begin)
    hc.barrier()
    assert screen.ends == [(3 * N, *LEFT)]


def test_outside_of_programs(screen):
    for _ in range(2):
        for i in range(4):
            hc.progress(i, 4, bar=screen, every=1, where_am_i="eager")
    hc.barrier()
    assert screen.ends == [(4, *LEFT)] * 2
    assert screen.bars[0].postfix == "where_am_i=eager"


def test_a_python_loop_that_ends_early(screen, undelayed):
    def steps(n):
        for i in range(n):
            hc.progress(i, 9, bar=screen, every=1)

    steps(5)
    hc.barrier()
    assert screen.ends == [(5, *OPEN)]
    steps(3)
    hc.barrier()
    assert screen.ends == [(5, *LEFT), (3, *OPEN)]
    hc.progress.close()
    assert screen.ends == [(5, *LEFT), (3, *LEFT)]


# --- Nested loops ---------------------------------------------------------------------


def test_a_loop_that_goes_on_after_its_bar_was_closed(screen, undelayed):
    def step(i):
        hc.progress(i, 9, bar=screen, every=1)

    for _ in range(2):
        for i in range(5):
            step(i)
            if i == 2:
                hc.progress.close()
    hc.barrier()
    assert screen.ends == [(3, *LEFT), (5, *LEFT), (3, *LEFT), (5, *OPEN)]


def test_nested_loops_in_a_program(screen):
    def inner(c, j):
        hc.progress(j, 3, bar=screen, desc="inner")
        return c + 1, None

    def outer(c, i):
        hc.progress(i, 4, bar=screen, desc="outer")
        return jax.lax.scan(inner, c, jnp.arange(3))[0], None

    assert jax.jit(lambda x: jax.lax.scan(outer, x, jnp.arange(4))[0])(0) == 12
    hc.barrier()
    # The compiler may put the tap of the outer step behind the inner loop.
    names = [b.desc for b in screen.bars]
    assert names in (["outer", "inner"], ["inner", "outer", "inner"])
    assert (4, *LEFT) in screen.ends
    assert (screen.bars[-1].is_closed, screen.bars[-1].leave) == ERASED


def test_a_python_loop_around_programs(screen):
    f = scanned(screen, desc="steps")
    for epoch in range(3):
        hc.progress(epoch, 3, bar=screen, desc="epochs", every=1)
        f(0.0).block_until_ready()
        hc.barrier(programs=False)
    assert [b.desc for b in screen.bars] == ["epochs", "steps"]
    assert screen.ends == [(3, *LEFT), (N, *ERASED)]


def test_three_levels(screen):
    def level(depth):
        def body(i, x):
            hc.progress(i, 3, bar=screen, every=1, desc=str(depth))
            return level(depth + 1)(x) if depth < 2 else x + 1

        return lambda x: jax.lax.fori_loop(0, 3, body, x)

    assert jax.jit(level(0))(0) == 27
    hc.barrier(programs=False)
    assert {b.desc for b in screen.bars if b.leave} >= {"0"}
    assert all(b.is_closed for b in screen.bars)


# --- Failures, threads ----------------------------------------------------------------


# The compiler may show the step that fails, or the one before it last.
FAILED = [(5, *LEFT)], [(6, *LEFT)]


def failing(screen, at=5):
    def check(i):
        if i == at:
            raise ValueError("diverged")

    def body(c, i):
        hc.progress(i, N, bar=screen, every=1)
        hc.call(check, None, i, order="ordered")
        return c + 1.0, None

    return jax.jit(lambda x: jax.lax.scan(body, x, jnp.arange(N))[0])


def test_a_program_that_fails(screen):
    with pytest.raises(ValueError, match="diverged"), hc.reraise():
        failing(screen)(0.0)
    hc.barrier()
    assert screen.ends in FAILED


def test_a_program_that_fails_and_is_run_again(screen, undelayed):
    f = failing(screen)
    for _ in range(2):
        with pytest.raises(ValueError, match="diverged"), hc.reraise():
            f(0.0)
    hc.barrier(programs=False)
    assert screen.ends[0] in FAILED[0] + FAILED[1]
    assert screen.ends[1][1:] == OPEN


def test_threads(screen, undelayed):
    """Two threads run one program. In each step each waits for the other."""
    meet = threading.Barrier(2)

    def wait():
        meet.wait(60)

    def body(c, i):
        hc.call(wait, None, order="unordered")
        hc.progress(i, 6, bar=screen, every=1)
        return c + 1, None

    f = jax.jit(lambda x: jax.lax.scan(body, x, jnp.arange(6))[0]).lower(0).compile()
    threads = [threading.Thread(target=lambda: f(0)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    hc.barrier()
    left = [bar for bar in screen.bars if bar.leave]
    assert [bar.n for bar in left] == [6, 6]
    assert all(bar.is_closed for bar in screen.bars)
    assert len(screen.bars) <= 3


def test_a_bar_that_can_not_draw(screen):
    def broken(**_):
        raise OSError("no screen")

    f = scanned(broken)
    assert f(0.0) == N
    with pytest.raises((OSError, ExceptionGroup), match="no screen|taps failed"):
        hc.barrier()
    scanned(screen)(0.0)
    hc.barrier()
    assert screen.ends == [(N, *LEFT)]


def test_a_bar_that_can_not_close(screen):
    def made(**options):
        bar = screen(**options)
        bar.close = lambda: 1 / 0
        return bar

    assert scanned(made)(0.0) == N
    with pytest.raises(ZeroDivisionError):
        hc.barrier()
    hc.barrier()


# --- Wrappers -------------------------------------------------------------------------


def test_wrapped_bodies(screen):
    def body(c, x):
        """The user's."""
        return c + x, x

    wrapped = hc.progress.scan(body, N, bar=screen, desc="scan")
    assert wrapped.__doc__ == "The user's."
    sums, ys = jax.lax.scan(wrapped, 0, jnp.arange(N))
    assert sums == ys.sum()
    pairs = hc.progress.scan(lambda c, x: (c + x[1], None), N, bar=screen)
    xs = jnp.ones(N)
    assert jax.lax.scan(pairs, 0.0, (jnp.arange(N), xs))[0] == N
    loop = hc.progress.loop(lambda i, x: x + i, N, bar=screen, desc="loop")
    assert jax.lax.fori_loop(0, N, loop, 0) == sums
    hc.barrier()
    assert [b.desc for b in screen.bars] == ["scan", None, "loop"]
    assert screen.ends == [(N, *LEFT)] * 3


def test_repr():
    assert repr(hc.progress) == "hc.progress"
