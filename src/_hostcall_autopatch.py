"""HOSTCALL_PATCH=1: `hostcall.patch_jax()` for programs that can't be changed.

hostcall_autopatch.pth imports this file if the variable is set when an interpreter
starts. This file then imports neither JAX nor hostcall. It installs an import hook,
which patches JAX as soon as the program imports it. HOSTCALL_PATCH=numpy means
`patch_jax(arrays="numpy")`.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
import threading
from types import ModuleType
from typing import Any

_OFF = ("", "0", "off", "no", "false")


class _After(importlib.abc.MetaPathFinder):
    """Imports hostcall right after jax, and patches jax right after hostcall.

    Other finders look for both modules. This one only wraps `exec_module` of the loader
    that they find.
    """

    def __init__(self, arrays: str) -> None:
        self._arrays = arrays
        self._asking = threading.local()

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        asking = self._asking.__dict__
        if name not in ("jax", "hostcall") or name in asking:
            return None
        asking[name] = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            del asking[name]
        if spec is None or spec.loader is None:
            return None
        plain = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            plain(module)
            if name == "jax":
                importlib.import_module("hostcall")
            else:
                sys.meta_path.remove(self)
                module.patch_jax(arrays=self._arrays)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    wanted = os.environ.get("HOSTCALL_PATCH", "").lower()
    if wanted in _OFF:
        return
    arrays = "numpy" if wanted == "numpy" else "jax"
    if hasattr(sys.modules.get("jax"), "jit"):  # JAX is imported already
        importlib.import_module("hostcall").patch_jax(arrays=arrays)
    else:
        sys.meta_path.insert(0, _After(arrays))


install()
