"""What runs in the middle of host code, and may run in another process (`executor=`).

A worker on another machine has none of this process's treedefs and residuals. So it
gets one function and its arguments: the user's function, or one of the three generators
here, which call several of them and yield what these return. `steps` prepares the
arguments, and takes the value apart.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TypeAlias

from hostcall._core.host_code import HostCode
from hostcall._core.source import inspect_callable, name_of
from hostcall._host_function.rules import (
    Function,
    Kind,
    Ruled,
    Tree,
    Trees,
    forward_pair,
)
from hostcall._host_function.trees import is_pair
from hostcall._policies import executors
from hostcall._policies.layer import same

# Calls functions of the user's: yields what one returns, and gets the value back.
Calls: TypeAlias = Generator[Tree, Tree, Tree]


def driven(calls: Callable[..., Calls], *args: Tree) -> Tree:
    """Runs one of the generators below: each value that it yields goes back to it."""
    generator = calls(*args)
    value = None
    while True:
        try:
            value = generator.send(value)
        except StopIteration as end:
            return end.value


async def awaited(calls: Callable[..., Calls], *args: Tree) -> Tree:
    """`driven`, if some of the functions are coroutine functions."""
    generator = calls(*args)
    value = None
    while True:
        try:
            value = generator.send(value)
        except StopIteration as end:
            return end.value
        if inspect.isawaitable(value):
            value = await value


def push_each(rules: Trees, fn: Function | None, outs: Tree, args: Trees) -> Calls:
    """(result, what the rules of the arguments give), whose sum is the tangent."""
    if fn is not None:
        outs = yield fn(*args)
    terms = []
    for rule, tangent in rules:
        terms.append((yield rule(tangent, outs, *args)))
    return outs, terms


def push_whole(
    rule: Function, fn: Function | None, like: Tree, args: Tree, tangents: Tree
) -> Calls:
    """(result, tangent), by a rule that returns both or only the tangent."""
    value = yield rule(args, tangents)
    if is_pair(value, like):
        return value
    return None if fn is None else (yield fn(*args)), value


def both_halves(
    forward: Function, backward: Function, name: str, args: Tree, given: Tree
) -> Calls:
    """(residual, cotangents), if the store has dropped the residual."""
    _, residual = forward_pair((yield forward(*args)), name)
    return residual, (yield backward(residual, *given))


@dataclass(frozen=True)
class Sendable(HostCode):
    """A function of the user's that may be sent to a worker: one of a HostFunction.

    Functions are pickled by name. But a decorated function's name now means its
    HostFunction, and rules are often all called `_`. For such a function the
    HostFunction is pickled by name instead, and the worker takes the function from it.

    Attributes:
        function: the HostFunction.
        kind, index: as for `Rules.of`.
    """

    function: Ruled
    kind: Kind = "value"
    index: int | None = None
    _fn: Function = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        fn = self.function._code_of(self.kind, self.index)
        vars(self).update(_fn=fn, __qualname__=name_of(fn))

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        return self._fn(*args, **kwargs)

    def source(self) -> str:
        return inspect_callable(self._fn).source

    def __reduce__(self) -> tuple[Function, tuple[object, ...]]:
        fn = self._fn
        by_name = executors.by_name(self.function.policy.pool)
        if by_name and isinstance(fn, types.FunctionType) and at_its_name(fn) is not fn:
            return Ruled._code_of, (self.function, self.kind, self.index)
        return same, (fn,)


def to_send(
    function: Ruled, kind: Kind = "value", index: int | None = None
) -> Function:
    """One of a HostFunction's functions, in a form that its executor can send."""
    if function.policy.pool is None:
        return function._code_of(kind, index)
    return Sendable(function, kind, index)


def at_its_name(thing: Ruled | types.FunctionType) -> object:
    """What its module has under its name; None without."""
    found: object = sys.modules.get(thing.__module__)
    for part in thing.__qualname__.split("."):
        found = getattr(found, part, None)
    return found
