"""Traced values that a host function would use when it runs, and they are gone.

A function written inside a traced one can name its variables, of which JAX has only
stand-ins: shapes and dtypes are known, values are not. What is looked at are the
variables that the function, or a function that it uses, has from those around it, its
defaults, and what `functools.partial` has given it. What is not are attributes of
objects (a bound method's `self` too) and globals, where a traced value seldom is.
"""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax


def has_tracers_text(value: Any) -> bool:
    """Whether this is a text that a traced value was formatted into."""
    return isinstance(value, str) and ("Traced<" in value or "Tracer(" in value)


@dataclass(frozen=True)
class Found:
    """A traced value, how a function comes by it, and what to call it."""

    how: str
    name: str
    aval: str


def traced_values(fn: Any, seen: set[int]) -> Iterator[Found]:
    """The traced values that a function would use. `seen`: functions not to look at."""
    if id(fn) in seen:
        return
    seen.add(id(fn))
    if isinstance(fn, functools.partial):
        given = [(f"argument {i}", x) for i, x in enumerate(fn.args)]
        given += [(f"`{k}`", x) for k, x in fn.keywords.items()]
        for name, value in given:
            for tracer in _tracers_in(value):
                yield Found(
                    f"has from functools.partial, as {name}", "x", _aval(tracer)
                )
        yield from traced_values(fn.func, seen)
        return
    fn = getattr(fn, "__func__", fn)
    if not isinstance(fn, types.FunctionType):
        return
    for name, value in _defaults(fn):
        for tracer in _tracers_in(value):
            yield Found(f"has as the default of `{name}`", name, _aval(tracer))
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # it is empty
            continue
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            for found in traced_values(value, seen):
                through = f"uses `{name}`, which {found.how}"
                yield Found(through, found.name, found.aval)
        elif isinstance(value, jax.core.Tracer | list | tuple | dict):
            for path, tracer in _used(fn.__code__, name, value):
                yield Found(f"uses `{path}`", path, _aval(tracer))


def _defaults(fn: types.FunctionType) -> list[tuple[str, Any]]:
    code, values = fn.__code__, fn.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return [*zip(names, values, strict=True), *(fn.__kwdefaults__ or {}).items()]


def _tracers_in(value: Any) -> list[Any]:
    """Those among the first few hundred things in containers."""
    found, todo, left = [], [value], 300
    while todo and left:
        value, left = todo.pop(), left - 1
        if isinstance(value, jax.core.Tracer):
            found.append(value)
        elif isinstance(value, list | tuple | dict):
            inner = value.values() if isinstance(value, dict) else value
            todo += itertools.islice(inner, left)
    return found


def _aval(tracer: Any) -> str:
    return str(tracer.aval.str_short())


# What is known of a traced value.
_KNOWN = frozenset(
    {"aval", "dtype", "itemsize", "nbytes", "ndim", "shape", "size", "weak_type"}
)
# Functions that ask for no more.
_ASK = frozenset(
    {"len", "type", "isinstance", "hasattr", "id", "result_type", "typeof"} | _KNOWN
)
# Functions that want the values of a container.
_WANT = frozenset({"format", "print", "repr", "str"})


@dataclass(frozen=True)
class _Read:
    """A place where code reads a variable.

    Attributes:
        indices: constants that it is indexed with at once.
        asks: of what that gives, only what is known of a traced value is used.
        wants: if that is a container, the values in it are used.
    """

    indices: tuple[Any, ...]
    asks: bool
    wants: bool


def _used(code: types.CodeType, name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(source, tracer) of each use that code makes of a traced value which it has as,
    or in, the variable `name`.
    """
    for read in _reads(code, name):
        path, found, left = name, value, list(read.indices)
        while left and isinstance(found, list | tuple | dict):
            index = left.pop(0)
            path = f"{path}[{index!r}]"
            try:
                found = found[index]
            except (KeyError, IndexError, TypeError):
                break  # it will fail by itself
        if isinstance(found, jax.core.Tracer):
            if left or not read.asks:
                yield path, found
        elif read.wants and not left:
            for tracer in _tracers_in(found):
                yield path, tracer


@functools.lru_cache(maxsize=1024)
def _reads(code: types.CodeType, name: str) -> tuple[_Read, ...]:
    """All reads of a variable that code, or a function in it, has from outside."""
    found = []
    steps = [i for i in dis.get_instructions(code) if i.opname not in _PASSED_OVER]
    for i, step in enumerate(steps):
        if step.argval != name or step.opname not in _READS:
            continue
        indices, rest = _indices(steps[i + 1 :])
        before = steps[i - 1].argval if i and steps[i - 1].opname in _CALLED else None
        wants = before in _WANT or bool(rest and "FORMAT" in rest[0].opname)
        found.append(_Read(indices, before in _ASK or _asks(rest), wants))
    for inner in code.co_consts:  # functions that it makes
        if isinstance(inner, types.CodeType) and name in inner.co_freevars:
            found += _reads(inner, name)
    return tuple(found)


_PASSED_OVER = {"CACHE", "PRECALL", "PUSH_NULL", "EXTENDED_ARG", "NOP"}
_CALLED = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD"}
_READS = {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}


def _indices(
    rest: Sequence[dis.Instruction],
) -> tuple[tuple[Any, ...], Sequence[dis.Instruction]]:
    """The constants that a value is indexed with next, and what comes then."""
    found = []
    while (
        len(rest) > 1
        and rest[0].opname in ("LOAD_CONST", "LOAD_SMALL_INT")
        and (rest[1].opname == "BINARY_SUBSCR" or rest[1].argrepr == "[]")
    ):
        found.append(rest[0].argval)
        rest = rest[2:]
    return tuple(found), rest


def _asks(rest: Sequence[dis.Instruction]) -> bool:
    """Whether code asks a value only for what is known of a traced one."""
    if not rest:
        return False
    first, second = rest[0], rest[1] if len(rest) > 1 else rest[0]
    if first.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        return first.argval in _KNOWN
    if first.opname == "LOAD_CONST" and first.argval is None:
        return second.opname == "IS_OP"
    return first.opname.endswith("_NONE")  # a jump
