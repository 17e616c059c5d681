"""`hc.observe(progress=True)`: bars of loops; and the command line."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc
from hostcall.tools._observe import loops
from hostcall.tools._progress import drawing
from hostcall.tools.observing import observe


class Bar:
    """A bar that notes what happens to it."""

    made: list[Bar]

    def __init__(self, desc, total, unit, initial, leave):
        self.desc, self.total, self.n, self.leave = desc, total, initial, leave
        self.closed = False
        self.made.append(self)

    def update(self, n):
        self.n += n

    def close(self):
        self.closed = True


@pytest.fixture
def made(monkeypatch, undelayed):
    """The bars that are drawn. Each loop lasts long enough, and each step is shown."""
    pytest.importorskip("tqdm")
    monkeypatch.setattr(Bar, "made", [], raising=False)
    monkeypatch.setattr(drawing, "factory", lambda bar: Bar if bar == "auto" else bar)
    monkeypatch.setattr(loops, "LASTS", -1.0)
    monkeypatch.setattr(loops, "EVERY", 1)
    return Bar.made


def body(c, x):
    return c * 0.5 + x, jnp.sin(c)


def scan(c):
    return jax.lax.scan(body, c, jnp.arange(7.0))[1].sum()


def observed(f, *args):
    expected = f(*args)
    with observe(progress=True):
        np.testing.assert_allclose(f(*args), expected, rtol=1e-6)


def test_scan(made):
    observed(jax.jit(scan), 1.0)
    (bar,) = made
    assert bar.desc.startswith("scan test_observe_progress.py:")
    assert (bar.total, bar.n, bar.closed, bar.leave) == (7, 7, True, True)


def test_backward_pass(made):
    observed(jax.jit(jax.grad(scan)), 1.0)
    forward, backward = made
    assert backward.desc == forward.desc + " backward"
    assert forward.n == backward.n == 7


@pytest.mark.parametrize("reverse", [False, True])
def test_nested(made, reverse):
    def outer(c, x):
        return jax.lax.fori_loop(0, 5, lambda i, c: c + x, c), None

    def f(c):
        return jax.lax.scan(outer, c, jnp.arange(3.0), reverse=reverse)[0]

    observed(jax.jit(f), 1.0)
    assert max(bar.n for bar in made if bar.leave) == 3
    assert {bar.total for bar in made if not bar.leave} == {5}


@pytest.mark.parametrize("wrap", [jax.vmap, lambda f: lambda x: f(x[0])])
def test_while(made, wrap):
    def f(n):
        return jax.lax.while_loop(lambda i: i < n, lambda i: i + 1, 0)

    observed(jax.jit(wrap(f)), jnp.array([6, 2]))
    assert max(bar.n for bar in made) == 6


def test_a_short_loop_has_no_bar(made, monkeypatch):
    monkeypatch.setattr(loops, "LASTS", 60.0)
    observed(jax.jit(scan), 1.0)
    assert made == []


def test_inner_bars_come_below_outer_ones(made):
    late = []
    options = {"desc": "", "total": None, "unit": "it", "initial": 0}
    inner, outer = (loops._Late(late, depth, **options) for depth in (2, 1))
    inner.update(1)
    assert [bar.leave for bar in made] == [True, False]
    inner.close()
    outer.close()
    assert late == [] and all(bar.closed for bar in made)  # noqa: PT018


def test_switched_off(made, monkeypatch):
    monkeypatch.setenv("HOSTCALL_PROGRESS", "0")
    observed(jax.jit(scan), 1.0)
    assert made == []


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
    assert hc.observe is observe
