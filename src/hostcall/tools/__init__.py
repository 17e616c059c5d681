"""`hostcall.tools`: programs that are watched while they run.

    progress    progress bars for loops inside compiled programs (`hc.progress`)
    jax_tqdm    the names and signatures of the package jax-tqdm, on `hc.progress`
    recorder    writes what a program computes to a folder (`hc.Recorder`)
    sinks       what else gets the recorded columns: files, TensorBoard, a live plot
    reading     reads such a folder, also while the run goes on (`read`)
    watch       ends a program at its first bad value (`hc.watch`, `load_failure`)
    observing   looks into programs that nobody changed (`hc.observe`)

The tools use public names of hostcall only, so a tool of yours can do what they do.
Each module can be imported alone. Optional packages are imported when a tool first
needs them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hostcall._core.gone import refuse

if TYPE_CHECKING:
    from hostcall.tools import (
        jax_tqdm,
        observing,
        progress,
        reading,
        recorder,
        sinks,
        watch,
    )
    from hostcall.tools.reading import read
    from hostcall.tools.watch import load_failure

_PROFILER = (
    "jax.profiler.trace(folder) writes a trace, as JSON that gzip and json read (the"
    " page 'Watching a program')"
)
# Names that were here, and what to write instead.
_GONE = {
    "read_trace": _PROFILER,
    "trace": _PROFILER,
    "breakpoint": "hc.call of a function with Python's breakpoint() in it, or"
    " jax.debug.breakpoint() after hc.patch_jax()",
}
_LATER = {"load_failure": "watch", "read": "reading"}


if not TYPE_CHECKING:  # a type checker would accept any name, as Any

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            refuse("module 'hostcall.tools'", _GONE, name)
        module = importlib.import_module(f"hostcall.tools.{_LATER.get(name, name)}")
        return getattr(module, name) if name in _LATER else module


def __dir__() -> list[str]:
    return sorted([*__all__, *(n for n in globals() if n.startswith("__"))])


__all__ = [
    "jax_tqdm",
    "load_failure",
    "observing",
    "progress",
    "read",
    "reading",
    "recorder",
    "sinks",
    "watch",
]
