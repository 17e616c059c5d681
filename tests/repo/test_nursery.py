"""A program in a fork of the nursery does what it does in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import nursery
import pytest


@pytest.fixture(autouse=True)
def served(pytestconfig):
    if pytestconfig.getoption("--platform") != "cpu" or not nursery.serves({}, {}):
        pytest.skip("programs have processes of their own here")


def test_no_file_of_tests_changes_what_programs_read_at_their_start():
    """Else each program of the whole suite imports JAX anew, half a second of a core."""
    assert nursery.serves(os.environ)


PROGRAMS = {
    "prints": "import sys; print(sys.argv, __name__, sorted(globals())); print(1, file=sys.stderr)",
    "raises": "def f():\n    raise ValueError(3)\nf()",
    "is interrupted": "raise KeyboardInterrupt",
    "exits": "import sys; sys.exit(7)",
    "exits with a word": "import sys; sys.exit('no')",
    "is killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "ends": """
import atexit, threading
atexit.register(print, "at the end")
threading.Thread(target=lambda: print("a thread")).start()
""",
    "reads variables": "import os; print(os.getcwd(), os.environ['A'], 'B' in os.environ)",
    "has devices": "import jax; print(jax.devices())",
}


@pytest.mark.parametrize("source", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_end_alike(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("B", "not in the program")
    env = {n: v for n, v in os.environ.items() if n != "B"} | {"A": "given"}
    env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
    command = [sys.executable, "-c", source, "one", "two"]
    want = subprocess.run(command, capture_output=True, text=True, env=env, timeout=180)
    assert nursery.serves(env)
    got = nursery.run(command, env, 180)
    assert (got.returncode, got.stdout) == (want.returncode, want.stdout)
    # Since Python 3.13, tracebacks show the lines of a program that `-c` gives.
    lines = lambda text: [line for line in text.splitlines() if not line[:4].isspace()]
    assert lines(got.stderr) == lines(want.stderr)


def test_what_is_read_at_the_start_needs_a_process_of_its_own():
    env = {**os.environ, "XLA_FLAGS": "", "HOSTCALL_EXIT_TIMEOUT": "1"}
    assert nursery.serves(env)
    for name in ("PYTHONHASHSEED", "JAX_ENABLE_X64", "HOSTCALL_PATCH", "LD_PRELOAD"):
        assert not nursery.serves({**env, name: "1"})


def test_a_program_has_one_thread_and_no_other_files():
    source = "import os; print(*map(len, map(os.listdir, ['/proc/self/task', '/proc/self/fd'])))"
    done = nursery.run([sys.executable, "-c", source], os.environ, 180)
    assert done.stdout.split() == ["1", "4"], done  # the last is what listdir opens
