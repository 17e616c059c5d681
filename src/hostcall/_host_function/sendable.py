"""What runs in the middle of host code, and may run in another process (`executor=`).

A worker on another machine has none of this process's treedefs and residuals. So it
gets one function and its arguments: one of the user's functions as a `Sendable`, or
several of them with a way to call them in turn. An exchange (`exchanges`) prepares the
arguments here, and takes the answer apart here.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from hostcall._core.host_code import HostCode
from hostcall._core.source import inspect_callable, name_of
from hostcall._host_function.ruled import Ruled
from hostcall._host_function.rules import (
    Function,
    Kind,
    Tree,
    Trees,
)
from hostcall._host_function.trees import forward_halves, is_pair
from hostcall._policies import executors
from hostcall._policies.layer import same

# Calls several of the user's functions, each by its first argument, a `Call`.
Calls: TypeAlias = Callable[..., Coroutine[Any, Any, Tree]]
Call: TypeAlias = Callable[..., Awaitable[Tree]]


# --- Several calls, one after the other ----------------------------------------------
#
# They are written once, as coroutine functions, for functions of both kinds: `await
# call(fn, *args)` is the value of a plain function or of a coroutine function. Both
# drivers are sent to a worker together with the calls and the arguments, which stay
# apart from each other so that an executor finds the arrays among them.


def call_in_turn(calls: Calls, *args: Tree) -> Tree:
    """Makes the calls. All functions are plain ones."""
    try:
        calls(_call, *args).send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a plain function never suspends the calls")


async def await_in_turn(calls: Calls, *args: Tree) -> Tree:
    """Makes the calls. Some of the functions may be coroutine functions."""
    return await calls(_await, *args)


async def _call(function: Function, *args: Tree) -> Tree:
    return function(*args)


async def _await(function: Function, *args: Tree) -> Tree:
    value = function(*args)
    return (await value) if inspect.isawaitable(value) else value


async def tangent_by_each(
    call: Call, rules: Trees, function: Function | None, result: Tree, args: Trees
) -> Tree:
    """(result, what the rules of the arguments give), whose sum is the tangent.

    `function` makes the result, unless that is known.
    """
    if function is not None:
        result = await call(function, *args)
    terms = [await call(rule, tangent, result, *args) for rule, tangent in rules]
    return result, terms


async def tangent_by_all(
    call: Call,
    rule: Function,
    function: Function | None,
    like: Tree,
    args: Trees,
    tangents: Tree,
) -> Tree:
    """(result, tangent), by a rule that returns both or only the tangent.

    `like` has the structure of the result. `function` makes the result, if the rule
    doesn't; without it the result is not wanted.
    """
    answer = await call(rule, args, tangents)
    if is_pair(answer, like):
        return answer
    result = None if function is None else await call(function, *args)
    return result, answer


class Recomputed(NamedTuple):
    """Cotangents, and the residual that had to be computed again for them."""

    residual: Tree
    cotangents: Tree


async def forward_and_backward(
    call: Call,
    forward: Function,
    backward: Function,
    name: str,
    args: Trees,
    backward_args: Trees,
) -> Recomputed:
    """What a backward rule gives whose residual the store has dropped.

    `backward_args` are its arguments behind the residual; `name` is for messages.
    """
    _, residual = forward_halves(await call(forward, *args), name)
    return Recomputed(residual, await call(backward, residual, *backward_args))


# --- One function --------------------------------------------------------------------


@dataclass(unsafe_hash=True)
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

    def __post_init__(self) -> None:
        # The one thing that is set, so that the class can't be frozen: what Python
        # itself, and executors, take for the name can be no property of a class.
        self.__qualname__ = name_of(self._code)

    @cached_property
    def _code(self) -> Function:
        return self.function._code_of(self.kind, self.index)

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        return self._code(*args, **kwargs)

    def source(self) -> str:
        return inspect_callable(self._code).source

    def __reduce__(self) -> tuple[Function, tuple[object, ...]]:
        code = self._code
        # Others send it by value, whatever its name means.
        by_name = executors.by_name(self.function.policy.pool)
        if (
            by_name
            and isinstance(code, types.FunctionType)
            and at_its_name(code) is not code
        ):
            return Ruled._code_of, (self.function, self.kind, self.index)
        return same, (code,)


def at_its_name(named: Ruled | types.FunctionType) -> object:
    """What its module has under its name; None without."""
    inner: object = sys.modules.get(named.__module__)
    for part in named.__qualname__.split("."):
        inner = getattr(inner, part, None)
    return inner
