"""Fails the import in a sub-interpreter, where the engine can't work.

It is imported first, so that the refusal comes before any expensive import.
"""

from __future__ import annotations

from typing import Any


def _interpreters() -> Any | None:
    """CPython's private module for interpreters, or None if there is none."""
    try:
        import _interpreters as module  # its name from Python 3.13 on
    except ImportError:
        try:
            import _xxsubinterpreters as module  # type: ignore[no-redef]
        except ImportError:
            return None
    return module


_module = _interpreters()
if _module is not None and _module.get_current() != _module.get_main():
    raise ImportError(
        "hostcall can't be used in a sub-interpreter: XLA's threads enter Python"
        " through the main one. Import it in the main interpreter, or use a process"
    )
