"""`hc.breakpoint`: the debugger, its frame, and what it does to the program."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from limits import PROGRAM_SECONDS

import hostcall as hc
from hostcall.errors import SpecError

PROGRAM = """
import sys
import jax, jax.numpy as jnp
import hostcall as hc

SCALE = 3.0

def inner(x):
    y = x * SCALE
    hc.breakpoint(x=x, tree={"y": (y, "text")}, where=x > 1)     # stops here
    return y

def outer(x):
    z = inner(x)                                                 # called here
    return z + 1

f = jax.jit(outer)
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


def test_the_frame_has_the_values_and_the_lines(pdb):
    source = PROGRAM + "print('result', f(0.0), f(2.0), f(4.0))\n"
    said = pdb(
        source,
        "p 'values', x, tree, SCALE, sorted(locals())",
        "list",
        "p 'type', type(x)",
        "!x += 10",
        "p 'changed', x",
        "up",
        "p 'above', SCALE, sorted(locals())",
        "list",
        "continue",
        "p 'second', x",
        "continue",
    )
    assert "program.py(10)inner()\n-> hc.breakpoint(x=x, " in said
    assert (
        "('values', array(2., dtype=float32), {'y': (array(6., dtype=float32)," in said
    )
    assert "3.0, ['tree', 'x'])" in said
    assert "('type', <class 'numpy.ndarray'>)" in said
    assert " 10  ->\t    hc.breakpoint(x=x" in said
    assert "program.py(14)outer()" in said
    assert " 14  ->\t    z = inner(x)" in said
    assert "('above', 3.0, [])" in said
    assert "('second', array(4., dtype=float32))" in said
    assert "result 1.0 7.0 13.0" in said  # what the debugger changes is a copy


def test_where_shows_the_lines_of_the_tracing(pdb):
    said = pdb(PROGRAM + "f(2.0)\n", "where", "continue")
    frames = [
        line.split("/")[-1] for line in said.splitlines() if "program.py(" in line
    ]
    assert frames[-3:] == [
        "program.py(18)<module>()",
        "program.py(14)outer()",
        "program.py(10)inner()",
    ]


def test_quit_ends_the_program(pdb):
    source = PROGRAM + textwrap.dedent("""
        import bdb
        try:
            f(2.0).block_until_ready()
        except bdb.BdbQuit as error:
            print("quit:", error)
        print("after", f(0.0))
        """)
    said = pdb(source, "quit")
    assert "quit: the debugger that hostcall opened at " in said
    assert "program.py:10 in inner was quit, so the program ends here." in said
    assert "after 1.0" in said


def test_one_debugger_at_a_time(pdb):
    """Four devices stop in turns; a quit ends those that wait, too."""
    source = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import bdb
import jax, jax.numpy as jnp
import hostcall as hc

mesh = jax.make_mesh((4,), ("x",))
spec = jax.sharding.PartitionSpec("x")

def program(x):
    hc.breakpoint(x=x)
    return x + 1

f = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec))
x = jax.device_put(jnp.arange(4.0), jax.NamedSharding(mesh, spec))
total = float(f(x).sum())  # before the print, which may write "sum" first
print("sum", total)
try:
    with hc.reraise():
        f(x).block_until_ready()
except bdb.BdbQuit as error:
    print("quit")
"""
    stops = [line for _ in range(4) for line in ("p 'x', x", "continue")]
    said = pdb(source, *stops, "quit")
    assert said.count("program.py(12)program()\n") == 5, said
    assert {f"('x', array([{i}.]" in said for i in range(4)} == {True}
    assert said.index("sum 10.0") < said.index("quit\n")


def test_rows_that_take_no_branch_do_not_stop(pdb):
    source = """
import jax, jax.numpy as jnp
import hostcall as hc

def f(x):
    wanted = x > 0
    def branch(x):
        hc.breakpoint(x=x, where=wanted)
        return -x
    return jax.lax.cond(wanted, branch, lambda x: x, x)

print(jax.jit(jax.vmap(f))(jnp.array([1.0, -2.0, 3.0])))
"""
    said = pdb(source, "p 'row', x", "continue", "p 'row', x", "continue")
    assert said.count("('row', array") == 2
    assert "array(-2." not in said
    assert "[-1. -2. -3.]" in said


def test_on_a_thread_while_the_main_thread_waits(pdb):
    source = PROGRAM + textwrap.dedent("""
        import concurrent.futures, threading
        big = jnp.ones((64, 64))

        @jax.jit
        def slow(x):
            for _ in range(20):
                x = jnp.tanh(x @ big)
            y = hc.call(stops, jax.ShapeDtypeStruct((), x.dtype), x[0, 0])
            return y + x.sum()

        def stops(v):
            print("main:", threading.current_thread() is threading.main_thread())
            return v if g(v) is None else v

        def g(v):
            f(2.0).block_until_ready()

        slow(big).block_until_ready()
        print("done")
        """)
    said = pdb(source, "p 'value', x", "continue")
    assert "('value', array(2.," in said
    assert "done" in said


def test_watch_opens_it_too(pdb):
    source = """
