"""`pytest --platform fakegpu`: XLA's CUDA runtime on a driver of this repository.

XLA's own runtime for GPUs (the packages jax-cuda12-pjrt and jax-cuda12-plugin) runs over
tests/fakegpu, a libcuda.so.1 that takes the host's memory for the device's. Copies, events,
host functions and CUDA graphs are real there. Kernels are not: each is counted and refused,
so a test whose programs launch one is "not judged". A test that breaks a rule of CUDA fails.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import core, hardware_utils

DEVICES = 4
PACKAGES = ("jax-cuda12-pjrt", "jax-cuda12-plugin")
_FOLDER = Path(__file__).parent / "fakegpu"
_BUILT = _FOLDER.parents[1] / "build" / "fakegpu"
_SETTINGS = {
    "JAX_PLATFORMS": "cuda,cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # it looks for cuBLAS, cuDNN and others
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    # One block for each array, so that the driver knows the bounds of each.
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "FAKEGPU_DEVICES": str(DEVICES),
}
# XLA makes all kernels itself, and gives the driver their text (PTX). So it takes no kernel
# that its authors compiled, or a library has.
_FLAGS = (
    "--xla_gpu_autotune_level=0",
    "--xla_gpu_experimental_vmm_disabled=true",
    "--xla_force_host_platform_device_count=4",
    "--xla_gpu_enable_libnvptxcompiler=false",
    "--xla_gpu_enable_libnvjitlink=false",
    "--xla_gpu_enable_triton_gemm=false",
    "--xla_gpu_enable_cub_radix_sort=false",
    # Matrix products of fewer elements are kernels of XLA's, not cuBLAS's.
    "--xla_gpu_gemm_rewrite_size_threshold=1000000000000",
)


def missing() -> str | None:
    """Why this platform can't be used; None if it can."""
    if sys.platform != "linux":
        return "XLA's CUDA runtime is for Linux"
    if jax.__version_info__ < (0, 12):
        return (
            f"XLA's CUDA runtime of jax {jax.__version__} finds no GPU on this driver"
        )
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        return (
            f"needs {' and '.join(PACKAGES)} {jax.__version__}: `make test-gpu-runtime`"
            " gets them"
        )
    for name in PACKAGES:
        if metadata.version(name) != jax.__version__:
            return f"{name} is {metadata.version(name)}, and jax {jax.__version__}"
    return None


def built(target: str) -> Path:
    """Builds what `make target` makes of tests/fakegpu. Returns the folder."""
    make = ["make", "--silent", "-C", str(_FOLDER), target]
    subprocess.run(make, check=True)
    return _BUILT


def opened(path: Path) -> ctypes.CDLL:
    """Loads the driver. Its functions for tests are in tests/fakegpu/controls.cc."""
    driver = ctypes.CDLL(str(path))
    for name in ("fakeTakeFaults", "fakeMissing"):
        getattr(driver, name).restype = ctypes.c_char_p
    driver.fakePinnedBytes.restype = ctypes.c_size_t
    driver.fakeStreamCreate.restype = ctypes.c_void_p
    for name in ("fakeCount", "fakeKernels", "fakeLaunches", "fakeGraphLaunches"):
        getattr(driver, name).restype = ctypes.c_long
    return driver


def _libdevice() -> Path | None:
    """NVIDIA's mathematical functions, as code for LLVM: the folder `nvvm` of a toolkit.

    Kernels that call them are not compiled without it.
    """
    spec = importlib.util.find_spec("nvidia")
    found = [Path(path) / "cuda_nvcc" for path in spec.submodule_search_locations] if spec else []
    found += [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    found += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"))]
    for folder in found:
        if (folder / "nvvm/libdevice/libdevice.10.bc").exists():
            return (folder / "nvvm").resolve()
    return None


def start() -> ctypes.CDLL:
    """Starts the driver in this process. Must run before JAX is used."""
    folder = built("all")
    assembler = folder / "cuda"
    os.environ.update(_SETTINGS)
    os.environ["PATH"] = f"{assembler / 'bin'}{os.pathsep}{os.environ['PATH']}"
    data_folder = f'--xla_gpu_cuda_data_dir="{assembler}"'
    os.environ["XLA_FLAGS"] = " ".join([*_FLAGS, data_folder])
    if (libdevice := _libdevice()) is not None:
        link = assembler / "nvvm"
        if not link.is_symlink() or link.readlink() != libdevice:
            link.unlink(missing_ok=True)
            link.symlink_to(libdevice)
    for name in ("libnvidia-ml.so.1", "libcudart.so.12", "libcublas.so.12"):
        ctypes.CDLL(str(folder / name))
    driver = opened(folder / "libcuda.so.1")
    hardware_utils.has_visible_nvidia_gpu = lambda: True  # JAX looks for device files
    return driver


def make_arrays_on_the_host() -> None:
    """Arrays that tests make outside of programs come from the CPU, by a copy.

    On a GPU each is a kernel's, and the test would not be judged for that alone.
    """
    for name in ("arange", "full", "linspace", "ones", "zeros"):
        setattr(jnp, name, _on_the_host(getattr(jnp, name)))


def _on_the_host(make: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> jax.Array:
        if not core.trace_state_clean():
            return make(*args, **kwargs)
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            value = np.asarray(make(*args, **kwargs))
        return jnp.asarray(value)

    return made


class Rules:
    """Fails each test in which a rule of CUDA was broken, whatever else it found."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self.driver = driver

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # it has the last word
    def pytest_runtest_makereport(
        self,
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if faults := self.driver.fakeTakeFaults().decode():
            report.outcome = "failed"
            report.longrepr = f"rules of CUDA were broken:\n{faults}"
        return report


class Judge:
    """Takes the word of no test whose programs launched a kernel."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self.driver = driver
        self._before = 0
        self._judged = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._before = self.driver.fakeKernels()
        self._judged = False

    def launched(self) -> int:
        """How many kernels the test's programs launched so far."""
        return self.driver.fakeKernels() - self._before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        launched = self.launched()
        if launched and report.when != "teardown":
            if not report.skipped and (report.when == "call" or report.failed):
                report.outcome, report.not_judged = "skipped", True
                why = f"its programs launched kernels ({launched})"
                report.longrepr = (str(item.path), None, why)
        elif launched and self._judged:
            report.outcome = "failed"
            report.longrepr = "a kernel was launched after the test had ended"
        elif launched:  # what is left is the refused program's
            report.outcome, report.longrepr = "passed", None
        self._judged |= report.when == "call" and not launched
        return report


def status(report: Any) -> tuple[str, str, str] | None:
    """For pytest_report_teststatus: a test that launched a kernel has not passed."""
    if isinstance(report, pytest.TestReport) and hasattr(report, "not_judged"):
        return "not judged", "k", "NOT JUDGED"
    return None
