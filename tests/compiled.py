"""Compiles a program without host calls once a run, however many tests use it.

The tests compare with JAX, in hundreds of small programs such as `jnp.sin` of three
numbers. XLA took two thirds of the suite's time, and many of its programs equal one that
it has compiled before. Programs with host calls are compiled each time, since the tests
are about what makes, keeps and frees those.

Outside of jit, JAX keeps the program of each operation until jax.clear_caches(). The
program of a loop or a branch may have host calls, which a test must not leave to the
next one. Such programs are kept apart, so that the others need not be made again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from jax._src import compiler, core, dispatch, util
from jax._src.interpreters import pxla

LIMIT = 1000  # programs: each has memory of its own

_compile = compiler.backend_compile_and_load
_kept: dict[tuple[Any, ...], Any] = {}
_lock = threading.Lock()  # of _kept: tests compile in several threads

_operation = dispatch.xla_primitive_callable
_operation_of_jaxprs = util.cache()(_operation.__wrapped__)


def once() -> None:
    """From now on, equal programs share what XLA compiled."""
    compiler.backend_compile_and_load = _compile_once
    dispatch.xla_primitive_callable = _operation_kept_apart


def _operation_kept_apart(primitive: core.Primitive, **params: Any) -> Any:
    """JAX's function that runs an operation outside of jit."""
    of_jaxprs = next(core.jaxprs_in_params(params), None) is not None
    return (_operation_of_jaxprs if of_jaxprs else _operation)(primitive, **params)


def drop_operations_of_jaxprs() -> None:
    """Drops the programs of loops, branches and other operations that have a jaxpr."""
    _operation_of_jaxprs.cache_clear()


def drop_lowered() -> None:
    """Drops the texts of programs, with what they keep alive; compiled ones stay.

    A program that a block of hc.observe rewrites has the text of a jaxpr that JAX keeps.
    """
    pxla._cached_lowering_to_hlo.cache_clear()


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
        found = _kept.pop(key, None)
        if found is not None:
            _kept[key] = found  # as the newest
    if found is None:
        found = run()
        with _lock:
            _kept[key] = found
            if len(_kept) > LIMIT:
                del _kept[next(iter(_kept))]  # unused for longest
    return found
