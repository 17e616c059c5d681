"""Registers the engine's handlers with XLA."""

from __future__ import annotations

import threading
from typing import Any

import jax

from hostcall import _jax, _native
from hostcall._core import config, errors, failures
from hostcall._runtime import lifecycle

TARGET = "hostcall_call"
TAP_TARGET = "hostcall_tap"
LINK_TARGET = "hostcall_link"
VERDICT_TARGET = "hostcall_verdict"
BUFFER_TARGET = "hostcall_buffer"
GRAPH_TARGET = "hostcall_buffer_graph"  # may become part of a GPU's command buffer
RAW_TARGET = "hostcall_raw"  # for benchmarks/: enters Python and does nothing else

_HANDLERS = {
    TARGET: "call",
    TAP_TARGET: "tap",
    LINK_TARGET: "link",
    VERDICT_TARGET: "verdict",
    BUFFER_TARGET: "buffer",
    GRAPH_TARGET: "graph",
}
# The prefix of the handlers that serve the CPU. Tests set "staged " to run the CUDA
# handlers on a fake driver, which uses host memory as device memory
# (tests/platforms.py).
kind_on_cpu = ""

_started = False
_started_cuda = False
_has_host_callbacks = False
_lock = threading.Lock()


def start() -> None:
    """Registers the engine with XLA, once.

    Called at the first lowering or eager call, not at import: it takes time, though it
    starts no back end.
    """
    global _started, _has_host_callbacks
    if _started:
        return
    with _lock:
        if _started:
            return
        handlers = _native.handlers()
        _register("cpu", handlers["type"], kind_on_cpu)
        inside = _jax.host_callback_handler()
        if inside is not None:
            _native.set_host_callback_handler(inside, _native.run_pending)
            _has_host_callbacks = True
        jax.ffi.register_ffi_target(RAW_TARGET, handlers["raw"], platform="cpu")
        for setting in _jax.ambient_settings():
            _native.add_ambient_setting(**setting._asdict(), unset=_jax.UNSET)
        _native.set_report_converter(failures.in_place_of)
        lifecycle.begin()
        _started = True  # last: the check above takes no lock


def has_host_callbacks() -> bool:
    """Whether calls can run inside one of XLA's host callbacks. Valid after `start`."""
    return _has_host_callbacks


def start_on(client: Any | None) -> None:
    """Does what `start` does, and registers the CUDA handlers if `client` has GPUs."""
    global _started_cuda
    start()
    if client is None or client.platform not in ("cuda", "gpu") or _started_cuda:
        return
    missing = _native.cuda_missing()
    if missing:
        raise errors.HostcallError(missing)
    with _lock:
        if _started_cuda:
            return
        # The "graph" handler itself tells XLA that it may be recorded into a command
        # buffer: the CUDA plugin accepts no traits at registration.
        _register("CUDA", _native.handlers()["cuda type"], "cuda ")
        _native.limit_pinned(config.pinned_bytes(), config.tap_queue_bytes())
        _started_cuda = True


def _register(platform: str, plan_type: Any, kind: str) -> None:
    """Registers the plan type, then the handlers.

    XLA needs the type before the handlers that use it, and both before it compiles a
    program that names them.
    """
    handlers = _native.handlers()
    jax.ffi.register_ffi_type("hostcall_plan", plan_type, platform=platform)
    for target, name in _HANDLERS.items():
        jax.ffi.register_ffi_target(target, handlers[kind + name], platform=platform)
