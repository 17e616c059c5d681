"""hostcall: call Python from compiled JAX programs.

Call the host, and hand values to it:
    call             calls a Python function and brings its results back
    tap              hands values to a function, while the program goes on
    tap_through      a tap tied to a value, which keeps JAX's fast dispatch
    feed             brings the items of an iterator or data loader into programs
    Feed             what `feed` returns
    print            prints a formatted line, as a tap (not in a star import)
    Object           a host object whose methods programs call; under vmap one per row
    current          tells a callback its device, mesh coordinates and row
    Current          what `current` returns

Watching a program:
    progress         shows a progress bar for the loop around it
    Recorder         writes what a program computes to a folder while it runs
    trace            writes what a program did to a file for a viewer
    watch            ends a program at its first bad value, and keeps the values
    breakpoint       opens a debugger in a compiled program (not in a star import)
    tools            the modules of these, and what belongs to them

Functions with rules:
    host             turns a Python function into a HostFunction
    HostFunction     what `host` returns: a function with batching and derivatives
    like             result=like(0): the result is an array like argument 0
    elementwise      result=elementwise: arguments broadcast to one floating array
    same_tree        result=same_tree(0): the result is a pytree like argument 0
    finite_difference  approximates derivatives that have no rule
    bridge           HostFunctions from PyTorch, autograd and SymPy, and from JAX
                     functions for other devices

Programs that leave the process:
    register         names host code, which an exported program calls by its name
    export           exports a function with host calls, as bytes for other processes
    Exported         what both return: the program, and what it needs
    load             reads such bytes, and checks that their names are registered here

Waiting, errors, settings:
    retrying         an executor= that is made anew when a worker dies
    barrier          waits for programs and taps, and raises what taps raised
    reraise          a block in which a program raises its callback's own exception
    last_error       returns the exception that a callback raised last
    HostcallError    the base of all errors that hostcall raises
    configure        changes settings of the process

In place of JAX's own:
    pure_callback, io_callback, buffer_callback
                     drop-ins with JAX's names and options
    debug            a module with drop-ins for jax.debug.callback and jax.debug.print
    host_callback    a module that replaces the one which JAX removed
    patch_jax        installs all of these under JAX's names, for every program
    unpatch_jax      restores JAX's functions

More modules:
    errors           the tree of exceptions
    monitor          shows what is running, what it has cost, and what is queued
    buffers          types of buffer_callback's arguments; machine code as a callback
    testing          checks a HostFunction's rules; collects the values of taps
    derivatives      taps that see tangents and cotangents

The map, top to bottom. Each wing imports only those below it:
    tools            what can be built on the public names
    these modules    a docstring and names, imported from the wings
    _compat, bridge  JAX's callbacks by JAX's rules; other libraries' functions
    _host_function   functions with rules, and their checks
    _api             call, tap, Object and the rest: check and flatten arguments
    _primitives      the JAX primitives, with their rules and lowerings
    _engine          describes calls to the engine: plans, parameters, counters
    _runtime         threads: the tap worker, executors, rows, interrupts
    _core            specs, errors, places in the source
    _jax             the only wing that touches JAX's private parts
    _native          the engine, in C++ (native/)
The page "The house" has a diagram.

The names here, and those of the modules without a leading underscore, are stable.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from hostcall._core import interpreter  # noqa: F401  (refuses sub-interpreters, first)

# isort: split
from hostcall._api.barrier import barrier
from hostcall._api.call import call
from hostcall._api.configure import configure
from hostcall._api.export.register import register
from hostcall._api.print import print as print
from hostcall._api.retrying import retrying
from hostcall._api.tap import tap, tap_through
from hostcall._core.errors import HostcallError
from hostcall._core.failures import last_error
from hostcall._runtime.context import Current, current
from hostcall._runtime.reraise import reraise

if TYPE_CHECKING:
    from hostcall import (
        bridge,
        buffers,
        debug,
        derivatives,
        errors,
        host_callback,
        monitor,
        testing,
        tools,
    )
    from hostcall._api.export.export import Exported, export, load
    from hostcall._api.feed.feed import Feed, feed
    from hostcall._api.object.handle import Object
    from hostcall._compat.buffer_callback import buffer_callback
    from hostcall._compat.callbacks import io_callback, pure_callback
    from hostcall._compat.patch import patch_jax, unpatch_jax
    from hostcall._host_function.differences import finite_difference
    from hostcall._host_function.function import HostFunction
    from hostcall._host_function.host import host
    from hostcall._host_function.results import elementwise, like, same_tree
    from hostcall.tools.breakpoint import breakpoint as breakpoint
    from hostcall.tools.progress import progress
    from hostcall.tools.recorder import Recorder
    from hostcall.tools.trace import trace
    from hostcall.tools.watch import watch

    __version__: str

# Imported lazily: together they take longer to import than everything else.
_LATER = {
    "Exported": "_api.export.export",
    "Feed": "_api.feed.feed",
    "HostFunction": "_host_function.function",
    "Object": "_api.object.handle",
    "Recorder": "tools.recorder",
    "breakpoint": "tools.breakpoint",
    "buffer_callback": "_compat.buffer_callback",
    "elementwise": "_host_function.results",
    "export": "_api.export.export",
    "feed": "_api.feed.feed",
    "finite_difference": "_host_function.differences",
    "host": "_host_function.host",
    "io_callback": "_compat.callbacks",
    "like": "_host_function.results",
    "load": "_api.export.export",
    "patch_jax": "_compat.patch",
    "pure_callback": "_compat.callbacks",
    "progress": "tools.progress",
    "same_tree": "_host_function.results",
    "trace": "tools.trace",
    "unpatch_jax": "_compat.patch",
    "watch": "tools.watch",
}
_MODULES_LATER = (
    "bridge",
    "buffers",
    "debug",
    "derivatives",
    "errors",
    "host_callback",
    "monitor",
    "testing",
    "tools",
)

# Names of before, and what to write instead.
_GONE = {
    "recover": (
        "no more: after a failure, end all processes of the job, and restart them from"
        " the last checkpoint"
    ),
}


def _version() -> str:
    """pyproject.toml has it, and what pip writes beside the installed package."""
    try:
        return importlib.metadata.version("hostcall")
    except importlib.metadata.PackageNotFoundError:  # in frozen programs
        return "0+unknown"


if not TYPE_CHECKING:  # a type checker would accept any name, as Any

    def __getattr__(name: str) -> Any:
        if name in _MODULES_LATER:
            return importlib.import_module(f"hostcall.{name}")
        if name == "__version__":
            globals()[name] = _version()
            return globals()[name]
        if name in _GONE:
            raise AttributeError(f"hostcall.{name} is {_GONE[name]}")
        if name not in _LATER:
            raise AttributeError(f"module 'hostcall' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"hostcall.{_LATER[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(
        [*__all__, "breakpoint", "print", *(n for n in globals() if n.startswith("__"))]
    )


# The front page without `breakpoint` and `print`: a star import must not replace
# builtins.
__all__ = [
    "Current",
    "Exported",
    "Feed",
    "HostFunction",
    "HostcallError",
    "Object",
    "Recorder",
    "barrier",
    "bridge",
    "buffer_callback",
    "buffers",
    "call",
    "configure",
    "current",
    "debug",
    "derivatives",
    "elementwise",
    "errors",
    "export",
    "feed",
    "finite_difference",
    "host",
    "host_callback",
    "io_callback",
    "last_error",
    "like",
    "load",
    "monitor",
    "patch_jax",
    "progress",
    "pure_callback",
    "register",
    "reraise",
    "retrying",
    "same_tree",
    "tap",
    "tap_through",
    "testing",
    "tools",
    "trace",
    "unpatch_jax",
    "watch",
]
