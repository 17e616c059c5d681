"""Refuses to be imported where the engine can't work, before anything heavy is."""

from __future__ import annotations

from typing import Any


def _interpreters() -> Any | None:
    """Python's own module for interpreters, under the name that it has here."""
    try:
        import _interpreters as module  # from 3.13 on
    except ImportError:
        try:
            import _xxsubinterpreters as module  # type: ignore[no-redef]
        except ImportError:
            return None
    return module


_module = _interpreters()
if _module is not None and _module.get_current() != _module.get_main():
    raise ImportError(
        "hostcall can't be used in a sub-interpreter: threads of XLA's enter Python"
        " through the main one. Import it in the main interpreter, or use a process"
    )
