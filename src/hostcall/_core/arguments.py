"""Checks the arguments and options that several public functions share."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hostcall._core.errors import SpecError
from hostcall._core.host_code import handle, layers
from hostcall._core.signatures import accepts, own_option, signature_of
from hostcall._core.source import Look, look


def check_function(
    fn: Any, usage: str, awaits: bool = False, returns: bool = True
) -> Look:
    """Returns what is known of a function; refuses what is not a plain one.

    Calling a coroutine or generator function runs none of its code.

    Args:
        fn: what the user gave.
        usage: how to call the public function.
        awaits: the caller runs coroutine functions on the event loop.
        returns: the caller uses what the function returns.
    """
    if not callable(fn):
        raise SpecError(
            f"hostcall: the first argument should be a function, got {fn!r}. Write"
            f" {usage}"
        )
    plain = type(fn) is types.FunctionType  # most are
    for each in () if plain else layers(fn):
        made = handle(each)
        if made is not None and (why := made._why_not()):
            raise SpecError(why, code="hc-result-spec")
    seen = look(fn)
    if not awaits:
        refuse_coroutines(fn)
    if seen.yields:
        instead = (
            "Make the generator outside the program, and pass a function that takes its"
            ' next value: lambda: next(generator), with order="ordered"'
            if returns
            else "What a tap returns is ignored, so nothing would run the generator:"
            " write a function without `yield`. If a generator should get the values,"
            " start it outside the program, and pass its method generator.send"
        )
        raise SpecError(
            f"hostcall: `{seen.name}` is a generator function: calling it only makes a"
            f" generator. {instead}",
            code="hc-coroutine",
        )
    return seen


def refuse_coroutines(fn: Any) -> None:
    """Refuses a coroutine function where nothing would await what it returns."""
    seen = look(fn)
    if seen.awaits:
        name = seen.name
        raise SpecError(
            f"hostcall: `{name}` is a coroutine function: calling it only makes a"
            " coroutine, which nothing here awaits. hc.call, hc.host, hc.Object and"
            " hc.tap run coroutine functions. Or pass a function that runs it:"
            f" lambda *args: asyncio.run({name}(*args))",
            code="hc-coroutine",
        )


def of_a_number(
    function: Callable[..., Any], what: str, number: str, name: str
) -> Callable[[Any], Any]:
    """Calls a user's function with a number, or without one if it requires none.

    `what`, `number` and `name` are what messages call the function, the number, and an
    argument for it.
    """
    if accepts(function, 0, ()):
        return lambda number: function()
    if accepts(function, 1, ()):
        return function
    signature = signature_of(function)
    assert signature is not None  # without one, all arguments are accepted
    needed = [
        p.name
        for p in signature.parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    raise SpecError(
        f"hostcall: {what} should require no argument, or only {number}, but it"
        f" requires {', '.join(needed)}. Write lambda: ... or lambda {name}: ...",
        code="hc-arguments",
    )


def first_default(function: Callable[..., Any]) -> str:
    """The first parameter of a function that requires none; "" if it has none."""
    signature = signature_of(function)
    if signature is None or not accepts(function, 0, ()):
        return ""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return next((p.name for p in signature.parameters.values() if p.kind in kinds), "")


def parse_mask(
    where: object,
    name: str,
    option: str = "where",
    fn: Callable[..., Any] | None = None,
) -> jax.Array | np.ndarray:
    """The mask as an array. `fn` is the function, if its own keywords come with it."""
    mask = where if isinstance(where, jax.Array) else np.asarray(where)
    if mask.dtype != np.bool_ or mask.shape != ():
        own = "" if fn is None else own_option(fn, option, where)
        raise SpecError(
            f"hostcall: {option}= of `{name}` should be one bool, got"
            f" {mask.dtype}{list(mask.shape)}. For one bool per row, vmap the function"
            f" that makes the call{own}",
            code="hc-option",
        )
    return mask


# --- Options -------------------------------------------------------------------------


def wrong(option: str, of: str, wanted: str, got: object, more: str = "") -> SpecError:
    """The error for `option=` of `of`, which should be `wanted`."""
    return SpecError(
        f"hostcall: {option}= of {of} should be {wanted}, got {got!r}{more}",
        code="hc-option",
    )


def conflict(of: str, what: str) -> SpecError:
    """The error for options of `of` that do not go together."""
    return SpecError(f"hostcall: {of} has {what}", code="hc-conflict")


def choices(allowed: Sequence[object]) -> str:
    return f"one of {', '.join(map(repr, allowed))}"


def of_all_processes(processes: object, limit: object, who: str, alone: str) -> bool:
    """Whether all processes take part; refuses wrong options. `alone` is the remedy."""
    if processes is None:
        return False
    if processes != "all":
        raise wrong("processes", who, "'all'", processes, f". Leave it out for {alone}")
    if not isinstance(limit, (int, float)) or not limit > 0:
        raise wrong("limit", who, "a number of seconds above 0", limit)
    return True
