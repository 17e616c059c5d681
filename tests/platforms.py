"""Where the tests run: `pytest --platform cpu` (the default), `fakegpu` or `cuda`.

cpu     Programs run on XLA's CPU runtime, with the handlers for CPUs.
fakegpu Programs run on XLA's CUDA runtime, on a driver of this repository (fakegpus.py).
cuda    Programs run on NVIDIA GPUs. Tests that need more devices are skipped.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import types
from collections.abc import Iterator
from typing import Any

import fakegpus
import jax
import pytest
from jax._src import dispatch

PLATFORMS = ("cpu", "fakegpu", "cuda")


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
    return None


_DISPATCHED = "a program on a GPU has made its calls when its dispatch returns"
_QUEUE = "on a GPU, values may be dropped before they are in the queue"
_HOST_DEVICE = "host code of a program on a GPU computes on the CPU"
_TOKENS = "programs over several GPUs keep JAX's tokens"
_LATER = "a GPU's taps may come after its program has ended"
_SMALL = "on a GPU JAX's own callbacks change small integers (jax 0.11.2)"
_NONE = "JAX has no such function for GPUs"
# Tests for CPUs only: GPUs have their own (test_cuda.py, test_gpu.py) or need none.
_CPU_ONLY = {
    "test_buffer_callback.py": "reads Buffers with NumPy",
    "test_buffer_views.py": "reads Buffers with NumPy",
    "test_small_elements_and_no_stream": "reads unpacked elements, and wants no stream",
    "test_observe_in_numpy.py": "compares with XLA's CPU",
    "test_only_the_newest_keeps_its_values[taps-Mine]": _LATER,
    "test_only_the_newest_keeps_its_values[taps-LookupError]": _LATER,
    "test_benchmarks_sweeps.py": "runs the benchmarks' raw handler, which is for CPUs",
    # arrays="cuda" is among them.
    "test_any_options_of_a_call_are_refused_or_give_the_result": "reads Buffers with"
    " NumPy",
    "test_debug_mode": "debug mode looks on CPUs",
    "test_dispatch.py": "is about the CPU",
    "test_arrays_of_a_gpu_on_the_cpu": "is about the CPU",
    "test_lent_arrays_are_the_programs_memory": "lends the program's own memory",
    "test_buffer_callbacks": "reads Buffers with NumPy",
    "test_programs_that_were_traced_before": "reads Buffers with NumPy",
    "test_views_that_another_thread_takes_while_the_call_ends": "reads Buffers with NumPy",
    "test_a_million_taps_in_a_scan": "a million copies and streams take minutes",
    "test_the_barrier_waits_for_a_copy_that_reading_the_result_does_not_wait_for": "a"
    " GPU launches a kernel in each of three million steps",
    # A program on a GPU runs its calls on the thread that dispatches it.
    "test_what_was_dispatched_before_the_block_is_not_waited_for": _DISPATCHED,
    "test_the_type_is_the_same_where_a_thread_of_xla_made_the_call": _DISPATCHED,
    "test_many_programs_behind_one_that_takes_long": _DISPATCHED,
    "test_a_failure_is_raised_at_dispatch_and_not_again": "a GPU's come with the result",
    "test_waits_wait_for_all_devices": _DISPATCHED,
    "test_a_block_keeps_little": _DISPATCHED,
    "test_save_tells_of_a_program_that_failed": _DISPATCHED,
    "test_a_close_under_a_program_fails_all_devices_at_one_item": _DISPATCHED,
    "test_a_barrier_inside_a_call_waits_for_taps_and_not_for_its_program": _DISPATCHED,
    "test_a_barrier_with_a_limit_waits_for_programs_and_loses_no_error": _DISPATCHED,
    "test_results_that_are_donated_hide_nothing": _DISPATCHED,
    "test_a_failure_of_the_first_dispatch_that_was_read_is_not_raised_again": _TOKENS,
    "test_waits_of_threads.py": "its programs are pending when their dispatch returns",
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
    "test_nan_that_was_given_to_what_mixes_elements_of_matrices[schur]": _NONE,
    "test_nan_that_was_given_to_what_mixes_elements_of_matrices[hessenberg]": _NONE,
}


# What this driver lacks, and would end the process or fail without it.
_NOT_IN_FAKEGPU = {
    # A convolution: XLA looks for its algorithms through a null pointer.
    "test_a_value_that_was_given_is_handed_on[<lambda>2]": "XLA ends without cuDNN",
    "test_nan_that_was_given_to_what_mixes_elements_of_matrices[symmetric_product]": "a"
    " module of jaxlib's has opened its libcudart before this driver's is there",
}


def why_not(item: Any, platform: str, few_devices: bool) -> str | None:
    """The reason to skip a test on GPUs; None to run it."""
    for name in (item.path.name, item.originalname, item.name):
        if name in _CPU_ONLY:
            return _CPU_ONLY[name]
    if item.path.parent.name == "fakegpu":
        return None
    if platform == "fakegpu" and item.name in _NOT_IN_FAKEGPU:
        return _NOT_IN_FAKEGPU[item.name]
    if not {"run_python", "start_python"}.isdisjoint(item.fixturenames):
        return "runs in a process of its own, on the CPU"
    if hasattr(item, "callspec") and item.path.name != "test_cuda.py":
        case = item.callspec
        if "buffer" in case.id or "buffer_callback" in str(case.params):
            return "reads Buffers with NumPy"
    if re.match(r"test_dtypes_and_shapes\[u?int[24][-\]]", item.name):
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


def late_square(side: int) -> tuple[int, int]:
    """The shape of a matrix whose product with itself makes a program late.

    For the CPU it is so large that XLA runs the program on a thread of its own, or that
    its device has work for a while. A GPU's work is on a stream in any case, and
    tests/fakegpu needs seconds for a product that takes the CPU a millisecond.
    """
    if jax.default_backend() != "cpu":
        side //= 8
    return side, side


def without_xlas_words(report: str) -> str:
    """What a report says, without what XLA's GPU runtime appends to it."""
    return re.sub(r" \[executable_name='[^']*'\]$", "", report)


def forget_failed_effects() -> None:
    """Drops the tokens of programs that failed after their dispatch, as on GPUs.

    JAX raises their failure at each `jax.effects_barrier()` until another program on
    the device replaces the token, although the test has seen it.
    """
    dispatch.runtime_tokens.clear()
