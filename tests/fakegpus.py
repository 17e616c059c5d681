"""`pytest --platform fakegpu`: XLA's CUDA runtime on a driver of this repository.

XLA's own runtime for GPUs (the packages jax-cuda12-pjrt and jax-cuda12-plugin) runs over
tests/fakegpu, a libcuda.so.1 that takes the host's memory for the device's. Copies, events,
host functions and CUDA graphs are real there. XLA's kernels are run by an interpreter. What it
can't run is counted and refused, so a test whose programs launch such a kernel is "not judged".
A test that breaks a rule of CUDA fails.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src import hardware_utils

DEVICES = 4
PACKAGES = ("jax-cuda12-pjrt", "jax-cuda12-plugin")
_BESIDE = (
    *("libnvidia-ml.so.1", "libcudart.so.12", "libcublas.so.12"),
    *("libcusolver.so.11", "libcusparse.so.12", "libcufft.so.11"),
)
# The older compilers want it for every program.
_BESIDE_OLD = ("libcudnn.so.9",)
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
    "--xla_force_host_platform_device_count=4",
    "--xla_gpu_enable_libnvptxcompiler=false",
    "--xla_gpu_enable_libnvjitlink=false",
    "--xla_gpu_enable_triton_gemm=false",
    "--xla_gpu_enable_cub_radix_sort=false",
    # The driver has no conditional nodes of graphs: conditions and loops are not recorded.
    "--xla_gpu_enable_command_buffer=-CONDITIONAL,-WHILE",
    # If one device of a program fails before the others' collectives, XLA lets these wait
    # for it for ever. This way the process ends, and says which program waited.
    "--xla_gpu_nccl_termination_timeout_seconds=60",
    # Matrix products of fewer elements are kernels of XLA's, not cuBLAS's.
    "--xla_gpu_gemm_rewrite_size_threshold=1000000000000",
)
# Arrays in memory of cuMemAlloc, whose bounds the driver knows to the byte. XLA's older
# runtimes take virtual memory only, and end the process for a flag that they don't know.
_NEWER_FLAGS = ("--xla_gpu_experimental_vmm_disabled=true",)
_IS_OLD = jax.__version_info__ < (0, 12)


def missing() -> str | None:
    """Why this platform can't be used; None if it can."""
    if sys.platform != "linux":
        return "XLA's CUDA runtime is for Linux"
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
    for name in ("fakePinnedBytes", "fakeDeviceBytes"):
        getattr(driver, name).restype = ctypes.c_size_t
    driver.fakeStreamCreate.restype = ctypes.c_void_p
    driver.fakeStreamCreateOn.restype = ctypes.c_void_p
    for name in ("fakeCount", "fakeKernels", "fakeLaunches", "fakeGraphLaunches"):
        getattr(driver, name).restype = ctypes.c_long
    return driver


def _libdevice() -> Path | None:
    """NVIDIA's mathematical functions, as code for LLVM: the folder `nvvm` of a toolkit.

    Kernels that call them are not compiled without it.
    """
    spec = importlib.util.find_spec("nvidia")
    found = (
        [Path(path) / "cuda_nvcc" for path in spec.submodule_search_locations]
        if spec
        else []
    )
    found += [
        Path(os.environ[name])
        for name in ("CUDA_HOME", "CUDA_PATH")
        if name in os.environ
    ]
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
    flags = [*_FLAGS, data_folder, *(() if _IS_OLD else _NEWER_FLAGS)]
    os.environ["XLA_FLAGS"] = " ".join(flags)
    if (libdevice := _libdevice()) is not None:
        link = assembler / "nvvm"
        if not link.is_symlink() or link.readlink() != libdevice:
            link.unlink(missing_ok=True)
            link.symlink_to(libdevice)
    for name in (*_BESIDE, *(_BESIDE_OLD if _IS_OLD else ())):
        ctypes.CDLL(str(folder / name))
    driver = opened(folder / "libcuda.so.1")
    ctypes.CDLL(str(folder / "libnccl.so.2"))
    hardware_utils.has_visible_nvidia_gpu = lambda: True  # JAX looks for device files
    return driver


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
    """Takes the word of no test whose programs launched what can't be run here."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self.driver = driver
        self._before = 0
        self._missing_before: Counter[str] = Counter()
        self._judged = False
        self._of_workers: Counter[str] = Counter()

    def missing(self) -> Counter[str]:
        """What could not be run so far: instructions and libraries, with how often."""
        lines = [
            line.split(" ", 1)
            for line in self.driver.fakeMissing().decode().splitlines()
        ]
        return Counter({what: int(count) for count, what in lines})

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._before = self.driver.fakeKernels()
        self._missing_before = self.missing()
        self._judged = False

    def launched(self) -> int:
        """How many kernels the test's programs launched so far that can't be run."""
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
                missing = self.missing() - self._missing_before
                why = f"not judged: {', '.join(missing)}"
                report.longrepr = (str(item.path), None, why)
        elif launched and self._judged:
            report.outcome = "failed"
            report.longrepr = "a kernel was launched after the test had ended"
        elif launched:  # what is left is the refused program's
            report.outcome, report.longrepr = "passed", None
        self._judged |= report.when == "call" and not launched
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["missing"] = dict(self.missing())

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._of_workers.update(getattr(node, "workeroutput", {}).get("missing", {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        missing = self.missing() + self._of_workers
        for what, count in missing.most_common():
            terminalreporter.write_line(f"can't be run here: {what} ({count} times)")


def status(report: Any) -> tuple[str, str, str] | None:
    """For pytest_report_teststatus: a test that launched a kernel has not passed."""
    if isinstance(report, pytest.TestReport) and hasattr(report, "not_judged"):
        return "not judged", "k", "NOT JUDGED"
    return None
