"""XLA's C interface, as in the headers of the installed jaxlib."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import jax
import numpy as np

HERE = Path(__file__).parents[1]
NATIVE = HERE.parent / "native"
COMPILER = os.environ.get("CXX", "c++")
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE}"]
FLAGS += [f"-isystem{jax.ffi.include_dir()}"]


def test_the_code_that_talks_to_xla_compiles():
    """The wheel is built with the oldest headers; the user's jaxlib may have newer
    ones.
    """
    sources = [str(path) for path in sorted((NATIVE / "handlers").glob("*.cc"))]
    python = [f"-isystem{sysconfig.get_path('include')}", f"-isystem{np.get_include()}"]
    command = [COMPILER, *FLAGS, *python, "-fsyntax-only", *sources]
    subprocess.run(command, check=True)


def test_handlers_of_an_xla_that_has_less_or_more(tmp_path):
    """Runs tests/native/ffi_test.cc with the installed headers."""
    program = tmp_path / "ffi_test"
    source = HERE / "native" / "ffi_test.cc"
    command = [COMPILER, *FLAGS, "-O1", "-pthread", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([program], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("ffi: all held, of version 0.")
