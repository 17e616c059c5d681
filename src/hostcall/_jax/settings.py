"""JAX's settings of one thread: those of host code, and those of where it is called.

`with jax.enable_x64(True):` and its like set a setting for the calling thread. JAX
traces and compiles a program once for each value of those in its trace context, so the
values at tracing belong to the program. Its host code runs on threads of XLA's and of
hostcall's, which have not set anything, so it takes the values along.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from hostcall._jax.door import config as _config
from hostcall._jax.door import mesh as _mesh
from hostcall._jax.versions import MESH_SETTINGS, trace_context_names
from hostcall._native import Ambient

default_device = jax.default_device
# A setting of JAX's, public or not.
Setting: TypeAlias = Any

# What `get_local` returns for a setting that the calling thread has not set.
UNSET = jax.default_device.get_local()

# --- Settings that host code has values of its own for --------------------------------
#
# It may run on the thread that dispatched the program, inside that thread's
# `jax.default_device` and `jax.set_mesh`, which it must not inherit.

_abstract, _concrete = MESH_SETTINGS
# (kind, setting, value). For DEVICE and GUARD the value comes from the call's plan.
AMBIENT: tuple[tuple[Ambient, Setting, object], ...] = (
    (Ambient.DEVICE, default_device, None),
    (Ambient.FIXED, _abstract, _mesh.empty_abstract_mesh),
    # JAX sets this one only together with the one before it, so the engine skips it
    # where that one is not set (native/plan/call_scope.cc).
    (Ambient.WITH, _concrete, _mesh.empty_concrete_mesh),
    (Ambient.GUARD, jax.no_execution, None),
)
# The methods of their class, which the engine calls.
_State = type(jax.default_device)
SWAP_SET_GET = _State.swap_local, _State.set_local, _State.get_local

# --- Settings that a trace has of its own ---------------------------------------------

# The engine decides on the first row. The second one is about transfers and threads,
# and JAX has no value of these in its trace context. JAX itself sets the third one
# while it traces and lowers; the values say where in a program JAX is. The last is
# about the text of programs.
_NOT_TAKEN = frozenset(
    (
        *("jax_default_device", "jax_no_execution", "jax_no_tracing"),
        *("jax_thread_guard", "jax_array_garbage_collection_guard"),
        *("jax_transfer_guard_host_to_device", "jax_transfer_guard_device_to_host"),
        "jax_transfer_guard_device_to_device",
        *("check_vma", "eager_constant_folding", "jax_no_collectives"),
        "jax_mutable_array_checks",
        "jax_hlo_source_file_canonicalization_regex",
    )
)


def _taken() -> dict[str, Setting]:
    """The settings by name: those in JAX's trace context, and the other public ones.

    Some public ones change what JAX computes and are not in the trace context
    (`jax.default_prng_impl`, `jax.debug_nans`).
    """
    known = dict(_config.config_states)
    interpreted = _config.pallas_tpu_interpret_mode_context_manager
    known["pallas_tpu_interpret_mode_context_manager"] = interpreted
    public = {id(value) for value in vars(jax).values()}
    traced = {*trace_context_names(), "jax_disable_jit"}
    taken: dict[str, Setting] = {}
    for name, setting in known.items():
        is_of_programs = name in traced or id(setting) in public
        if is_of_programs and name not in _NOT_TAKEN:
            taken[name] = setting
    return taken


_settings = _taken()


def _set(name: str, value: object) -> None:
    """Sets a setting on the calling thread."""
    setting = _settings[name]
    setting.swap_local(value)
    # As JAX's own blocks do it: its C++ has a copy of some settings.
    if isinstance(setting, _State) and setting._update_thread_local_hook:
        setting._update_thread_local_hook(None if value is UNSET else value)


@dataclass(frozen=True)
class Traced:
    """The settings that a trace had of its own: (name, value) of each."""

    values: tuple[tuple[str, object], ...]

    def enter(self) -> list[object]:
        """Sets all of them on the calling thread, or none if Ctrl-C comes meanwhile.

        Returns the former values.
        """
        former_values = [_settings[name].get_local() for name, _ in self.values]
        try:
            for name, value in self.values:
                _set(name, value)
        except BaseException:
            self.leave(former_values)
            raise
        return former_values

    def leave(self, former_values: list[object]) -> None:
        """Sets what `enter` has returned."""
        names = [name for name, _ in self.values]
        former = list(zip(names, former_values, strict=True))
        try:
            for name, value in former:
                _set(name, value)
        except BaseException:  # Ctrl-C: from the first one again
            for name, value in former:
                _set(name, value)
            raise


def traced_here() -> Traced | None:
    """The settings of the calling thread that differ from the process's; None if none
    does.
    """
    values = [get_local() for get_local in _GET_LOCAL]
    if values == _NONE_SET:  # most calls, and each eager one asks
        return None
    changed = [
        (name, value)
        for (name, setting), value in zip(_settings.items(), values, strict=True)
        if value is not UNSET and value != setting.get_global()
    ]
    return Traced(tuple(changed)) if changed else None


_GET_LOCAL = [setting.get_local for setting in _settings.values()]
_NONE_SET = [UNSET] * len(_GET_LOCAL)


# --- Settings of a program that leaves the process -----------------------------------


def tell_traced(traced: Traced) -> dict[str, object] | None:
    """The settings as JSON; None if `read_traced` would not give them back."""
    as_json = {name: _plain(value) for name, value in traced.values}
    return as_json if read_traced(as_json) == traced else None


def _plain(value: object) -> object:
    return value.value if isinstance(value, enum.Enum) else value


def read_traced(as_json: object) -> Traced | None:
    """The inverse. `as_json` may say anything: None if `tell_traced` did not make it.

    JAX's own parsers check the values, and get only such as JSON has.
    """
    if not isinstance(as_json, dict) or not as_json:
        return None
    found = []
    for name, value in as_json.items():
        setting = _settings.get(name)
        if not isinstance(setting, _State) or setting._parser is None:
            return None
        if type(value) not in (bool, int, str, type(None)):
            return None
        try:
            parsed = setting._parser(value)
        except (TypeError, ValueError):
            return None
        # A parser may take other values too, and change them.
        plain = _plain(parsed)
        if type(plain) is not type(value) or plain != value:
            return None
        found.append((name, parsed))
    return Traced(tuple(found))
