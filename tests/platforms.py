"""Where the tests run: `pytest --platform cpu` (without more), `staged` or `cuda`.

staged  The handlers of CUDA serve XLA's CPU runtime, on tests/native/fake_cuda.cc: a
        driver that takes the host's memory for a device's, with streams that are
        threads. All values go through pinned memory, as on a GPU.
cuda    A machine with NVIDIA GPUs. Tests that need more devices than there are skip.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

PLATFORMS = ("cpu", "staged", "cuda")
_streams: list[int] = []


def fake_driver(folder: Path) -> Path:
    """Builds the fake driver."""
    built = folder / "fake_cuda.so"
    source = Path(__file__).parent / "native" / "fake_cuda.cc"
    flags = ["-std=c++17", "-O1", "-pthread", "-shared", "-fPIC", "-fvisibility=hidden"]
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *flags, str(source), "-o", str(built)], check=True)
    return built


def set_up(platform: str) -> None:
    """Before JAX is used."""
    if platform == "cuda":
        os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")
    if platform != "staged":
        return
    folder = tempfile.TemporaryDirectory()
    driver = fake_driver(Path(folder.name))
    os.environ["HOSTCALL_CUDA_DRIVER"] = str(driver)
    use_fake_driver(driver)
    folder.cleanup()  # it is loaded


def why_not(item: Any, few_devices: bool) -> str | None:
    """Why a test means nothing on another platform than the CPU; None: it does."""
    if item.path.name in ("test_buffer_callback.py", "test_buffer_views.py"):
        return "reads Buffers with NumPy (test_cuda.py and test_gpu.py have others)"
    if "run_python" in item.fixturenames:
        return "runs in a process of its own, on the CPU"
    if item.name == "test_a_million_taps_in_a_scan":
        return "copies and streams for each of a million taps take minutes"
    if few_devices:
        source = inspect.getsource(item.function)
        if any(word in source for word in ("devices()", "grid()", "line()", "mesh")):
            return "needs four devices"
    return None


def use_fake_driver(driver: Path) -> ctypes.CDLL:
    from hostcall import _handlers, _native

    library = ctypes.CDLL(str(driver))
    library.fakeStreamCreate.restype = ctypes.c_void_p
    _streams.extend(library.fakeStreamCreate() for _ in range(8))
    assert not _native.cuda_missing()  # opens it, by the environment
    _native.set_streams_for_tests(_streams)
    _handlers.kind_on_cpu = "staged "
    return library
