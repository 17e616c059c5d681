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

# What counts of a value, as tuples and texts, whose `repr` is hashed.
Essence: TypeAlias = object

# How deep a function is looked for in wrappers.
_DEPTH = 8


def fingerprint(value: Any) -> int:
    """63 bits (all that JAX writes into a program), never 0.

    Args:
        value: a function, or a tuple of functions, texts and numbers.
    """
    digest = _digest(_essence(value, _DEPTH))
    return int.from_bytes(digest, "little") >> 1 or 1


def _digest(essence: Essence) -> bytes:
    return hashlib.blake2b(repr(essence).encode(), digest_size=8).digest()


def _essence(value: Any, depth: int) -> Essence:
    """What counts of a value, as tuples and texts."""
    if isinstance(value, (tuple, list)):
        return tuple([_essence(item, depth) for item in value])
    if isinstance(value, (str, bytes, int, float, type(None))):
        return value
    kind = type(value)
    if depth == 0:  # wrappers that hold themselves have no end
        return kind.__qualname__
    if kind is FunctionType:
        return _of_function(value, depth - 1)
    if kind is MethodType:
        owner = type(value.__self__).__qualname__
        return owner, _essence(value.__func__, depth - 1)
    if is_partial(value):
        bound = _functions(value.args, value.keywords.values())
        return "partial", _essence((value.func, *bound), depth - 1)
    host_code_parts = as_host_code(value).parts()
    if host_code_parts is not None:
        return kind.__qualname__, _essence(host_code_parts, depth - 1)
    inner = wrapped(value)  # jax.jit and its like
    if inner is None and callable(value):
        inner = kind.__call__
    if type(inner) is not FunctionType:
        return text_of(value, "__module__"), name_of(value)
    return kind.__qualname__, name_of(value), _essence(inner, depth - 1)


def _of_function(function: FunctionType, depth: int) -> Essence:
    """What counts of a Python function: its name, its code, and functions in it."""
    defaults = function.__defaults__ or ()
    keyword_defaults = function.__kwdefaults__ or {}
    functions: Essence = ()
    if defaults or keyword_defaults or function.__closure__:
        closure = closed_over(function)
        in_it = _functions(defaults, keyword_defaults.values(), closure.values())
        functions = _essence(in_it, depth)
    code = _of_code(function.__code__)
    return function.__module__, function.__qualname__, code, functions


def _functions(*values_of: Iterable[object]) -> list[object]:
    """The functions among these: data may change from run to run."""
    values = itertools.chain(*values_of)
    return [value for value in values if type(value) in (FunctionType, MethodType)]


@functools.lru_cache(maxsize=4096)  # equal code gives an equal result
def _of_code(code: CodeType) -> bytes:
    consts = tuple([_of_constant(const) for const in code.co_consts])
    # Neither the line nor the file, which may differ between machines.
    return _digest((code.co_name, code.co_code, code.co_names, consts))


def _of_constant(const: object) -> Essence:
    if isinstance(const, CodeType):
        return _of_code(const)
    if isinstance(const, frozenset):  # whose order depends on the process
        return repr(sorted(map(repr, const)))
    return repr(const)
