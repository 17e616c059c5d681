"""What runs in the middle of host code, and may run in another process (`executor=`).

A worker on another machine has none of this process's treedefs and residuals. So it
gets one function and its arguments: the user's function, or one of the three generators
here, which call several of them and yield what these return. `function_code` prepares
the arguments, and takes the value apart.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax

from hostcall._core.coroutines import is_coroutine_function
from hostcall._core.host_code import HostCode
from hostcall._core.source import name_of, source_of
from hostcall._host_function.rules import RULES, forward_pair
from hostcall._host_function.trees import is_pair
from hostcall._policies import executors
from hostcall._policies.layer import same

Steps: TypeAlias = Generator[Any, Any, Any]


def rule_of(function: Any, kind: str) -> Any:
    """What a def* method was given for this kind of code of a HostFunction."""
    return getattr(function.rules, RULES[kind][0])


def code_of(function: Any, which: str, index: int | None = None) -> Callable[..., Any]:
    """One of the functions that the user gave to a HostFunction.

    `index` is the argument of a rule of `defjvps`; None for the first of them.
    """
    if which == "value":
        return function.fn  # type: ignore[no-any-return]
    given = rule_of(function, which)
    if which in ("forward", "backward"):
        return given.fwd if which == "forward" else given.bwd  # type: ignore[no-any-return]
    if index is not None:
        return given.each[index]  # type: ignore[no-any-return]
    return given.rule or next(filter(None, given.each))  # type: ignore[no-any-return]


def awaits(function: Any, kind: str) -> bool:
    """Whether host code of this kind may call a coroutine function of the user's."""
    if kind in ("jvp", "both"):
        given = function.rules.jvp
        called = [function.fn, given.rule, *given.each]
    elif kind == "backward":  # it runs the forward rule if its residual was dropped
        called = [function.rules.vjp.fwd, function.rules.vjp.bwd]
    else:
        called = [code_of(function, kind)]
    return any(is_coroutine_function(each) for each in called if each is not None)


def driven(steps: Any, *args: Any) -> Any:
    """Runs one of the generators below: each value that it yields goes back to it."""
    generator, value = steps(*args), None
    while True:
        try:
            value = generator.send(value)
        except StopIteration as end:
            return end.value


async def awaited(steps: Any, *args: Any) -> Any:
    """`driven`, if some of the functions are coroutine functions."""
    generator, value = steps(*args), None
    while True:
        try:
            value = generator.send(value)
        except StopIteration as end:
            return end.value
        if inspect.isawaitable(value):
            value = await value


def push_each(rules: Any, fn: Any, outs: Any, args: Any) -> Steps:
    """(result, what the rules of the arguments give), whose sum is the tangent."""
    if fn is not None:
        outs = yield fn(*args)
    terms = []
    for rule, tangent in rules:
        terms.append((yield rule(tangent, outs, *args)))
    return outs, terms


def push_whole(rule: Any, fn: Any, like: Any, args: Any, tangents: Any) -> Steps:
    """(result, tangent), by a rule that returns both or only the tangent."""
    value = yield rule(args, tangents)
    if is_pair(value, jax.tree_util.tree_structure(like)):
        return value
    return None if fn is None else (yield fn(*args)), value


def both_halves(forward: Any, backward: Any, name: str, args: Any, given: Any) -> Steps:
    """(residual, cotangents), if the store has dropped the residual."""
    _, residual = forward_pair((yield forward(*args)), name)
    return residual, (yield backward(residual, *given))


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
        if self._by_name and plain and at_its_name(self._fn) is not self._fn:
            return self._again
        return same, (self._fn,)


@dataclass(frozen=True)
class Sent(HostCode):
    """The Python function of a HostFunction in `hc.call`, for its executor."""

    function: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.fn(*args, **kwargs)

    def __post_init__(self) -> None:
        vars(self).update(__qualname__=name_of(self.function.fn))

    def source(self) -> str:
        return source_of(self.function.fn)

    def split(self, args: Any, kwargs: Any) -> Any:
        by_name = executors.by_name(self.function.options["executor"])
        sent = Sendable(self.function.fn, (code_of, (self.function, "value")), by_name)
        return partial(sent, **kwargs), args, same


def at_its_name(thing: Any) -> Any:
    """What its module has under its name; None without."""
    found: Any = sys.modules.get(thing.__module__)
    for part in thing.__qualname__.split("."):
        found = getattr(found, part, None)
    return found
