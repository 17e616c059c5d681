"""Where the tests run: `pytest --platform cpu` (the default), `staged`, `fakegpu` or `cuda`.

cpu     Programs run on XLA's CPU runtime, with the handlers for CPUs.
staged  Programs run on XLA's CPU runtime, with the handlers for CUDA (wrapped by
        tests/native/staged.cc) on the driver of tests/fakegpu: its device memory is host
        memory, its streams are threads. All values go through pinned
        memory, as on a GPU.
fakegpu Programs run on XLA's CUDA runtime, on a driver of this repository (fakegpus.py).
cuda    Programs run on NVIDIA GPUs. Tests that need more devices are skipped.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakegpus
import jax
import pytest
from jax._src import dispatch

PLATFORMS = ("cpu", "staged", "fakegpu", "cuda")
STREAMS: list[int] = []


def compiled(source: str, folder: Path, *includes: str) -> Path:
    """Compiles a file of tests/native into a folder. Returns the library's path."""
    built = folder / Path(source).with_suffix(".so").name
    flags = ["-std=c++17", "-O1", "-pthread", "-shared", "-fPIC", "-fvisibility=hidden"]
    if sys.platform == "darwin":  # Python's symbols are the process's
        flags += ["-undefined", "dynamic_lookup"]
    flags += [f"-isystem{path}" for path in includes]
    compiler = os.environ.get("CXX", "c++")
    path = Path(__file__).parent / "native" / source
    subprocess.run([compiler, *flags, str(path), "-o", str(built)], check=True)
    return built


def staged(folder: Path) -> tuple[Path, Path]:
    """Compiles the driver, and the handlers that use it in XLA's CPU runtime."""
    paths = jax.ffi.include_dir(), sysconfig.get_path("include")
    return fakegpus.built("staged") / "staged_driver.so", compiled(
        "staged.cc", folder, *paths
    )


def set_up(platform: str) -> ctypes.CDLL | None:
    """Prepares this process for a platform. Must run before JAX is used.

    Returns:
      The driver of tests/fakegpu, on platforms that use it.
    """
    if platform == "cuda":
        os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")
    if platform == "fakegpu":
        if reason := fakegpus.missing():
            raise pytest.UsageError(f"--platform fakegpu: {reason}")
        return fakegpus.start()
    if platform != "staged":
        return None
    with tempfile.TemporaryDirectory() as folder:  # the libraries stay loaded
        return use_fake_driver(*staged(Path(folder)))


_DISPATCHED = "a program on a GPU has made its calls when its dispatch returns"
_QUEUE = "on a GPU, values may be dropped before they are in the queue"
_HOST_DEVICE = "host code of a program on a GPU computes on the CPU"
_LATER = "a GPU's taps may come after its program has ended"
_SMALL = "on a GPU JAX's own callbacks change small integers (jax 0.11.2)"
# Tests for CPUs only: GPUs have their own (test_cuda.py, test_gpu.py) or need none.
_CPU_ONLY = {
    "test_buffer_callback.py": "reads Buffers with NumPy",
    "test_buffer_views.py": "reads Buffers with NumPy",
    "test_small_elements_and_no_stream": "reads unpacked elements, and wants no stream",
    "test_benchmarks_sweeps.py": "runs the benchmarks' raw handler, which is for CPUs",
    # arrays="cuda" is among them.
    "test_any_options_of_a_call_are_refused_or_give_the_result": "reads Buffers with"
    " NumPy",
    "test_debug_mode": "debug mode looks on CPUs",
    "test_dispatch.py": "is about the CPU",
    "test_arrays_of_a_gpu_on_the_cpu": "is about the CPU",
    "test_lent_arrays_are_the_programs_memory": "lends the program's own memory",
    "test_buffer_callbacks": "reads Buffers with NumPy",
    "test_views_that_another_thread_takes_while_the_call_ends": "reads Buffers with NumPy",
    "test_a_million_taps_in_a_scan": "a million copies and streams take minutes",
    "test_the_barrier_waits_for_a_copy_that_reading_the_result_does_not_wait_for": "a"
    " GPU launches a kernel in each of three million steps",
    # A program on a GPU runs its calls on the thread that dispatches it.
    "test_what_was_dispatched_before_the_block_is_not_waited_for": _DISPATCHED,
    "test_save_tells_of_a_program_that_failed": _DISPATCHED,
    "test_a_close_under_a_program_fails_all_devices_at_one_item": _DISPATCHED,
    "test_a_barrier_inside_a_call_waits_for_taps_and_not_for_its_program": _DISPATCHED,
    "test_a_barrier_with_a_limit_waits_for_programs_and_loses_no_error": _DISPATCHED,
    "test_a_parallel_call_refuses_a_program_over_its_own_devices": _HOST_DEVICE,
    "test_host_code_loads_a_program_for_its_own_device": _HOST_DEVICE,
    "test_after_a_barrier_that_raised_all_begins_again": _LATER,
    "test_block_waits_and_loses_nothing": "GPUs may exceed the queue by what they hold",
    "test_what_a_full_queue_drops": _QUEUE,
    "test_a_full_queue_drops_the_oldest": _QUEUE,
    "test_it_runs_there": "is about devices of the CPU",
    "test_a_manifest_that_hides_its_lines_from_a_terminal": "its text names the CPU",
    "test_200_programs_in_flight": "a GPU's matrix products have fewer digits",
    "test_drop_ins_refuse_what_jax_refuses": "other transfers are refused first",
    "test_small_elements_and_the_value_given_back": _SMALL,
    "test_debugpy_stops_in_callbacks": "its program is for the CPU",
    "test_coverage_reports_lines_of_callbacks": "its program is for the CPU",
    "test_arguments_are_the_programs_memory": "lends the program's own memory",
    "test_rows_come_in_jaxs_order": "JAX's own rows come in any order on a GPU",
    "test_small_elements_are_right": _SMALL,
    "test_lines[int4-jit]": _SMALL,
    "test_buffer_native.py": "calls machine code for the CPU's memory",
    "test_failing_together.py": "needs a GPU for each process",
}
# Tests, and fixtures of a file, that have so many steps of kernels that tests/fakegpu,
# which runs them one instruction after the other, takes minutes.
_MANY_STEPS = {
    "test_order_devices.py slow",  # a loop of products of matrices
    "test_a_ring_of_devices_that_wait_for_each_other",
    "test_a_reset_under_a_program_comes_at_one_item_for_all_devices",
}
# Tests that reach no handler, or only by calls that other tests cover: the drop-ins and
# `hc.print` are calls and taps, vmap and derivatives are done before a program has a
# handler, and checks of results, pools and loops work on what a handler has copied.
_ABOVE_HANDLERS = (
    *("test_drop_in", "test_host_callback", "test_debug", "test_patch", "test_print"),
    *("test_tap_transforms", "test_tap_derivatives", "test_results", "test_collect"),
    *("test_loops_under_grad", "test_reraise", "test_coroutines", "test_rows"),
    *("test_status", "test_cache_keys"),
    *("test_host_function", "test_object", "test_check", "test_readme", "test_guide"),
    *("test_mistakes", "test_layers", "test_spec", "test_export", "test_ffi"),
    *("test_bridge", "test_examples", "test_gallery", "test_executors", "test_demo"),
    *("test_benchmarks",),
    *("test_dask_workers", "test_register", "test_failing_together", "test_texts"),
    *("test_progress", "test_jax_tqdm", "test_recorder", "test_pages"),
    *("test_breakpoint", "test_profiler"),
)


