"""`hc.progress` at times that a test sets, and the threads that touch its bars."""

from __future__ import annotations

import dataclasses
import functools
import io
import sys
import threading
import time

import bars as screens
import numpy as np
import pytest
import tqdm
from test_progress import failing, scanned

import hostcall as hc
from hostcall.tools._progress import bars, drawing

LEFT, ERASED, OPEN = (True, True), (True, False), (False, True)


def loops_of(screen):
    return {
        name: bars.Loop(total, name, "it", 0, screen, "batched")
        for name, total in {"outer": 4, "inner": 3}.items()
    }


def deliver(monkeypatch, loops, steps):
    """Delivers (name of a loop, step), as a program would in one run."""
    with monkeypatch.context() as patch:
        for name, step in steps:
            here = hc.typing.Current(name, name, "unordered", None, {}, {}, (), run=7)
            patch.setattr(hc, "current", lambda here=here: here)
            loops[name](np.int32(step), None, {})


def test_an_outer_loop_that_is_shown_first(screen, undelayed, monkeypatch):
    steps = [
        (name, step)
        for i in range(4)
        for name, step in [("outer", i), *(("inner", j) for j in range(3))]
    ]
    for _ in range(2):
        deliver(monkeypatch, loops_of(screen), steps)
        assert [b.desc for b in screen.bars] == ["outer", "inner"]
        assert screen.ends == [(4, *LEFT), (3, *ERASED)]
        assert [b.restarts for b in screen.bars] == [0, 3]
        assert screen.bars[0].shown == [1, 2, 3, 4]
        assert screen.bars[1].shown == [1, 2, 3] * 4
        screen.bars.clear()


def test_an_outer_loop_that_is_shown_last(screen, undelayed, monkeypatch):
    steps = [
        (name, step)
        for i in range(4)
        for name, step in [*(("inner", j) for j in range(3)), ("outer", i)]
    ]
    for _ in range(2):
        deliver(monkeypatch, loops_of(screen), steps)
        # The first run of the inner loop does not know that it is inside another.
        assert [b.desc for b in screen.bars] == ["inner", "outer", "inner"]
        assert screen.ends == [(3, *LEFT), (4, *LEFT), (3, *ERASED)]
        screen.bars.clear()


