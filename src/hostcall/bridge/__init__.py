"""Functions of other systems as functions of JAX programs, with their derivatives.

    torch       a torch function or nn.Module, differentiated by torch autograd

Each makes a `HostFunction`, as `hc.host` does. A bridge is imported when it is first
asked for, and what it leads to when it is first called.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hostcall.bridge._torch import torch

_LATER = {
    "torch": "_torch",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'hostcall.bridge' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hostcall.bridge.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


__all__ = [
    "torch",
]
