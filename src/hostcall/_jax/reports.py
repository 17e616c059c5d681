"""Notices each error that JAX makes for a failed program, at the time it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

# What JAX raises for a program that failed: JaxRuntimeError, and ValueError on its fast
# path. hostcall turns the ValueError into a JaxRuntimeError (native/base/report.h),
# except, on Python 3.11, under a debugger or where a thread of XLA's made the call.
REPORTS = (jax.errors.JaxRuntimeError, ValueError)


def tell_of_reports(tell: Callable[[str], None]) -> None:
    """Calls `tell(text)` whenever a JaxRuntimeError is made.

    If `tell` raises, that exception replaces the JaxRuntimeError. jaxlib's C++ makes
    the error on the thread that reads the result, and the constructor of the class is
    the only Python code that it runs on the way.
    """
    plain = jax.errors.JaxRuntimeError.__init__

    def init(self: Any, *args: Any) -> None:
        plain(self, *args)
        if args and isinstance(args[0], str):
            tell(args[0])

    jax.errors.JaxRuntimeError.__init__ = init  # type: ignore[method-assign]
