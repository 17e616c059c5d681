"""XLA's C interface, as the headers of the jaxlib that is installed have it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import jax

HERE = Path(__file__).parent


def test_handlers_of_an_xla_that_has_less_or_more(tmp_path):
    """tests/native/ffi_test.cc; at both ends of the range, so with both ends' headers."""
    program = tmp_path / "ffi_test"
    flags = ["-std=c++17", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror"]
    folders = [f"-I{HERE.parent / 'native'}", f"-isystem{jax.ffi.include_dir()}"]
    compiler = os.environ.get("CXX", "c++")
    source = str(HERE / "native" / "ffi_test.cc")
    subprocess.run([compiler, *flags, *folders, source, "-o", str(program)], check=True)
    done = subprocess.run([program], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("ffi: all held, of version 0.")
