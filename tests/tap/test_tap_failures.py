"""Taps that fail again and again: the log, the barrier, and what they keep alive."""

from __future__ import annotations

import gc
import itertools
import logging
import signal
import threading
import weakref

import clocks
import jax
import numpy as np
import pytest
from jax import lax

import hostcall as hc


@pytest.fixture
def clock(monkeypatch):
    return clocks.of_tap_failures(monkeypatch)


@pytest.fixture
def lines(caplog):
    """Lines of the log so far: (text, whether it has a traceback)."""

    def taken():
        records = [r for r in caplog.records if r.name == "hostcall"]
        assert {r.levelno for r in records} <= {logging.ERROR}
        out = [(r.getMessage(), r.exc_info is not None) for r in records]
        caplog.clear()
        return out

    return taken


def steps(fn, n):
    """Taps each number below `n`."""
    return jax.jit(lambda: lax.fori_loop(0, n, lambda i, c: (hc.tap(fn, i), c)[1], 0))


def barrier_group():
    with pytest.raises(ExceptionGroup) as caught:
        hc.barrier()
    return caught.value


def test_50_000_failures(clock, lines):
    n, alive = 50_000, []

    def fail(i):
        clock[0] += 1 / 1024
        alive.append(weakref.ref(i))
        del alive[:-100]
        raise ValueError(f"step {i}")

    steps(fail, n)()
    group = barrier_group()
    # The group has the first failures and their total number.
    assert group.message == (
        f"{n} taps failed; the errors here are different ones (16), and the log counts"
        " the rest"
    )
    assert [str(e) for e in group.exceptions] == [f"step {i}" for i in range(16)]

    got = lines()
    assert [full for _, full in got] == [True] * 3 + [False] * (len(got) - 3)
    assert [i for i, _ in enumerate(got) if "only counted here" in got[i][0]] == [2]
    counts = [*range(3, n, 1024), n]
    for (text, _), (before, count) in zip(
        got[3:], itertools.pairwise(counts), strict=True
    ):
        assert text.startswith(
            f"tap `test_50_000_failures.<locals>.fail`, written at {__file__}"
        )
        assert text.endswith(
            f", failed {count - before} more times ({count} in all). Last error:"
            f" ValueError: step {count - 1}"
        )
    # Only the newest exception still has frames, and what they hold.
    del group
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 1


def test_after_a_barrier_that_raised_all_begins_again(clock, lines):
    def fail(i):
        raise ValueError(i)

    f = steps(fail, 5)
    for _ in range(2):
        f()
        assert len(barrier_group().exceptions) == 5
        assert [full for _, full in lines()] == [True] * 3 + [False]
    f()
    hc.barrier(programs=False)  # reports failures, but does not take them
    assert [full for _, full in lines()] == [True] * 3 + [False]
    f()
    hc.barrier(programs=False)
    ((text, full),) = lines()
    assert not full
    assert "failed 5 more times (10 in all)" in text
    assert "10 taps failed" in str(barrier_group())
    assert lines() == []


def test_places_are_counted_apart(clock, lines):
    def often(i):
        raise ValueError(int(i))

    def once(i):
        if i == 99:
            raise KeyError(int(i))

    @jax.jit
    def f():
        def body(i, c):
            hc.tap(often, i)
            hc.tap(once, i)
            return c

        return lax.fori_loop(0, 100, body, 0)

    f()
    group = barrier_group()
    assert "101 taps failed; the errors here are different ones (17)," in group.message
    assert [e.args[0] for e in group.exceptions] == [*range(16), 99]
    texts = [text.split("`")[1].rsplit(".")[-1] for text, _ in lines()]
    assert sorted(texts) == ["often"] * 4 + ["once"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_program_is_among_the_few(kind, clock):
    def fail(i):
        raise kind if i == 60 else ValueError

    steps(fail, 100)()
    with pytest.raises(BaseExceptionGroup, match="100 taps failed") as caught:
        hc.barrier()
    assert isinstance(caught.value.exceptions[-1], kind)


def test_eager_taps_and_rows_of_one_place_count_together(clock, lines):
    def fail(x):
        raise ValueError

    for x in range(4):
        hc.tap(fail, x)
    assert barrier_group().message.startswith("4 taps failed; ")
    assert [full for _, full in lines()] == [True] * 3 + [False]

    jax.jit(jax.vmap(lambda x: hc.tap(fail, x, rows="each")))(np.arange(4))
    barrier_group()
    texts = [text for text, _ in lines()]
    assert [", row 2, written" in text for text in texts] == [False, False, True, False]


def test_equal_failures_are_one_with_their_count(clock):
    """Of each place and text one; those of another place are told by themselves."""

    def fail(i):
        raise ValueError("no space left")

    def other(i):
        raise ValueError("no space left" if i % 2 else "no such folder")

    jax.block_until_ready((steps(fail, 10_000)(), steps(other, 10)()))
    group = barrier_group()
    assert group.message == (
        "10010 taps failed; the errors here are different ones (3), and the log counts"
        " the rest"
    )
    assert sorted(map(str, group.exceptions)) == [
        "no space left",
        "no space left",
        "no such folder",
    ]


def wants_a_number(x):
    return float(x)


@pytest.mark.parametrize("rows", ["batched", "each"])
def test_a_tap_that_gets_the_whole_batch_is_told_of_rows(rows):
    def fails(x):
        wants_a_number(np.zeros(2) if rows == "each" else x)

    for _ in range(2):
        jax.jit(jax.vmap(lambda x: hc.tap(fails, x, rows=rows)))(np.arange(2.0))
    error = barrier_group().exceptions[0]
    assert isinstance(error, TypeError)
    notes = vars(error).get("__notes__", [])
    assert len(notes) == (rows == "batched")
    assert all('hc.tap(..., rows="each")' in note for note in notes)


def test_at_exit_the_rest_is_counted(run_python):
    done = run_python(
        """
        import jax, hostcall as hc
        def bad(i): raise KeyError(int(i))
        jax.jit(lambda: jax.lax.fori_loop(
            0, 500, lambda i, c: (hc.tap(bad, i), c)[1], 0))()
        """
    )
    assert done.stderr.count("Traceback") == 3
    assert "(500 in all). Last error: KeyError: 499" in done.stderr
    assert "500 taps failed, and no barrier() raised that" in done.stderr


def test_a_handler_of_a_signal_that_waits_while_failures_are_counted(monkeypatch):
    def fail(i):
        raise ValueError(f"step {i}")

    found, before = [], signal.getsignal(signal.SIGUSR1)
    signal.signal(
        signal.SIGUSR1, lambda *_: found.append(hc.barrier(60, programs=False))
    )

    def interrupt():
        if threading.current_thread() is threading.main_thread() and not found:
            found.append(None)
            signal.raise_signal(signal.SIGUSR1)

    try:
        clocks.while_tap_failures_are_counted(monkeypatch, interrupt)
        steps(fail, 2)()
        assert len(barrier_group().exceptions) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [None, True]