import jax, jax.numpy as jnp
import hostcall as hc

def body(c, _):
    y = jnp.log(c)
    hc.watch(y, action="breakpoint", also=c)
    return c - 1, y

f = jax.jit(lambda x: jax.lax.scan(body, x, None, length=4)[1])
print(f(2.5))
"""
    said = pdb(
        source,
        "p 'bad', values, also, error.step",
        "continue",
    )
    assert "hostcall: x is not finite at step 3" in said
    assert "program.py(7)body()" in said
    assert "('bad', array(nan, dtype=float32), array(-0.5, dtype=float32), 3)" in said


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


NOTEBOOK = (
    # Beside debugpy, the kernel's own hook waits for an IDE, and opens nothing here.
    "import sys, IPython.core.debugger\n"
    "sys.breakpointhook = IPython.core.debugger.set_trace",
    "import jax, jax.numpy as jnp, hostcall as hc",
    "def step(x):\n    y = x * 2\n    hc.breakpoint(x=x, y=y)\n    return y + 1\n"
    "f = jax.jit(step)",
    "print('result', f(4.0))",
    "import bdb\ntry:\n    f(5.0).block_until_ready()\n"
    "except bdb.BdbQuit:\n    print('quit')",
)


@pytest.mark.filterwarnings("ignore")  # of the packages that run the kernel
def test_in_a_notebook(monkeypatch, tmp_path):
    """A notebook's kernel opens its own debugger, which asks the front end for lines.

    nbclient answers no such question, so the test is the front end.
    """
    from jupyter_client.manager import start_new_kernel

    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    lines, said = iter(["p 'here', x, y", "where", "continue", "quit"]), []
    # ipykernel has installed the kernel "python3", which runs this Python.
    manager, client = start_new_kernel(startup_timeout=PROGRAM_SECONDS)
    try:
        for cell in NOTEBOOK:
            reply = client.execute_interactive(
                cell,
                allow_stdin=True,
                stdin_hook=lambda message: client.input(next(lines)),
                output_hook=lambda message: said.append(message["content"]),
                timeout=PROGRAM_SECONDS,
            )
            assert reply["content"]["status"] == "ok", reply["content"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    text = "".join(content.get("text", "") for content in said)
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "('here', array(4., dtype=float32), array(8., dtype=float32))" in text
    assert "hc.breakpoint(x=x, y=y)" in text
    assert "result 9.0" in text
    assert "quit" in text.splitlines()  # the log may come after it
    assert next(lines, None) is None


# --- In this process --------------------------------------------------------------------


@pytest.fixture
def stops(monkeypatch):
    """What a debugger finds: the names in its frame, for each stop."""
    found = []

    def hook():
        found.append(dict(sys._getframe(1).f_locals))

    monkeypatch.setattr(sys, "breakpointhook", hook)
    return found


def test_the_hook_is_the_one_of_the_moment(stops):
    def f(x):
        hc.breakpoint(x=x, text="hello", number=3)
        return x + 1

    assert jax.jit(f)(1.0) == 2
    jax.effects_barrier()
    (names,) = stops
    assert sorted(names) == ["number", "text", "x"]
    assert (float(names["x"]), names["text"], names["number"]) == (1, "hello", 3)
    f(5.0)  # outside of a compiled program
    assert float(stops[1]["x"]) == 5


def test_results_are_the_same_bits(stops, optimized):
    def f(x, show):
        def body(c, i):
            c = jnp.sin(c) * 1.1
            if show:
                hc.breakpoint(c=c, where=i == 2)
            return c, c

        return jax.lax.scan(body, x, jnp.arange(6))[1].sum()

    for program in (lambda f: f, jax.grad, lambda f: jax.grad(jax.checkpoint(f))):
        plain, shown = (
            np.asarray(jax.jit(program(lambda x, on=on: f(x, on)))(0.3)).tobytes()
            for on in (False, True)
        )
        jax.effects_barrier()
        assert shown == plain
        assert len(stops) == 1
        stops.clear()


def test_an_error_of_the_debugger_ends_the_program(monkeypatch):
    def hook():
        raise OSError("no terminal")

    monkeypatch.setattr(sys, "breakpointhook", hook)
    f = jax.jit(lambda x: (hc.breakpoint(x=x), x + 1)[1])
    with pytest.raises(OSError, match="no terminal"), hc.reraise():
        f(1.0)


def test_where_is_a_bool():
    with pytest.raises(SpecError, match="where"):
        hc.breakpoint(x=1.0, where=jnp.ones(2))
