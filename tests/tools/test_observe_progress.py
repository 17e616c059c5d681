"""`hc.observe(progress=True)`: bars of loops; and the command line."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys

import bars
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hostcall import observe
from hostcall.tools._observe import loops


@pytest.fixture
def drawn(monkeypatch, undelayed):
    """Runs a program in a block, and returns the terminal on which it drew. Each loop
    lasts long enough, and each step is shown.
    """
    pytest.importorskip("tqdm")
    monkeypatch.setattr(loops, "LASTS", -1.0)
    monkeypatch.setattr(loops, "EVERY", 1)

    def run(f, *args):
        expected = f(*args)
        terminal = bars.Terminal()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", terminal)
            patch.setenv("TERM", "xterm-256color")
            with observe(progress=True):
                np.testing.assert_allclose(f(*args), expected, rtol=1e-6)
        return terminal

    return run


def body(c, x):
    return c * 0.5 + x, jnp.sin(c)


def scan(c):
    return jax.lax.scan(body, c, jnp.arange(7.0))[1].sum()


def is_bar(line, name, end):
    return re.match(rf"{name}: 100%.*\| {end} \[", line)


SCAN = r"scan test_observe_progress\.py:\d+"


def test_scan(drawn):
    (line,) = drawn(jax.jit(scan), 1.0).lines()
    assert is_bar(line, SCAN, "7/7")


def test_backward_pass(drawn):
    forward, backward = drawn(jax.jit(jax.grad(scan)), 1.0).lines()
    assert is_bar(forward, SCAN, "7/7")
    assert is_bar(backward, SCAN + " backward", "7/7")
    assert backward.startswith(forward.split(": 100%")[0])


def nested(steps, reverse=False):
    def outer(c, x):
        return jax.lax.fori_loop(0, steps, lambda i, c: c + x, c), None

    return jax.jit(
        lambda c: jax.lax.scan(outer, c, jnp.arange(3.0), reverse=reverse)[0]
    )


@pytest.mark.parametrize("reverse", [False, True])
def test_nested(drawn, reverse):
    """Bars of inner loops are erased."""
    terminal = drawn(nested(5, reverse), 1.0)
    (line,) = terminal.lines()
    assert is_bar(line, SCAN, "3/3")
    assert "/5 [" in terminal.getvalue()


@pytest.mark.parametrize("wrap", [jax.vmap, lambda f: lambda x: f(x[0])])
def test_while(drawn, wrap):
    def f(n):
        return jax.lax.while_loop(lambda i: i < n, lambda i: i + 1, 0)

    (line,) = drawn(jax.jit(wrap(f)), jnp.array([6, 2])).lines()
    assert line.startswith("while test_observe_progress.py:")
    assert ": 6it [" in line


def test_a_short_loop_has_no_bar(drawn, monkeypatch):
    monkeypatch.setattr(loops, "LASTS", 60.0)
    assert drawn(jax.jit(scan), 1.0).getvalue() == ""


def test_inner_bars_come_below_outer_ones(drawn, monkeypatch):
    """Also if an inner loop is the first to be told that it lasts."""
    monkeypatch.setattr(loops, "LASTS", 1.0)
    seconds = itertools.count(0.0, 0.1)
    monkeypatch.setattr(loops, "clock", lambda: next(seconds))
    terminal = drawn(nested(30), 1.0)
    text = terminal.getvalue()
    assert 0 <= text.find("/3 [") < text.find("/30 [")
    (line,) = terminal.lines()
    assert is_bar(line, SCAN, "3/3")


def test_switched_off(drawn, monkeypatch):
    monkeypatch.setenv("HOSTCALL_PROGRESS", "0")
    assert drawn(jax.jit(scan), 1.0).getvalue() == ""


# --- python -m hostcall run -----------------------------------------------------------

PROGRAM = """
import sys
import jax, jax.numpy as jnp

def f(x):
    y = x - 1
    z = jnp.log(y)
    return z

print("result", jax.jit(f)(float(sys.argv[1])))
"""


def run(tmp_path, *options, argument="3"):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "hostcall",
        "run",
        *options,
        str(program),
        argument,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_command_line(tmp_path):
    done = run(tmp_path, "--nans", "--values", "y", "--stats", "--progress")
    assert done.returncode == 0, done.stderr
    assert "0.6931472" in done.stdout
    assert "y (program.py:6) = 2" in done.stdout
    assert "z = jnp.log(y)" in done.stdout.split("calls")[1]


def test_command_line_with_a_bad_value(tmp_path):
    done = run(tmp_path, "--nans", argument="1")
    assert done.returncode == 1
    assert "FloatingPointError: hostcall: log made the first bad value" in done.stderr
    assert "program.py:7 in f" in done.stderr
    assert "Traceback" in done.stderr
