"""Compiles a program without host calls once a run, however many tests use it.

The tests compare with JAX, in hundreds of small programs such as `jnp.sin` of three
numbers. XLA took two thirds of the suite's time, and many of its programs equal one that
it has compiled before. Programs with host calls are compiled each time, since the tests
are about what makes, keeps and frees those.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from jax._src import compiler

LIMIT = 1000  # programs: each has memory of its own

_compile = compiler.backend_compile_and_load
_kept: dict[tuple[Any, ...], Any] = {}
_lock = threading.Lock()  # of _kept: tests compile in several threads


def once() -> None:
    """From now on, equal programs share what XLA compiled."""
    compiler.backend_compile_and_load = _compile_once


def _compile_once(
    backend: Any,
    module: Any,
    executable_devices: Sequence[Any],
    options: Any,
    host_callbacks: Sequence[Any],
) -> Any:
    def run() -> Any:
        return _compile(backend, module, executable_devices, options, host_callbacks)

    text = str(module)  # without the places in the sources
    if host_callbacks or "custom_call" in text:
        return run()
    devices = tuple(device.id for device in executable_devices)
    key = (id(backend), devices, options.SerializeAsString(), text)
    with _lock:
        found = _kept.get(key)
    if found is None:
        found = run()
        with _lock:
            _kept[key] = found
            if len(_kept) > LIMIT:
                del _kept[next(iter(_kept))]  # the oldest
    return found
