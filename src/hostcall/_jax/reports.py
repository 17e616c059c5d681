"""The error that JAX raises for a failed program, as it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

# What JAX raises for a program that failed. It is JaxRuntimeError, but on JAX's fast
# path ValueError, which is only seen under somebody else's trace function.
REPORTS = (jax.errors.JaxRuntimeError, ValueError)


def tell_of_reports(tell: Callable[[str], None]) -> None:
    """Calls `tell(text)` whenever a JaxRuntimeError is made; what it raises is raised
    in the error's place.

    jaxlib's C++ makes the error on the thread that looks at the result, and runs
    nothing else of Python's in between: the class itself is the only place to stand.
    """
    plain = jax.errors.JaxRuntimeError.__init__

    def init(self: Any, *args: Any) -> None:
        plain(self, *args)
        if args and isinstance(args[0], str):
            tell(args[0])

    jax.errors.JaxRuntimeError.__init__ = init  # type: ignore[method-assign]
