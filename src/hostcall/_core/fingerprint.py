"""A number for what a function is, equal in all processes that run the same source.

It is made of names and bytecode, so moving a function to another line does not change
it, and neither do comments. Data is left out: what a closure, a default or a
`functools.partial` holds may be a path or a seed, which change from run to run, and
then a program from JAX's compilation cache would never fit. Functions among them count,
since a decorator's wrapper is otherwise the same for all that it wraps.

Different functions may have the same fingerprint. Nothing relies on that: whoever needs
to tell two live functions apart counts them (_primitives/lowering.py).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeAlias

from hostcall._core.host_code import as_host_code, is_partial, text_of, wrapped
from hostcall._core.source import closed_over, name_of

# What counts of a thing, as tuples and texts.
Told: TypeAlias = object

# How deep a function is looked for in wrappers.
_DEPTH = 8


def fingerprint(thing: Any) -> int:
    """63 bits (all that JAX writes into a program), never 0.

    Args:
        thing: a function, or a tuple of functions, texts and numbers.
    """
    return int.from_bytes(_digest(_told(thing, _DEPTH)), "little") >> 1 or 1


def _digest(told: Told) -> bytes:
    return hashlib.blake2b(repr(told).encode(), digest_size=8).digest()


def _told(thing: Any, depth: int) -> Told:
    """What counts of a thing, as tuples and texts."""
    if isinstance(thing, (tuple, list)):
        return tuple([_told(part, depth) for part in thing])
    if isinstance(thing, (str, bytes, int, float, type(None))):
        return thing
    if depth == 0:
        return type(thing).__qualname__
    if type(thing) is FunctionType:
        return _told_function(thing, depth - 1)
    if type(thing) is MethodType:
        return type(thing.__self__).__qualname__, _told(thing.__func__, depth - 1)
    if is_partial(thing):
        parts = thing.func, *_functions(thing.args, thing.keywords.values())
        return "partial", _told(parts, depth - 1)
    told = as_host_code(thing).parts()
    if told is not None:
        return type(thing).__qualname__, _told(told, depth - 1)
    inner = wrapped(thing)  # jax.jit and its like
    if inner is None and callable(thing):
        inner = type(thing).__call__
    if type(inner) is not FunctionType:
        return text_of(thing, "__module__"), name_of(thing)
    return type(thing).__qualname__, name_of(thing), _told(inner, depth - 1)


def _told_function(function: FunctionType, depth: int) -> Told:
    defaults = function.__defaults__ or ()
    named = function.__kwdefaults__ or {}
    held: Told = ()
    if defaults or named or function.__closure__:
        every = defaults, named.values(), closed_over(function).values()
        held = _told(_functions(*every), depth)
    code = _told_code(function.__code__)
    return function.__module__, function.__qualname__, code, held


def _functions(*things: Iterable[object]) -> list[object]:
    every = itertools.chain(*things)
    return [t for t in every if type(t) in (FunctionType, MethodType)]


@functools.lru_cache(maxsize=4096)  # equal code gives an equal result
def _told_code(code: CodeType) -> bytes:
    consts = (
        _told_code(const)
        if isinstance(const, CodeType)
        # The order of a set depends on the process.
        else repr(sorted(map(repr, const)) if isinstance(const, frozenset) else const)
        for const in code.co_consts
    )
    return _digest((code.co_name, code.co_code, code.co_names, tuple(consts)))
