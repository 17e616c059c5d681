"""What `hc.progress` draws: tqdm on a terminal, lines elsewhere; packages."""

from __future__ import annotations

import functools
import io
import re
import sys
import threading
import time

import bars
import jax
import jax.numpy as jnp
import pytest
import tqdm
import tqdm.auto

import hostcall as hc

N = 20


def scanned(n=N, **options):
    def body(c, i):
        hc.progress(i, n, **options)
        return c + 1.0, None

    return jax.jit(lambda x: jax.lax.scan(body, x, jnp.arange(n))[0])


def nested(**options):
    inner = scanned(5, desc="inner", **options)

    def run():
        for epoch in range(3):
            hc.progress(epoch, 3, desc="outer", every=1, **options)
            inner(0.0).block_until_ready()
            hc.barrier(programs=False)

    return run


# --- tqdm -----------------------------------------------------------------------------


def test_tqdm_on_a_terminal(stderr_is):
    terminal = stderr_is(bars.Terminal())
    scanned(desc="fit", unit="step", x=jnp.float32(1 / 3))(0.0)
    hc.barrier()
    (line,) = terminal.lines()
    assert re.fullmatch(
        r"fit: 100%\|[█#]+\| 20/20 \[00:00<00:00, [\d.]+k?step/s, x=0.333\]", line
    )
    assert terminal.getvalue().endswith("\n")


def test_nested_bars_on_a_terminal(stderr_is):
    terminal = stderr_is(bars.Terminal())
    nested()()
    (line,) = terminal.lines()
    assert line.startswith("outer: 100%|")
    assert "inner: 100%|" in terminal.getvalue()


def test_two_bars_on_a_terminal(stderr_is):
    terminal = stderr_is(bars.Terminal())
    for desc in ("first", "second"):
        scanned(desc=desc)(0.0)
    hc.barrier()
    first, second = terminal.lines()
    assert first.startswith("first: 100%")
    assert second.startswith("second: 100%")


def test_a_loop_that_stops_leaves_its_line(stderr_is):
    terminal = stderr_is(bars.Terminal())
    for i in range(5):
        hc.progress(i, 10, desc="stops", every=1)
    hc.progress.close()
    (line,) = terminal.lines()
    assert line.startswith("stops:  50%|")
    assert terminal.getvalue().endswith("\n")


def test_a_partial_of_tqdm():
    file = io.StringIO()
    scanned(bar=functools.partial(tqdm.tqdm, file=file, ascii=True), desc="mine")(0.0)
    hc.barrier()
    last = file.getvalue().split("\r")[-1]
    assert last.startswith("mine: 100%|##########| 20/20 [")
    assert last.endswith("\n")


def test_notebooks_get_their_bar_without_a_terminal(stderr_is, monkeypatch):
    log = stderr_is(io.StringIO())
    made = []

    class Widget(tqdm.std.tqdm):
        def __init__(self, **options):
            made.append(options)
            super().__init__(**{**options, "file": io.StringIO()})

    Widget.__module__ = "tqdm.notebook"
    monkeypatch.setattr(tqdm.auto, "tqdm", Widget)
    scanned(desc="widget")(0.0)
    hc.barrier()
    assert [options["desc"] for options in made] == ["widget"]
    assert log.getvalue() == ""


# --- Lines ----------------------------------------------------------------------------


def test_lines_where_there_is_no_terminal(stderr_is, undelayed, monkeypatch):
    log = stderr_is(io.StringIO())
    now = [100.0]
    monkeypatch.setattr(tqdm.std, "time", lambda: now[0])
    for i in range(N):
        hc.progress(i, N, desc="log", every=1, i=i)
        hc.barrier(programs=False)
        now[0] += 4
    lines = log.getvalue().splitlines()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", log.getvalue())
    # A line each ten seconds, of steps that come each four.
    assert [int(re.search(r" (\d+)/20 ", line)[1]) for line in lines] == [
        *range(1, N, 3),
        N,
    ]
    assert lines[0] == "log:   5%|5         | 1/20 [00:00<?, ?it/s, i=0]"
    assert lines[-1].startswith("log: 100%|##########| 20/20 [01:16<00:00,")


def test_inner_loops_write_no_lines_of_their_ends(stderr_is):
    log = stderr_is(io.StringIO())
    nested()()
    lines = log.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == ["outer", "inner", "outer"]


# --- Rates ----------------------------------------------------------------------------


def test_a_bar_begins_when_the_device_passed_its_first_step():
    made, gate = [], threading.Event()

    def bar(**options):
        made.append(tqdm.tqdm(file=io.StringIO(), **options))
        return made[-1]

    hc.tap(lambda x: gate.wait(60), 0.0)  # steps are queued behind this one
    scanned(bar=bar)(0.0).block_until_ready()
    ended = time.time()
    gate.set()
    hc.barrier()
    assert made[0].start_t <= ended


# --- Packages -------------------------------------------------------------------------


def test_a_missing_package_is_named_where_it_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        scanned()(0.0)
    assert str(caught.value) == (
        "hostcall: hc.progress(bar='auto') needs the package tqdm, which is not"
        " installed. Install it: pip install tqdm; in a checkout of hostcall:"
        ' pip install ".[progress]"; or set'
        " HOSTCALL_PROGRESS=0 in the environment to run without bars"
        "\n[hc-package] python -m hostcall explain hc-package"
    )
    assert caught.value.name == "tqdm"
    monkeypatch.setenv("HOSTCALL_PROGRESS", "0")
    assert scanned()(0.0) == N


def test_importing_brings_no_package(run_python):
    run_python("""
        import sys, hostcall as hc
        assert "hostcall.tools" not in sys.modules
        hc.progress
        assert "tqdm" not in sys.modules
    """)
