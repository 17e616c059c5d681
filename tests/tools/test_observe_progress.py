"""`hc.observe(progress=True)`: bars of loops; and the command line."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc
from hostcall.tools.observing import observe


@pytest.fixture
def made(monkeypatch, undelayed):
    """The bars that tqdm draws, in a terminal."""

    class Bar:
        def __init__(self, desc, total, unit, initial, **options):
            self.desc, self.total, self.n, self.leave = desc, total, initial, True
            self.closed = False
            bars.append(self)

        def update(self, n):
            self.n += n

        def close(self):
            self.closed = True

    bars = []
    monkeypatch.setattr(pytest.importorskip("tqdm.auto"), "tqdm", Bar)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    return bars


@pytest.fixture
def slow(monkeypatch):
    """Each step seems to last a second."""
    seconds = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))


def body(c, x):
    return c * 0.5 + x, jnp.sin(c)


def scan(c):
    return jax.lax.scan(body, c, jnp.arange(7.0))[1].sum()


def observed(f, *args):
    expected = f(*args)
    with observe(progress=True):
        np.testing.assert_allclose(f(*args), expected, rtol=1e-6)


def test_scan(made, slow):
    observed(jax.jit(scan), 1.0)
    (bar,) = made
    assert bar.desc.startswith("scan test_observe_progress.py:")
    assert (bar.total, bar.n, bar.closed, bar.leave) == (7, 7, True, True)


def test_backward_pass(made, slow):
    observed(jax.jit(jax.grad(scan)), 1.0)
    forward, backward = made
    assert backward.desc == forward.desc + " backward"
    assert forward.n == backward.n == 7


@pytest.mark.parametrize("reverse", [False, True])
def test_nested(made, slow, reverse):
    def outer(c, x):
        return jax.lax.fori_loop(0, 5, lambda i, c: c + x, c), None

    def f(c):
        return jax.lax.scan(outer, c, jnp.arange(3.0), reverse=reverse)[0]

    observed(jax.jit(f), 1.0)
    assert max(bar.n for bar in made if bar.leave) == 3
    assert {bar.total for bar in made if not bar.leave} == {5}


@pytest.mark.parametrize("wrap", [jax.vmap, lambda f: lambda x: f(x[0])])
def test_while(made, slow, wrap):
    """The number of steps is not known, and is that of the row which goes on."""

    def until_the_bar_moves(i):
        return not any(bar.n >= 3 for bar in made)

    def f(n):
        def goes_on(i):
            more = hc.call(until_the_bar_moves, jax.ShapeDtypeStruct((), bool), i)
            return jnp.where(n > 2, more, i < n)

        return jax.lax.while_loop(goes_on, lambda i: i + 1, 0)

    with observe(progress=True):
        counts = jax.jit(wrap(f))(jnp.array([6, 2]))
    (bar,) = made
    assert (bar.total, bar.closed) == (None, True)
    assert 3 <= bar.n <= counts.max()
    assert counts.shape == () or counts[1] == 2


def test_a_short_loop_has_no_bar(made, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    observed(jax.jit(scan), 1.0)
    assert made == []


def test_inner_bars_come_below_outer_ones(made, monkeypatch):
    """Both loops look at the clock twice before the inner one has lasted."""
    looks = itertools.count(-3)
    monkeypatch.setattr(time, "perf_counter", lambda: max(0.0, next(looks)))

    def until_it_has_a_bar(t):
        return t == 2 and len(made) < 2

    def outer(c, t):
        goes_on = lambda i: hc.call(
            until_it_has_a_bar, jax.ShapeDtypeStruct((), bool), t + i * 0
        )
        return c + jax.lax.while_loop(goes_on, lambda i: i + 1, 0), None

    with observe(progress=True):
        jax.jit(lambda c: jax.lax.scan(outer, c, jnp.arange(4))[0])(0)
    assert [bar.leave for bar in made] == [True, False]
    assert all(bar.closed for bar in made)


def test_switched_off(made, slow, monkeypatch):
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


def arguments(tmp_path, options, argument):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return ["run", *options, str(program), argument]


def run(tmp_path, *options, argument="3"):
    command = [sys.executable, "-m", "hostcall"]
    command += arguments(tmp_path, options, argument)
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def run_in_fork(tmp_path, run_python):
    """`run` in a process that need not import JAX, for many runs of one test."""
    source = """
        import runpy
        runpy.run_module("hostcall", run_name="__main__", alter_sys=True)
    """

    def run_it(*options, argument="3"):
        return run_python(source, *arguments(tmp_path, options, argument), check=False)

    return run_it


def test_command_line(tmp_path):
    done = run(tmp_path, "--nans", "--values", "y", "--progress")
    assert done.returncode == 0, done.stderr
    assert "0.6931472" in done.stdout
    assert "y (program.py:6) = 2" in done.stderr


@pytest.mark.parametrize("name", ["values.csv", "values.jsonl"])
def test_command_line_writes_values_to_a_file(tmp_path, name):
    done = run(tmp_path, "--values", "y", "--to", str(tmp_path / name))
    assert done.returncode == 0, done.stderr
    text = (tmp_path / name).read_text()
    assert ('"y": 2.0' in text) == name.endswith("jsonl")
    assert text.splitlines()[-1].endswith(",2.0") == name.endswith("csv")


def test_command_line_goes_on(tmp_path, run_in_fork):
    done = run(tmp_path, "--nans", "--on-bad", "report", argument="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "result -inf\n"
    assert "log at program.py:7: 1" in done.stderr
    assert run_in_fork("--nans", "--no-infs", argument="1").stderr == ""
    assert "need --nans" in run_in_fork("--no-infs").stderr
    assert "--values NAME" in run_in_fork("--nans", "--to", "x.csv").stderr


def test_command_line_says_where_to_look(run_in_fork):
    """A line that `--only` does not name, or that `--ignore` does, is not looked at."""
    for place in ("program.py", "f", "program"):
        named = run_in_fork("--nans", "--only", place, argument="1")
        assert named.returncode == 1, named.stderr
        assert "program.py:7 in f" in named.stderr
        ignored = run_in_fork("--nans", "--ignore", place, argument="1")
        assert ignored.returncode == 0, ignored.stderr
        assert ignored.stdout == "result -inf\n"
    several = ("--only", "optax", "--only", "other.py")
    assert run_in_fork("--nans", *several, argument="1").returncode == 0
    values = run_in_fork("--values", "y", "--values", "z", "--ignore", "f")
    assert "y (program.py:6)" not in values.stderr
    refused = run_in_fork("--only", "program.py")
    assert refused.returncode == 2
    assert "need --nans, --progress or --values" in refused.stderr


def test_command_line_leaves_the_lines_of_the_program_whole(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("print(", "for _ in range(99): print("))
    command = [sys.executable, "-m", "hostcall", "run", "--values", "y", str(program)]
    done = subprocess.run([*command, "3"], capture_output=True, text=True, timeout=120)
    assert set(done.stdout.splitlines()) == {"result 0.6931472"}
    assert done.stderr.splitlines() == ["y (program.py:6) = 2."] * 99


def test_command_line_with_a_bad_value(tmp_path):
    done = run(tmp_path, "--nans", argument="1")
    assert done.returncode == 1
    assert "FloatingPointError: hostcall: log made the first bad value" in done.stderr
    assert "program.py:7 in f" in done.stderr
    assert done.stderr.startswith("Traceback")
    assert done.stderr.count("made the first bad value") == 1
    assert len(done.stderr.splitlines()) < 12
    assert hc.observe is observe
