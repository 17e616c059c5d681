"""hostcall: call Python from compiled JAX programs.

First:
    call             calls a Python function and brings its results back
    tap              hands values to a function, while the program goes on
    print            prints a formatted line, as a tap (not in a star import)
    host             turns a Python function into one with batching and derivatives
    barrier          waits for programs and taps, and raises what taps raised
    reraise          a block in which a program raises its callback's own exception

More ways to the host:
    tap_through      a tap tied to a value, which runs if the value is used
    feed             brings the items of an iterator or data loader into programs
    Object           a host object whose methods programs call; under vmap one per row
    current          tells a callback its device, mesh coordinates and row

Watching a program:
    progress         shows a progress bar for the loop around it
    Recorder         writes what a program computes to a folder while it runs
    watch            ends a program at its first bad value, and keeps the values
    observe          looks into programs that nobody changed: NaNs, values, progress

Programs that leave the process:
    register         names host code, which an exported program calls by its name
    export           exports a function with host calls, as bytes for other processes
    load             reads such bytes, and checks that their names are registered here

In place of JAX's own:
    pure_callback, io_callback
                     drop-ins with JAX's names and options
    patch_jax        installs all drop-ins under JAX's names, for every program

Settings:
    configure        changes settings of the process

Modules:
    results          like, elementwise, same_tree: what a function of host returns
    errors           the tree of exceptions; last_error, what a callback raised last
    monitor          shows what is running, what it has cost, and what is queued
    debug            drop-ins for jax.debug.callback and jax.debug.print
    buffers          drop-in for JAX's buffer_callback, its types; machine code
    bridge           host functions from PyTorch; SciPy's solvers;
                     JAX functions for other devices
    derivatives      taps that see tangents and cotangents; finite_difference
    testing          checks a host function's rules; collects taps; unpatch_jax
    tools            the modules of progress, Recorder and so on; reads what they wrote
    typing           the types of what host, feed, export and current return
    host_callback    a module that replaces the one which JAX removed; import it alone

The map, top to bottom. Each wing imports only those below it:
    tools            what can be built on the public names
    these modules    a docstring and names, imported from the wings
    _compat, bridge  JAX's callbacks by JAX's rules; other libraries' functions
    _export          names for host code, and programs that leave the process
    _host_function   functions with rules, and their checks
    _api             call, tap, Object and the rest: check and flatten arguments
    _primitives      the JAX primitives, with their rules and lowerings
    _engine          describes calls to the engine: plans, parameters, counters
    _job             what the processes of a job of several tell each other
    _policies        how a function is run: limits, executors
    _runtime         threads: the tap worker, the event loop, feeds, interrupts
    _core            specs, errors, places in the source
    _jax             the only wing that touches JAX's private parts
    _native          the engine, in C++ (native/)
The page "The house" has a diagram.

The names here, and those of the modules without a leading underscore, are stable.
"""

import functools as _functools
import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from hostcall._core import interpreter  # noqa: F401  (refuses sub-interpreters, first)

# isort: split
from hostcall import _jax, _native

# A program that was exported, or that JAX has kept on disk, may run before anything
# here is called. It needs the effects by name, the handlers, and the reader of texts.
# All else is imported when it is first used.
from hostcall._core import order as _order  # noqa: F401
from hostcall._core.errors import HostcallError as _HostcallError
from hostcall._engine import targets as _targets  # noqa: F401

if TYPE_CHECKING:
    from hostcall import (
        bridge,
        buffers,
        debug,
        derivatives,
        errors,
        monitor,
        results,
        testing,
        tools,
        typing,
    )
    from hostcall._api.barrier import barrier
    from hostcall._api.call import call
    from hostcall._api.configure import configure
    from hostcall._api.feed.feed import feed
    from hostcall._api.object.objects import Object
    from hostcall._api.print import print as print
    from hostcall._api.tap import tap, tap_through
    from hostcall._compat.patch import patch_jax
    from hostcall._compat.pure_and_io import io_callback, pure_callback
    from hostcall._export.export import export, load
    from hostcall._export.registry import register
    from hostcall._host_function.host import host
    from hostcall._runtime.context import current
    from hostcall._runtime.reraise import reraise
    from hostcall.tools.observing import observe
    from hostcall.tools.progress import progress
    from hostcall.tools.recorder import Recorder
    from hostcall.tools.watch import watch

    __version__: str

