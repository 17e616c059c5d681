"""Settings that JAX reads before it runs a program, used to look at that program.

JAX has no hook that runs before a program does. It does read the truth of
`jax_no_execution` then, so an object in the place of that setting's value has its
`__bool__` called, and finds the program in the caller's frame.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax._src import callback as _callback
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import mesh as _mesh
from jax._src.interpreters import mlir as _mlir

from hostcall._jax.devices import default_device
from hostcall._jax.fast_dispatch import forget_fast_dispatches
from hostcall._native import Ambient


class AmbientSetting(NamedTuple):
    """A thread-local setting of JAX's, with the methods of its class."""

    kind: Ambient
    setting: Any
    swap: Callable[..., Any]
    set: Callable[..., Any]
    get: Callable[..., Any]
    value: Any | None


def ambient_settings() -> list[AmbientSetting]:
    """The settings that a callback gets values of its own for.

    A callback may run on the thread that dispatched the program, inside that
    thread's `jax.default_device` and `jax.set_mesh`, which it must not inherit.

    Returns:
        (kind, setting, its swap, set and get functions, value) for each setting. For
        the kinds DEVICE and GUARD the value comes from the call's plan instead.
    """
    home = _config if hasattr(_config, "device_context") else _mesh
    abstract, concrete = home.abstract_mesh_context_manager, home.device_context

    def entry(kind: Ambient, setting: Any, value: Any = None) -> AmbientSetting:
        of = type(setting)
        return AmbientSetting(
            kind, setting, of.swap_local, of.set_local, of.get_local, value
        )

    return [
        entry(Ambient.DEVICE, default_device),
        entry(Ambient.FIXED, abstract, _mesh.empty_abstract_mesh),
        # JAX sets this one only together with the one before it, so the engine skips
        # it where that one is not set (native/plan/call_scope.cc).
        entry(Ambient.WITH, concrete, _mesh.empty_concrete_mesh),
        entry(Ambient.GUARD, _config.no_execution),
    ]


# In JAX 0.10 a callback of JAX's own still sees the meshes of the dispatching thread,
# and Pallas's interpreter, which runs in such callbacks, reads the TPU kind from them.
CALLBACKS_HIDE_MESHES = hasattr(_callback, "mesh_lib")

# What `get_local` returns for a setting that the calling thread has not set.
UNSET = _config.config_ext.unset


class ExecutionGuard:
    """Checks the programs that a callback starts, before they are executed.

    It takes the place of the value of `jax_no_execution`. JAX reads the truth of that
    value before it executes a program, and before it puts one on its fast path. The
    value is part of the keys of JAX's caches, so a program that was on the fast path
    outside the callback is checked too. A program that has passed gets a fast path
    under this guard's key, and is not checked again.
    """

    def __init__(self, check: Callable[[Sequence[Any]], None]) -> None:
        """`check` gets a program's devices, and raises in order to refuse it."""
        self._check = check

    def __bool__(self) -> bool:
        frame = sys._getframe(1)
        _refuse_across(frame)
        self._check(getattr(_program_that_asks(frame), "_local_devices", ()))
        return False


def _program_that_asks(frame: Any) -> Any:
    """The program that JAX is about to execute or to put on its fast path, found in the
    frame that reads the setting.
    """
    program = frame.f_locals.get("self")
    if program is None:
        program = getattr(frame.f_locals.get("executable"), "unsafe_call", None)
    return program


# --- A process that may take no further part in programs over several processes ------

_refusal_across: Callable[[], Exception] | None = None


class _AcrossGuard:
    """Takes the place of the process-wide values of two settings.

    JAX reads `jax_no_execution` where `ExecutionGuard` says. It reads `jax_no_tracing`
    when a jitted function is called that is not on the fast path. There the arguments
    show whether the program would span processes, so it is refused before it is
    compiled, which may take minutes.
    """

    def __init__(self, before: Any) -> None:
        self.before = before

    def __bool__(self) -> bool:
        frame = sys._getframe(1)
        if frame.f_code.co_name == "_get_fastpath_data":
            # JAX has just dispatched this program and asks whether its next calls may
            # take the fast path. True forbids that, so each of them is checked here.
            return True
        _refuse_across(frame)
        return bool(self.before)


def refuse_programs_across(refusal: Callable[[], Exception]) -> None:
    """From now on, a program over several processes raises instead of starting.

    Both settings are set for the whole process. `jax_no_execution` is part of the keys
    of JAX's caches, so every program is traced and compiled once more when it is next
    called.
    """
    global _refusal_across
    _refusal_across = refusal
    for setting in (_config.no_tracing, _config.no_execution):
        if not isinstance(setting.get_global(), _AcrossGuard):
            setting.set_global(_AcrossGuard(setting.get_global()))


def _refuse_across(frame: Any) -> None:
    if _refusal_across is None:
        return
    program = _program_that_asks(frame)
    if program is None:  # a function that is not traced yet: look at its arguments
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


# --- A forked child ------------------------------------------------------------------


def refuse_programs(refusal: Callable[[], Exception]) -> None:
    """Refuses lowering, compiling and running in this process; tracing still works.

    This is for a forked child, in which they would wait for threads that do not exist
    there (MLIR's pool and XLA's). JAX's functions are replaced for good.
    """

    def refuse(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise refusal()

    forget_fast_dispatches()
    _mlir.lower_jaxpr_to_module = refuse
    _compiler.compile_or_get_cached = refuse
    setting, guard = _config.no_execution, ExecutionGuard(refuse)
    setting.set_global(guard)
    if setting.get_local() is not UNSET:  # a callback's guard: the callback has forked
        setting.set_local(guard)