def why_not(item: Any, platform: str, few_devices: bool) -> str | None:
    """The reason to skip a test on this platform; None to run it."""
    for name in (item.path.name, item.originalname, item.name):
        if name in _CPU_ONLY:
            return _CPU_ONLY[name]
    if item.path.parent.name == "fakegpu":
        return None
    if platform == "fakegpu" and not _MANY_STEPS.isdisjoint(
        [item.originalname, *(f"{item.path.name} {name}" for name in item.fixturenames)]
    ):
        return "its kernels take minutes on this driver"
    if "run_python" in item.fixturenames:
        return "runs in a process of its own, on the CPU"
    if platform == "staged" and item.path.name.startswith(_ABOVE_HANDLERS):
        return "is not about the handlers"
    if hasattr(item, "callspec") and item.path.name != "test_cuda.py":
        case = item.callspec
        if "buffer" in case.id or "buffer_callback" in str(case.params):
            return "reads Buffers with NumPy"
    if platform != "staged" and re.match(
        r"test_dtypes_and_shapes\[u?int[24][-\]]", item.name
    ):
        return "XLA's compiler for GPUs refuses scans of them (jax 0.11.2)"
    if few_devices and any(map(_SEVERAL.search, _sources(item))):
        return "needs four devices"
    return None


_SEVERAL = re.compile(
    r"jax\.devices\(\)(?!\[(0|-1)\])|grid\(\)|line\(\)|mesh|pmap|_devices\(\)\[1"
)


def _sources(item: Any) -> Iterator[str]:
    """The source of a test, and of what its file has for it: fixtures and functions."""
    names, seen = [item.originalname, *item.fixturenames], set()
    while names:
        name = names.pop()
        found = vars(item.module).get(name)
        if hasattr(type(found), "_get_wrapped_function"):  # a fixture, since pytest 8.4
            found = found._get_wrapped_function()
        if name in seen or not isinstance(found, types.FunctionType):
            continue
        seen.add(name)
        if found.__code__.co_filename == item.module.__file__:
            source = inspect.getsource(found)
            names.extend(re.findall(r"\w+", source))
            yield source


def without_xlas_words(report: str) -> str:
    """What a report says, without what XLA's GPU runtime appends to it."""
    return re.sub(r" \[executable_name='[^']*'\]$", "", report)


def forget_failed_effects() -> None:
    """Drops the tokens of programs that failed after their dispatch, as on GPUs.

    JAX raises their failure at each `jax.effects_barrier()` until another program on
    the device replaces the token, although the test has seen it.
    """
    dispatch.runtime_tokens.clear()


def use_fake_driver(driver: Path, handlers: Path) -> ctypes.CDLL:
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