# Where each name is, imported when it is first asked for.
_HOMES = {
    "Object": "_api.object.objects",
    "Recorder": "tools.recorder",
    "barrier": "_api.barrier",
    "call": "_api.call",
    "configure": "_api.configure",
    "current": "_runtime.context",
    "export": "_export.export",
    "feed": "_api.feed.feed",
    "host": "_host_function.host",
    "io_callback": "_compat.pure_and_io",
    "load": "_export.export",
    "observe": "tools.observing",
    "patch_jax": "_compat.patch",
    "print": "_api.print",
    "pure_callback": "_compat.pure_and_io",
    "progress": "tools.progress",
    "register": "_export.registry",
    "reraise": "_runtime.reraise",
    "tap": "_api.tap",
    "tap_through": "_api.tap",
    "watch": "tools.watch",
}
# The modules that have further public names.
_PARTS = (
    "errors",
    "monitor",
    "testing",
    "tools",
    "results",
    "derivatives",
    "buffers",
    "bridge",
    "typing",
)
# Names that have gone or moved, and what to write instead.
_GONE = {
    "Current": "hostcall.typing.Current",
    "Exported": "hostcall.typing.Exported",
    "Feed": "hostcall.typing.Feed",
    "HostFunction": "hostcall.typing.HostFunction",
    "HostcallError": "hostcall.errors.HostcallError",
    "breakpoint": "jax.debug.breakpoint() after hc.patch_jax(); or hc.call of a"
    " function with Python's breakpoint() in it, which has where=, and its parameters"
    " as names (the page 'Watches and breakpoints' shows both)",
    "buffer_callback": "hostcall.buffers.buffer_callback",
    "elementwise": "hostcall.results.elementwise",
    "finite_difference": "hostcall.derivatives.finite_difference",
    "host_callback": "a module to import: import hostcall.host_callback as hcb",
    "last_error": "hostcall.errors.last_error",
    "like": "hostcall.results.like",
    "recover": "a restart: after a failure, end all processes of the job, and restart"
    " them from the last checkpoint",
    "retrying": "a pool of loky's: loky.get_reusable_executor makes a new one after a"
    " worker has died (the page 'How a function is run' shows how)",
    "same_tree": "hostcall.results.same_tree",
    "trace": "jax.profiler.trace(folder), which shows calls, taps and deliveries with"
    " their names and lines (the page 'Watching a program')",
    "unpatch_jax": "hostcall.testing.unpatch_jax",
}


def _version() -> str:
    """pyproject.toml has it, and what pip writes beside the installed package."""
    try:
        return importlib.metadata.version("hostcall")
    except importlib.metadata.PackageNotFoundError:  # in frozen programs
        return "0+unknown"


def _where_is(name: str) -> str:
    """What to write for a public name that is in another module; "" if there is none.

    This imports all of them, which is no matter where the program ends anyway.
    """
    if name.startswith("_"):  # Python and tools ask for many of these
        return ""
    for part in _PARTS:
        module = importlib.import_module(f"hostcall.{part}")
        if name in module.__all__:
            return f". It is hostcall.{part}.{name}"
    return ""


def _read_text(text: Any, on_cuda: Any, buffers: Any) -> Any:
    """Reads what an exported program says about one of its calls, for the engine."""
    # Imported here: a process that loads no program does without.
    from hostcall._export import texts

    return texts.read_text(text, on_cuda, buffers)


_native.set_hook(_native.Hook.TEXT_READER, _read_text)
# From here on, what this JAX has not is refused where it is needed.
_jax.refuse_by(_functools.partial(_HostcallError, code="hc-jax"))

if not TYPE_CHECKING:  # a type checker would accept any name, as Any

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            globals()[name] = _version()
            return globals()[name]
        if name in _GONE:
            raise AttributeError(f"hostcall.{name} is now {_GONE[name]}")
        if name in _HOMES:
            home = importlib.import_module(f"hostcall.{_HOMES[name]}")
            # Kept, so that Python finds it without this function from now on.
            globals()[name] = getattr(home, name)
            return globals()[name]
        if name in __all__:  # the modules, which Python keeps itself
            return importlib.import_module(f"hostcall.{name}")
        message = f"module 'hostcall' has no attribute {name!r}"
        raise AttributeError(message + _where_is(name))


def __dir__() -> list[str]:
    return sorted([*__all__, "print", *(n for n in globals() if n.startswith("__"))])


# The front page without `print`: a star import must not replace a builtin.
__all__ = [
    "Object",
    "Recorder",
    "barrier",
    "bridge",
    "buffers",
    "call",
    "configure",
    "current",
    "debug",
    "derivatives",
    "errors",
    "export",
    "feed",
    "host",
    "io_callback",
    "load",
    "monitor",
    "observe",
    "patch_jax",
    "progress",
    "pure_callback",
    "register",
    "reraise",
    "results",
    "tap",
    "tap_through",
    "testing",
    "tools",
    "typing",
    "watch",
]
