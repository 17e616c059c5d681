"""What runs in the middle of host code, and may run in another process (`executor=`).

A worker on another machine has none of this process's treedefs and residuals. So it
gets one function and its arguments: the user's function, or one of the three here that
call several of them. `host_code` prepares the arguments, and takes the value apart.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import jax

from hostcall._host_function.rules import forward_pair
from hostcall._host_function.trees import is_pair


def same(value: Any) -> Any:
    return value


def push_each(terms: Any, fn: Any, outs: Any, args: Any) -> Any:
    """(result, tangent); the tangent is the sum over the rules of the arguments."""
    if fn is not None:
        outs = fn(*args)
    total: Any = None
    for rule, tangent in terms:
        term = rule(tangent, outs, *args)
        total = term if total is None else jax.tree_util.tree_map(_add, total, term)
    return outs, total


def _add(left: Any, right: Any) -> Any:
    return left + right


def push_whole(rule: Any, fn: Any, like: Any, args: Any, tangents: Any) -> Any:
    """(result, tangent), by a rule that returns both or only the tangent."""
    value = rule(args, tangents)
    if is_pair(value, jax.tree_util.tree_structure(like)):
        return value
    return None if fn is None else fn(*args), value


def both_halves(forward: Any, backward: Any, name: str, args: Any, given: Any) -> Any:
    """(residual, cotangents), if the store has dropped the residual."""
    _, residual = forward_pair(forward(*args), name)
    return residual, backward(residual, *given)


class Sendable:
    """A function of the user's that may be sent to a worker.

    Functions are pickled by name. But a decorated function's name now means its
    HostFunction, and rules are often all called `_`. For such a function the
    HostFunction is pickled by name instead, and the worker takes the function from it.

    Args:
        fn: the function.
        again: (what returns the function in the worker, its arguments), all picklable.
        by_name: whether the executor sends functions by name.
    """

    def __init__(self, fn: Any, again: tuple[Any, ...], by_name: bool) -> None:
        self._fn, self._again, self._by_name = fn, again, by_name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fn(*args, **kwargs)

    def __reduce__(self) -> Any:
        plain = isinstance(self._fn, types.FunctionType)
        if self._by_name and plain and not _has_its_name(self._fn):
            return self._again
        return same, (self._fn,)


def _has_its_name(fn: Any) -> bool:
    found: Any = sys.modules.get(fn.__module__)
    for part in fn.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is fn
