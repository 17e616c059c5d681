"""Settings of JAX that programs are checked against before they run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import callback as _callback
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import mesh as _mesh
from jax._src.interpreters import mlir as _mlir

from hostcall._jax.devices import default_device

FIXED, DEVICE, GUARD, WITH = range(4)


def ambient_settings() -> list[tuple[int, Any, Any, Any, Any, Any]]:
    """(kind, setting, its swap, set and get, value) of what host code has its own of.

    A callback may run on the thread that dispatched the program, inside that
    thread's `jax.default_device` and `jax.set_mesh`, which it must not inherit. What
    a setting of the kinds DEVICE and GUARD is set to, the call's plan knows.
    """
    home = _config if hasattr(_config, "device_context") else _mesh
    abstract, concrete = home.abstract_mesh_context_manager, home.device_context

    def entry(kind: int, setting: Any, value: Any) -> Any:
        of = type(setting)
        return kind, setting, of.swap_local, of.set_local, of.get_local, value

    return [
        entry(DEVICE, default_device, None),
        entry(FIXED, abstract, _mesh.empty_abstract_mesh),
        # Whoever sets this one has set the one before.
        entry(WITH, concrete, _mesh.empty_concrete_mesh),
        entry(GUARD, _config.no_execution, None),
    ]


# JAX 0.10 leaves its own callbacks the meshes of the thread that dispatched, and the
# interpreter of Pallas looks there for the kind of TPU.
CALLBACKS_HIDE_MESHES = hasattr(_callback, "mesh_lib")

# What `get_local` gives for a setting that the calling thread has not set.
UNSET = _config.config_ext.unset


class ExecutionGuard:
    """Asks about programs that a callback starts, before they are executed.

    Stands in for the value of `jax_no_execution`, whose truth JAX asks for before it
    executes a program, or puts one on its fast path. The setting is part of the key
    of JAX's caches, so programs that were on the fast path before are asked about
    again; those that have passed get a fast path of their own.
    """

    def __init__(self, check: Callable[[Sequence[Any]], None]) -> None:
        """`check` gets a program's devices, and raises what refuses it."""
        self._check = check

    def __bool__(self) -> bool:
        _refuse_across(sys._getframe(1))
        self._check(_devices_of_what_asks(sys._getframe(1)))
        return False


def _devices_of_what_asks(frame: Any) -> Sequence[Any]:
    """Those of the program that JAX is about to execute, or to put on its fast path."""
    return getattr(_program_that_asks(frame), "_local_devices", ())


def _program_that_asks(frame: Any) -> Any:
    program = frame.f_locals.get("self")
    if program is None:
        program = getattr(frame.f_locals.get("executable"), "unsafe_call", None)
    return program


# --- A process that may run no more programs with others (_job) ----------------------

_refusal_across: Callable[[], Exception] | None = None


class _AcrossGuard:
    """Stands in for settings of the whole process that JAX asks for.

    `jax_no_execution` as `ExecutionGuard` does. `jax_no_tracing` is asked for when a
    jitted function is called that is not on the fast path: there the arguments are
    looked at, so that nothing is compiled (which may take minutes) only to be refused.
    """

    def __init__(self, before: Any) -> None:
        self._before = before

    def __bool__(self) -> bool:
        frame = sys._getframe(1)
        if frame.f_code.co_name == "_get_fastpath_data":
            return True  # of a program that has been dispatched: not the fast path
        _refuse_across(frame)
        return bool(self._before)


def refuse_programs_across(refusal: Callable[[], Exception]) -> None:
    """From now on programs over several processes raise where they would start.

    Both settings are global, and the first is part of the keys of JAX's caches: every
    program that comes again is traced and compiled again, once.
    """
    global _refusal_across
    _refusal_across = refusal
    for setting in (_config.no_tracing, _config.no_execution):
        setting.set_global(_AcrossGuard(setting.get_global()))


def _refuse_across(frame: Any) -> None:
    if _refusal_across is None:
        return
    program = _program_that_asks(frame)
    if program is None:  # a function, before it is traced: its arguments
        leaves = jax.tree.leaves([frame.f_locals.get(n) for n in ("args", "kwargs")])
        tracer = jax.core.Tracer
        parts = [
            x for x in leaves if isinstance(x, jax.Array) and not isinstance(x, tracer)
        ]
    else:
        parts = [
            *getattr(getattr(program, "in_handler", None), "in_shardings", ()),
            *getattr(getattr(program, "out_handler", None), "out_shardings", ()),
        ]
    if not all(part.is_fully_addressable for part in parts):
        raise _refusal_across()


# --- A forked child (_fork) ----------------------------------------------------------


class _Refusal:
    """Stands in for the value of `jax_no_execution`: no program passes."""

    def __init__(self, refusal: Callable[[], Exception]) -> None:
        self._refusal = refusal

    def __bool__(self) -> bool:
        raise self._refusal()


def refuse_programs(refusal: Callable[[], Exception]) -> None:
    """Ends lowering, compiling and running in this process; tracing goes on.

    For a process in which they would wait for threads that do not exist: MLIR's pool
    and XLA's. JAX's functions are replaced, and nothing puts them back.
    """

    def refuse(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise refusal()

    _mlir.lower_jaxpr_to_module = refuse
    _compiler.compile_or_get_cached = refuse
    setting, guard = _config.no_execution, _Refusal(refusal)
    setting.set_global(guard)
    if setting.get_local() is not UNSET:  # a callback's: it has forked
        setting.set_local(guard)
