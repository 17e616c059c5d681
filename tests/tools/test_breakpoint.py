"""Debuggers that a compiled program opens: Python's in a call, and JAX's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest
from limits import PROGRAM_SECONDS

PROGRAM = """
import sys
import jax, jax.numpy as jnp
import hostcall as hc

SCALE = 3.0

def stop(x, tree):
    breakpoint()
    return None

def step(x):
    y = x * SCALE
    hc.call(stop, None, x, {"y": (y, "text")}, order="unordered", where=x > 1)
    return y + 1

f = jax.jit(step)
"""


@pytest.fixture
def pdb(tmp_path):
    """Runs a program with these lines as its stdin; returns what it printed."""

    def run(source, *lines, check=True):
        path = tmp_path / "program.py"
        path.write_text(source)
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHONBREAK")}
        done = subprocess.run(
            [sys.executable, str(path)],
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            text=True,
            timeout=PROGRAM_SECONDS,
            env={**env, "HOME": str(tmp_path), "NO_COLOR": "1"},  # no ~/.pdbrc
            cwd=tmp_path,
        )
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_the_names_are_those_of_the_function_and_where_says_when(pdb):
    source = PROGRAM + "print('result', f(0.0), f(2.0), f(4.0))\n"
    said = pdb(
        source,
        "p 'values', x, tree, SCALE, sorted(locals())",
        "continue",
        "p 'second', x",
        "continue",
    )
    assert "('values', array(2., dtype=float32), {'y': (array(6.," in said
    assert "3.0, ['tree', 'x'])" in said
    assert "('second', array(4., dtype=float32))" in said
    assert "result 1.0 7.0 13.0" in said


def test_quit_ends_the_program(pdb):
    source = PROGRAM + textwrap.dedent("""
        import bdb
        try:
            f(2.0).block_until_ready()
        except bdb.BdbQuit:
            print("quit it")
        """)
    if sys.version_info < (3, 14):  # there it ends the process
        assert "quit it" in pdb(source, "quit")


def test_the_action_of_a_watch(pdb):
    source = """
import jax, jax.numpy as jnp
import hostcall as hc

def body(c, _):
    y = jnp.log(c)
    hc.watch(y, action=lambda error: breakpoint(), also=c)
    return c - 1, y

f = jax.jit(lambda x: jax.lax.scan(body, x, None, length=4)[1])
print(f(2.5))
"""
    said = pdb(source, "p 'bad', error.values, error.also, error.step", "continue")
    assert "('bad', array(nan, dtype=float32), array(-0.5, dtype=float32), 3)" in said


def test_jaxs_own_debugger_on_this_engine(pdb):
    source = """
import jax, jax.numpy as jnp
import hostcall as hc

hc.patch_jax()

def look(x, y):
    jax.debug.breakpoint()

def step(x):
    y = jnp.sqrt(x)
    jax.lax.cond(jnp.isnan(y), look, lambda x, y: None, x, y)
    return y

print("result", jax.jit(step)(4.0), jax.jit(step)(-4.0))
jax.effects_barrier()
"""
    said = pdb(source, "p y", "up", "p x", "c")
    assert "Entering jdb" in said
    assert "Array(nan, dtype=float32)" in said
    assert "Array(-4., dtype=float32)" in said
    assert "result 2.0 nan" in said


def test_ctrl_c_in_the_debugger(start_python):
    """Ctrl-C while a debugger reads is Python's: it ends the program."""
    process = start_python(
        PROGRAM
        + textwrap.dedent("""
        import os
        # The signal ends the read, also if it comes just before.
        silent, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes)
        def hook():
            print("ready", flush=True)
            os.read(silent, 1)
        sys.breakpointhook = hook
        try:
            f(2.0).block_until_ready()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        print("after", f(0.0), flush=True)
        """)
    )
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PROGRAM_SECONDS)
    assert (out, process.returncode) == ("interrupted\nafter 1.0\n", 0), err
