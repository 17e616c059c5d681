"""The floor under every callback: a handler that only enters Python."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

TARGET = "hostcall_benchmarks_raw"


def raw_call(result: Any, function: Callable[[], Any]) -> Callable[..., Any]:
    """A call of a function without arguments, whose results are not written.

    The process has one such function: the last one.
    """
    _library().SetFunction(function)
    return jax.ffi.ffi_call(TARGET, result, has_side_effect=True)


@functools.cache
def _library() -> ctypes.PyDLL:
    """Compiles the handler, which takes a second, and registers it with XLA."""
    source = Path(__file__).with_name("raw_handler.cc")
    compiler = os.environ.get("CXX", "c++")
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden"]
    if os.uname().sysname == "Darwin":  # Python's symbols are the process's
        flags += ["-undefined", "dynamic_lookup"]
    paths = [jax.ffi.include_dir(), sysconfig.get_path("include")]
    flags += [f"-isystem{path}" for path in paths]
    with tempfile.TemporaryDirectory() as folder:
        built = os.path.join(folder, "raw_handler.so")
        subprocess.run([compiler, *flags, str(source), "-o", built], check=True)
        library = ctypes.PyDLL(built)  # it stays loaded without its file
    library.SetFunction.argtypes = [ctypes.py_object]
    library.SetFunction.restype = None
    handler = jax.ffi.pycapsule(library.ExecuteRaw)
    jax.ffi.register_ffi_target(TARGET, handler, platform="cpu")
    return library
