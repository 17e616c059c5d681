"""The floors under every callback: handlers that do less than a callback must."""

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
import numpy as np

TARGET = "hostcall_benchmarks_"


def empty_call(result: Any) -> Callable[..., Any]:
    """A call that writes four bytes, and does not enter Python."""
    _library()
    return jax.ffi.ffi_call(TARGET + "Empty", result, has_side_effect=True)


def raw_call(result: Any, function: Callable[[], Any]) -> Callable[..., Any]:
    """A call of a function without arguments, whose results are not written.

    The process has one such function: the last one.
    """
    _library().SetRaw(function)
    return jax.ffi.ffi_call(TARGET + "Raw", result, has_side_effect=True)


def least_call(result: Any, function: Callable[[Any], Any]) -> Callable[..., Any]:
    """A call of a function of one float, with its array, its result and JAX's default
    device; nothing is told about it, and nothing but the result is checked.

    The process has one such function: the last one.
    """
    setting = jax.default_device
    of = type(setting)
    _library().SetLeast(
        function, setting, of.swap_local, of.set_local, jax.devices("cpu")[0]
    )
    return jax.ffi.ffi_call(TARGET + "Least", result, has_side_effect=True)


@functools.cache
def _library() -> ctypes.PyDLL:
    """Compiles the handler, which takes a second, and registers it with XLA."""
    source = Path(__file__).with_name("raw_handler.cc")
    compiler = os.environ.get("CXX", "c++")
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden"]
    if os.uname().sysname == "Darwin":  # Python's symbols are the process's
        flags += ["-undefined", "dynamic_lookup"]
    paths = [jax.ffi.include_dir(), np.get_include(), sysconfig.get_path("include")]
    flags += [f"-isystem{path}" for path in paths]
    with tempfile.TemporaryDirectory() as folder:
        built = os.path.join(folder, "raw_handler.so")
        subprocess.run([compiler, *flags, str(source), "-o", built], check=True)
        library = ctypes.PyDLL(built)  # it stays loaded without its file
    for name, arguments in (("SetRaw", 1), ("SetLeast", 5)):
        setter = getattr(library, name)
        setter.argtypes, setter.restype = [ctypes.py_object] * arguments, None
    for name in ("Empty", "Raw", "Least"):
        handler = jax.ffi.pycapsule(getattr(library, f"Execute{name}"))
        jax.ffi.register_ffi_target(TARGET + name, handler, platform="cpu")
    return library