def test_fast_inner_loops_are_drawn_now_and_then(screen, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(bars, "clock", lambda: now[0])
    loops = loops_of(screen)
    for i in range(4):
        deliver(monkeypatch, loops, [("outer", i)])
        for j in range(3):
            deliver(monkeypatch, loops, [("inner", j)])
            now[0] += bars.QUIET / 5
    assert screen.ends == [(4, *LEFT), (3, *ERASED)]
    assert len(screen.bars[1].shown) <= 6


def test_a_line_like_that_of_an_inner_loop(screen, monkeypatch):
    """Two lines with equal options. One is drawn a moment after the other."""
    monkeypatch.setattr(bars, "clock", lambda: 100.0)
    hc.progress(0, 4, bar=screen, desc="outer")
    for i in range(3):
        hc.progress(i, 3, bar=screen, desc="same")
    for i in range(3):
        hc.progress(i, 3, bar=screen, desc="same")
    hc.barrier(programs=False)
    assert [b.desc for b in screen.bars] == ["outer", "same", "same"]
    hc.progress.close()
    assert all(b.is_closed for b in screen.bars)


def test_a_bar_that_rests_while_another_moves(screen, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(bars, "clock", lambda: now[0])
    monkeypatch.setattr(bars, "QUIET", 0)
    with pytest.raises(ValueError, match="diverged"), hc.reraise():
        failing(screen)(0.0)
    hc.barrier(programs=False)
    other = scanned(screen)
    other(0.0)
    hc.barrier(programs=False)
    assert screen.ends[0][1:] == OPEN
    now[0] += 1.5
    other(0.0)
    hc.barrier(programs=False)
    assert screen.ends[0][1:] == LEFT


@pytest.mark.parametrize("bar", ["auto", "lines"])
def test_the_rate_is_that_of_the_steps_since_the_first(stderr_is, bar):
    """The first step was five seconds ago, and its bar is drawn only now."""
    file = stderr_is(io.StringIO() if bar == "lines" else screens.Terminal())
    loop = bars.Loop(20, "fit", "it", 0, "auto", "")
    drawn = drawing.Drawn(loop, "fit", 20, 1, time.time() - 5)
    drawn.show(1, "", True)
    assert "?it/s" in file.getvalue()
    drawn.show(11, "", True)
    assert 0 < drawn.bar.format_dict["rate"] <= 2
    drawn.close(True)


def test_an_inner_loop_that_starts_again_has_its_own_rate():
    loop = bars.Loop(20, None, "it", 0, None, "")
    make = functools.partial(tqdm.tqdm, file=io.StringIO())
    drawn = drawing.Drawn(dataclasses.replace(loop, bar=make), None, 20, 1, 0.0)
    drawn.show(20, "", True)
    drawn.restart(1)
    drawn.show(1, "", True)
    assert "1/20 [00:00<?, ?it/s" in str(drawn.bar)
    drawn.close(True)


def test_one_thread_at_a_time_touches_the_bars(screen, monkeypatch):
    """The worker that delivers steps, and threads that wait at barriers."""
    inside, together = [], []

    def alone(method):
        def call(*args):
            inside.append(None)
            together.append(len(inside))
            try:
                method(*args)
            finally:
                inside.pop()

        return call

    for name in ("move", "close_over"):
        monkeypatch.setattr(bars.Bars, name, alone(getattr(bars.Bars, name)))

    def run():
        for i in range(200):
            hc.progress(i, 200, bar=screen, every=1)
            hc.progress.close()

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(together) == {1}


@pytest.mark.parametrize("first", ["outer", "inner"])
def test_loops_that_know_their_place_need_no_order(
    screen, undelayed, monkeypatch, first
):
    """XLA may run an inner loop before the step of the loop around it."""
    monkeypatch.setattr(bars, "LASTS", -1)
    paths = {"outer": ("outer",), "inner": ("outer", "inner"), "other": ("other",)}
    loops = {
        name: bars.Loop(3, name, "it", 0, screen, "batched", path)
        for name, path in paths.items()
    }
    inner = [("inner", i) for i in range(3)]
    steps = []
    for i in range(3):
        here = [("outer", i), *inner] if first == "outer" else [*inner, ("outer", i)]
        steps += here
    steps += [("other", i) for i in range(3)]
    deliver(monkeypatch, loops, steps)
    hc.progress.close()
    ends = {bar.desc: end for bar, end in zip(screen.bars, screen.ends, strict=True)}
    assert ends == {"outer": (3, *LEFT), "inner": (3, *ERASED), "other": (3, *LEFT)}


def test_a_bar_that_begins_again_has_no_negative_rate(stderr_is):
    text = stderr_is(screens.Terminal())
    spec = bars.Loop(400, "inner", "it", 0, "auto", "batched")
    drawn = drawing.Drawn(spec, "inner", 400, 300, time.time() - 1)
    drawn.show(400, "", at_once=True)
    drawn.restart(1)
    drawn.show(1, "", at_once=True)
    drawn.close(leave=True)
    assert "<-" not in text.getvalue()
    assert ", -" not in text.getvalue()


def test_an_error_that_ends_the_program_closes_the_bars_first(screen, monkeypatch):
    states = []
    note = lambda *error: states.extend(bar.is_closed for bar in screen.bars)
    monkeypatch.setattr(sys, "excepthook", note)
    bars.begin_tracebacks_on_a_line.__wrapped__()
    deliver(monkeypatch, loops_of(screen), [("outer", 0), ("outer", 1)])
    sys.excepthook(ValueError, ValueError("boom"), None)
    assert states == [True]
