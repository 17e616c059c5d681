"""Finds traced values that a host function would use, which have no value when it runs.

A host function that is written inside a traced function can use that function's
variables. These hold tracers: their shapes and dtypes are known, their values are not.
The search covers the variables that the function, or another function that it uses,
takes from the functions around it, its defaults, the arguments that `functools.partial`
has bound, and the attributes that a method reads of its own object. It does not cover
globals and attributes of other objects, which seldom hold a tracer.
"""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from hostcall._core.host_code import is_partial


def has_tracers_text(value: Any) -> bool:
    """Whether this is a string into which a traced value was formatted."""
    return isinstance(value, str) and ("Traced<" in value or "Tracer(" in value)


class Found(NamedTuple):
    """A traced value that a function would use.

    Attributes:
        how: a verb phrase that says how the function gets it, for messages.
        name: what to call it as an argument.
        aval: its shape and dtype, as a text.
    """

    how: str
    name: str
    aval: str


def traced_values(fn: Any, seen: set[int]) -> Iterator[Found]:
    """The traced values that a function would use.

    Args:
        fn: the function.
        seen: ids of the functions that have been searched already; `fn` is added.
    """
    if id(fn) in seen:
        return
    seen.add(id(fn))
    if is_partial(fn):
        given = [(f"argument {i}", x) for i, x in enumerate(fn.args)]
        given += [(f"`{k}`", x) for k, x in fn.keywords.items()]
        for name, value in given:
            for tracer in _tracers_in(value):
                yield Found(f"uses {name} of its functools.partial", "x", _aval(tracer))
        yield from traced_values(fn.func, seen)
        return
    owner = None
    if type(fn) is types.MethodType:
        owner, fn = fn.__self__, fn.__func__
    elif type(fn) is not types.FunctionType and not isinstance(fn, type):
        owner, fn = fn, vars(type(fn)).get("__call__")  # an object that can be called
    if type(fn) is not types.FunctionType:
        return
    if owner is not None:
        for name, tracer in _attributes(owner, fn.__code__):
            yield Found(f"uses `{name}`", name.partition(".")[2], _aval(tracer))
    for name, value in _defaults(fn):
        for tracer in _tracers_in(value):
            yield Found(f"uses the default of `{name}`", name, _aval(tracer))
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # the cell is empty: the variable is not assigned yet
            continue
        if type(value) in (types.FunctionType, types.MethodType) or is_partial(value):
            for found in traced_values(value, seen):
                through = f"uses `{name}`, which {found.how}"
                yield Found(through, found.name, found.aval)
        elif isinstance(value, jax.core.Tracer | list | tuple | dict):
            for path, tracer in _used(fn.__code__, name, value):
                yield Found(f"uses `{path}`", path, _aval(tracer))


def _attributes(owner: Any, code: types.CodeType) -> Iterator[tuple[str, Any]]:
    """(source, tracer) for the attributes of its object that a method reads.

    They are read from the object's dictionary: an attribute may be a property, which
    would run.
    """
    if not code.co_argcount:
        return
    try:
        held = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return
    if type(held) is not dict or not held.keys() & set(code.co_names):
        return
    steps = [i for i in dis.get_instructions(code) if i.opname not in _PASSED_OVER]
    for i, step in enumerate(steps[1:], 1):
        name, before = step.argval, str(steps[i - 1].argval)
        if step.opname not in ("LOAD_ATTR", "LOAD_METHOD") or name not in held:
            continue
        if code.co_varnames[0] not in before or _asks(steps[i + 1 :]):
            continue
        for tracer in _tracers_in(held[name]):
            yield f"{code.co_varnames[0]}.{name}", tracer


def _defaults(fn: types.FunctionType) -> list[tuple[str, Any]]:
    code, values = fn.__code__, fn.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return [*zip(names, values, strict=True), *(fn.__kwdefaults__ or {}).items()]


def _tracers_in(value: Any) -> list[Any]:
    """The tracers in a value or in the containers in it, among the first 300 items.

    The limit keeps the check cheap for large containers.
    """
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


# The attributes of a traced value that are known while it is traced.
_KNOWN = frozenset(
    {"aval", "dtype", "itemsize", "nbytes", "ndim", "shape", "size", "weak_type"}
)
# Functions that use only those of their argument.
_ASK = frozenset(
    {"len", "type", "isinstance", "hasattr", "id", "result_type", "typeof"} | _KNOWN
)
# Functions that use the values in a container given to them.
_WANT = frozenset({"format", "print", "repr", "str"})


class _Read(NamedTuple):
    """A place where code reads a variable.

    Attributes:
        indices: constants with which the code indexes the variable there.
        asks: the code uses only known attributes of the result (`_KNOWN`).
        wants: if the result is a container, the code uses the values in it.
    """

    indices: tuple[Any, ...]
    asks: bool
    wants: bool


def _used(code: types.CodeType, name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(source, tracer) for each use of a tracer that is in the variable `name`."""
    for read in _reads(code, name):
        path, found, left = name, value, list(read.indices)
        while left and isinstance(found, list | tuple | dict):
            index = left.pop(0)
            path = f"{path}[{index!r}]"
            try:
                found = found[index]
            except (KeyError, IndexError, TypeError):
                break  # the function will raise this error when it runs
        if isinstance(found, jax.core.Tracer):
            if left or not read.asks:
                yield path, found
        elif read.wants and not left:
            for tracer in _tracers_in(found):
                yield path, tracer


@functools.lru_cache(maxsize=1024)
def _reads(code: types.CodeType, name: str) -> tuple[_Read, ...]:
    """All reads, in this code and in functions defined in it, of an outer variable."""
    found = []
    steps = [i for i in dis.get_instructions(code) if i.opname not in _PASSED_OVER]
    for i, step in enumerate(steps):
        if step.argval != name or step.opname not in _READS:
            continue
        indices, rest = _indices(steps[i + 1 :])
        before = steps[i - 1].argval if i and steps[i - 1].opname in _CALLED else None
        wants = before in _WANT or bool(rest and "FORMAT" in rest[0].opname)
        found.append(_Read(indices, before in _ASK or _asks(rest), wants))
    for inner in code.co_consts:  # code of the functions defined inside
        if isinstance(inner, types.CodeType) and name in inner.co_freevars:
            found += _reads(inner, name)
    return tuple(found)


_PASSED_OVER = {"CACHE", "PRECALL", "PUSH_NULL", "EXTENDED_ARG", "NOP"}
_CALLED = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD"}
_READS = {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
# Python 3.15 has the last one for None, -1 and others.
_CONSTANTS = {"LOAD_CONST", "LOAD_SMALL_INT", "LOAD_COMMON_CONSTANT"}


def _indices(
    rest: Sequence[dis.Instruction],
) -> tuple[tuple[Any, ...], Sequence[dis.Instruction]]:
    """The constants with which the next instructions index a value, and the rest."""
    found = []
    while (
        len(rest) > 1
        and rest[0].opname in _CONSTANTS
        and (rest[1].opname == "BINARY_SUBSCR" or rest[1].argrepr == "[]")
    ):
        found.append(rest[0].argval)
        rest = rest[2:]
    return tuple(found), rest


def _asks(rest: Sequence[dis.Instruction]) -> bool:
    """Whether the next instructions use only what is known of a traced value."""
    if not rest:
        return False
    first, second = rest[0], rest[1] if len(rest) > 1 else rest[0]
    if first.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        return first.argval in _KNOWN
    if first.opname in _CONSTANTS and first.argval is None:
        return second.opname == "IS_OP"
    return first.opname.endswith("_NONE")  # `POP_JUMP_IF_NONE` and its like
