"""Optional packages, imported when they are first needed."""

from __future__ import annotations

import importlib
from typing import Any

from hostcall.errors import HostcallError


def needed(module: str, who: str, install: str | None = None) -> Any:
    """Imports `module`. The error names the package and who needs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = install or module.split(".")[0]
        raise HostcallError(
            f"hostcall: {who} needs the package {package}, which is not installed:"
            f' pip install "{package}"',
            code="hc-record",
        ) from error
