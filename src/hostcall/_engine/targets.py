"""Registers the engine's handlers with XLA."""

from __future__ import annotations

import logging
import threading
from typing import Any

import jax

from hostcall import _jax, _native
from hostcall._core import config, errors, failures
from hostcall._core.process import once
from hostcall._runtime import lifecycle, profiles, watcher

logger = logging.getLogger("hostcall")

TARGET = "hostcall_call"
TAP_TARGET = "hostcall_tap"
LINK_TARGET = "hostcall_link"
VERDICT_TARGET = "hostcall_verdict"
BUFFER_TARGET = "hostcall_buffer"
GRAPH_TARGET = "hostcall_buffer_graph"  # may become part of a GPU's command buffer

TEXT = "text"  # the attribute of a call that describes it in other processes

_HANDLERS = {
    TARGET: "call",
    TAP_TARGET: "tap",
    LINK_TARGET: "link",
    VERDICT_TARGET: "verdict",
    BUFFER_TARGET: "buffer",
    GRAPH_TARGET: "graph",
}


@once
def start() -> None:
    """Starts the engine: its threads, and what it does at the process's end.

    Called when a program is lowered or loaded, and at the first eager call.
    """
    _jax.need(_jax.Part.CALLS)
    # The handler of XLA's own host callbacks, inside which the engine runs some calls.
    host_callback = _jax.host_callback_handler()
    if host_callback is None:
        logger.warning(
            "this jaxlib is newer than those that hostcall was tested with: a function"
            " that computes on the devices of the program which calls it may wait for"
            " them for ever. Let it compute on hostcall's own device, which is JAX's"
            " default there (jnp.asarray(np.asarray(x)))"
        )
    else:
        _native.set_host_callback_handler(host_callback, _native.run_pending)
    swap, set_local, get_local = _jax.SWAP_SET_GET
    for kind, setting, value in _jax.AMBIENT:
        _native.add_ambient_setting(
            kind,
            setting,
            swap=swap,
            set=set_local,
            get=get_local,
            value=value,
            unset=_jax.UNSET,
        )
    _native.set_hook(_native.Hook.PROFILED, profiles.is_taken)
    _native.set_hook(_native.Hook.SHOWN, profiles.Shown)
    _native.set_hook(_native.Hook.REPORT, failures.in_place_of_value_error)
    lifecycle.begin(watcher.start)


def _tracing() -> tuple[Any, Any]:
    """What `threading` gives each thread that it starts: (trace, profile).

    The engine asks once on each thread of XLA's and sets them, so that debuggers and
    coverage tools see callbacks there.
    """
    trace = threading.gettrace()
    profile = threading.getprofile()
    if trace is not None or profile is not None:
        # pydevd (debugpy, PyCharm) up to Python 3.11 ignores threads that `threading`
        # does not know. This makes it known, as Dummy-1 or the like.
        threading.current_thread()
    return trace, profile


@once
def prepare_for_cuda() -> None:
    """Does what programs on GPUs need, after `start`."""
    missing = _native.cuda_missing()
    if missing:
        raise errors.HostcallError(missing, code="hc-device")
    _native.limit_pinned(config.settings.pinned_bytes, config.settings.tap_queue_bytes)


def _register() -> None:
    """Registers the handlers with XLA: each plan type, then the handlers that use it.

    At import, since a program that was exported or serialized may be loaded before
    anything is lowered here. It takes 0.1 ms and starts no back end; JAX keeps the
    entries for CUDA until its plugin asks for them.
    """
    _native.set_hook(_native.Hook.TRACING, _tracing)
    handlers = _native.handlers(_jax.XLA_INTERFACE)
    for platform, plan_type, prefix in (
        ("cpu", "type", ""),
        # The "graph" handler itself tells XLA that it may be recorded into a command
        # buffer: the CUDA plugin accepts no traits at registration.
        ("CUDA", "cuda type", "cuda "),
    ):
        type_info = handlers[plan_type]
        jax.ffi.register_ffi_type("hostcall_plan", type_info, platform=platform)
        for target, name in _HANDLERS.items():
            handler = handlers[prefix + name]
            jax.ffi.register_ffi_target(target, handler, platform=platform)


_register()
