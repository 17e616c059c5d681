"""Fails the import in a sub-interpreter, where the engine can't work.

It is imported first, so that the refusal comes before any expensive import.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

_NAME = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"

try:
    _module: Any = importlib.import_module(_NAME)
except ImportError:  # a Python without them
    _module = None
if _module is not None and _module.get_current() != _module.get_main():
    raise ImportError(
        "hostcall can't be used in a sub-interpreter: XLA's threads enter Python"
        " through the main one. Import it in the main interpreter, or use a process"
    )
