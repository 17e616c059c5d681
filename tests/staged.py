"""The engine's handlers for CUDA in XLA's CPU runtime, for machines without XLA's packages.

The handlers are wrapped by native/staged.cc, and get a driver that has the code of
tests/fakegpu without its kernels: its device memory is host memory, its streams are threads.
All values go through pinned memory, as on a GPU. The tests of runtime/test_cuda.py, and of
jobs of several processes, run in this way with every jax of the range.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import fakegpus
import jax

STREAMS: list[int] = []


def compiled(source: str, folder: Path, *includes: str) -> Path:
    """Compiles a file of tests/native into a folder. Returns the library's path."""
    library = folder / Path(source).with_suffix(".so").name
    flags = ["-std=c++17", "-O1", "-pthread", "-shared", "-fPIC", "-fvisibility=hidden"]
    if sys.platform == "darwin":  # Python's symbols are the process's
        flags += ["-undefined", "dynamic_lookup"]
    flags += [f"-isystem{path}" for path in includes]
    compiler = os.environ.get("CXX", "c++")
    path = Path(__file__).parent / "native" / source
    subprocess.run([compiler, *flags, str(path), "-o", str(library)], check=True)
    return library


def built(folder: Path) -> tuple[Path, Path]:
    """Compiles the driver, and the handlers that use it in XLA's CPU runtime."""
    paths = jax.ffi.include_dir(), sysconfig.get_path("include")
    return fakegpus.built("staged") / "staged_driver.so", compiled(
        "staged.cc", folder, *paths
    )


def start() -> ctypes.CDLL:
    """Builds both for this process alone, and uses them. Returns the driver."""
    with tempfile.TemporaryDirectory() as folder:  # the libraries stay loaded
        return use(*built(Path(folder)))


def use(driver: Path, handlers: Path) -> ctypes.CDLL:
    """Imports hostcall, with its handlers for GPUs in XLA's CPU runtime.

    They are registered in place of those for CPUs, whose plans they get.
    """
    # For this process, not for those that tests start.
    os.environ["HOSTCALL_CUDA_DRIVER"] = str(driver)
    given: list[tuple[str, Any, str]] = []
    register = jax.ffi.register_ffi_target
    jax.ffi.register_ffi_target = lambda name, made, platform: given.append(
        (name, made, platform)
    )
    try:
        from hostcall import _jax, _native
        from hostcall._engine import targets  # noqa: F401  (it registers)
    finally:
        jax.ffi.register_ffi_target = register
    assert not _native.cuda_missing()  # opens the driver that the environment names
    library, wrapper = fakegpus.opened(driver), ctypes.CDLL(str(handlers))
    wrapper.Wrap.restype = ctypes.c_void_p
    STREAMS.extend(library.fakeStreamCreate() for _ in range(8))
    wrapper.SetUp(
        (ctypes.c_void_p * len(STREAMS))(*STREAMS),
        len(STREAMS),
        library.cuStreamSynchronize,
        library.fakeFinishAll,
        _pointer(_native.handlers(_jax.XLA_INTERFACE)["type"]["type_id"]),
    )
    on_cpu = {name: made for name, made, platform in given if platform == "cpu"}
    on_gpu = {name: made for name, made, platform in given if platform == "CUDA"}
    # The CPU runtime has no command buffers, so nothing is recorded.
    on_gpu["hostcall_buffer_graph"] = on_gpu["hostcall_buffer"]
    for number, (name, made) in enumerate(on_cpu.items()):
        inner = _pointer(on_gpu[name]["execute"])
        outer = wrapper.Wrap(number, inner)
        execute = jax.ffi.pycapsule(ctypes.c_void_p(outer))
        register(name, {**made, "execute": execute}, platform="cpu")
    return library


def _pointer(capsule: Any) -> ctypes.c_void_p:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    return ctypes.c_void_p(get(capsule, name(capsule)))
