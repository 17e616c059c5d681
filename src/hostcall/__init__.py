"""hostcall: call Python from compiled JAX programs.

    call        a host function with results
    tap         values leave, the program does not wait; tap_through gives them back,
                tap_tangent and tap_cotangent see derivatives
    host        makes a Python function a `HostFunction`, with rules for its result
                (like, elementwise, same_tree), batches and derivatives
                (finite_difference for want of a rule)
    check       runs a HostFunction and its rules against each other (a `Report` of
                `Check`s)
    Object      a host object whose methods programs call: one for each row of a vmap
    bridge      functions of torch, autograd and SymPy, and of JAX on other devices,
                made HostFunctions
    print       a formatted line, the same way
    pure_callback, io_callback, debug
                drop-ins for JAX's own; `debug` has callback and print
    buffer_callback
                works in place on the device's memory (`Buffer`, `ExecutionContext`,
                `ExecutionStage`); native makes machine code its callback
    host_callback
                a module to import: the one of this name that JAX removed
    patch_jax   puts them under JAX's names, for every program; unpatch_jax ends that
    barrier     waits for programs and taps, raises what taps raised
    flush       waits for what is queued; discard_taps drops it
    collect     what named taps saw, as arrays
    configure   settings of the process
    current     inside a callback: device, mesh coordinates, row (a `Current`)
    reraise     the callback's own exception comes out of the program
    last_error  the exception that a callback raised last
    status      the calls under way, with what each is doing (`ActiveCall`s)
    stats       what calls and taps have cost (`CallStats` by function)
    pinned_memory
                what values on their way to and from GPUs hold (`PinnedMemory`s)
    tap_queue   what waits to be delivered (a `TapQueue`)

Errors: HostcallError and, below it, SpecError, BatchingError, DerivativeError,
ResultError, EscapeError, UnwrittenError, CallTimeoutError, DeadlockError,
ExportError.

The map, top to bottom: `_host_function` has the rules of functions, `_object` is made
of calls; `_call` and `_tap` check and flatten, `_primitives` has the JAX primitives
with their rules, `_targets` builds a plan for the engine, `_native` (C++, in native/)
runs it; `_delivery` is the worker of taps. `_jax` alone touches JAX's private parts.

The names here are stable. Modules with a leading underscore are not.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hostcall._core import interpreter  # noqa: F401  (refuses sub-interpreters, first)

# isort: split
from hostcall import debug
from hostcall._api.barrier import barrier, discard_taps, flush
from hostcall._api.call import call
from hostcall._api.configure import configure
from hostcall._api.print import print
from hostcall._api.status import (
    ActiveCall,
    CallStats,
    PinnedMemory,
    TapQueue,
    pinned_memory,
    stats,
    status,
    tap_queue,
)
from hostcall._api.tap import tap, tap_cotangent, tap_tangent, tap_through
from hostcall._compat.callbacks import io_callback, pure_callback
from hostcall._core.errors import (
    BatchingError,
    CallTimeoutError,
    DeadlockError,
    DerivativeError,
    EscapeError,
    ExportError,
    HostcallError,
    ResultError,
    SpecError,
    UnwrittenError,
)
from hostcall._core.failures import last_error
from hostcall._engine.params.buffer import (
    Buffer,
    ExecutionContext,
    ExecutionStage,
    native,
)
from hostcall._runtime.context import Current, current
from hostcall._runtime.reraise import reraise

if TYPE_CHECKING:
    from hostcall import bridge
    from hostcall import host_callback as host_callback
    from hostcall._api.collect import collect
    from hostcall._api.object.handle import Object
    from hostcall._compat.buffer_callback import buffer_callback
    from hostcall._compat.patch import patch_jax, unpatch_jax
    from hostcall._host_function.check.report import Check, Report, check
    from hostcall._host_function.differences import finite_difference
    from hostcall._host_function.function import HostFunction
    from hostcall._host_function.host import host
    from hostcall._host_function.results import elementwise, like, same_tree

__version__ = "0.1.0"

# Imported when they are first asked for: they cost as much as the rest.
_LATER = {
    "Check": "_host_function.check.report",
    "HostFunction": "_host_function.function",
    "Object": "_api.object.handle",
    "Report": "_host_function.check.report",
    "buffer_callback": "_compat.buffer_callback",
    "check": "_host_function.check.report",
    "collect": "_api.collect",
    "elementwise": "_host_function.results",
    "finite_difference": "_host_function.differences",
    "host": "_host_function.host",
    "like": "_host_function.results",
    "patch_jax": "_compat.patch",
    "same_tree": "_host_function.results",
    "unpatch_jax": "_compat.patch",
}
_MODULES_LATER = ("bridge", "host_callback")


def __getattr__(name: str) -> Any:
    if name in _MODULES_LATER:
        return importlib.import_module(f"hostcall.{name}")
    if name not in _LATER:
        raise AttributeError(f"module 'hostcall' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hostcall.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, *_MODULES_LATER})


__all__ = [
    "ActiveCall",
    "BatchingError",
    "Buffer",
    "CallStats",
    "CallTimeoutError",
    "Check",
    "Current",
    "DeadlockError",
    "DerivativeError",
    "EscapeError",
    "ExecutionContext",
    "ExecutionStage",
    "ExportError",
    "HostFunction",
    "HostcallError",
    "Object",
    "PinnedMemory",
    "Report",
    "ResultError",
    "SpecError",
    "TapQueue",
    "UnwrittenError",
    "barrier",
    "bridge",
    "buffer_callback",
    "call",
    "check",
    "collect",
    "configure",
    "current",
    "debug",
    "discard_taps",
    "elementwise",
    "finite_difference",
    "flush",
    "host",
    "io_callback",
    "last_error",
    "like",
    "native",
    "patch_jax",
    "pinned_memory",
    "print",
    "pure_callback",
    "reraise",
    "same_tree",
    "stats",
    "status",
    "tap",
    "tap_cotangent",
    "tap_queue",
    "tap_tangent",
    "tap_through",
    "unpatch_jax",
]
