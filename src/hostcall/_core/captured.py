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
from typing import Any

import jax

from hostcall._core.host_code import is_partial, own_dictionary
from hostcall._core.source import closed_over


def has_tracers_text(value: Any) -> bool:
    """Whether this is a string into which a traced value was formatted."""
    return isinstance(value, str) and ("Traced<" in value or "Tracer(" in value)


def traced_values(fn: Any, seen: set[int]) -> Iterator[tuple[str, str, Any]]:
    """The traced values that a function would use.

    Of each the tracer, and before it a verb phrase that says how the function gets it,
    and what to call it as an argument.

    Args:
        fn: the function.
        seen: ids of the functions that have been searched already; `fn` is added.
    """
    if id(fn) in seen:
        return
    seen.add(id(fn))
    if is_partial(fn):
        given = {f"argument {i}": x for i, x in enumerate(fn.args)}
        given |= {f"`{k}`": x for k, x in fn.keywords.items()}
        for name, value in given.items():
            for tracer in _tracers_in(value):
                yield f"uses {name} of its functools.partial", "x", tracer
        yield from traced_values(fn.func, seen)
        return
    owner = None
    if type(fn) is types.MethodType:
        owner = fn.__self__
        fn = fn.__func__
    elif type(fn) is not types.FunctionType and not isinstance(fn, type):
        owner = fn
        fn = vars(type(fn)).get("__call__")  # an object that can be called
    if type(fn) is not types.FunctionType:
        return
    held = None if owner is None else own_dictionary(owner)
    if held is not None and fn.__code__.co_argcount:
        for path, tracer in _used(fn.__code__, fn.__code__.co_varnames[0], held, True):
            yield f"uses `{path}`", path.partition(".")[2], tracer
    code = fn.__code__
    values = fn.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    defaults = dict(zip(names, values, strict=True)) | (fn.__kwdefaults__ or {})
    for name, value in defaults.items():
        for tracer in _tracers_in(value):
            yield f"uses the default of `{name}`", name, tracer
    for name, value in closed_over(fn).items():
        if type(value) in (types.FunctionType, types.MethodType) or is_partial(value):
            for how, inner, tracer in traced_values(value, seen):
                yield f"uses `{name}`, which {how}", inner, tracer
        elif isinstance(value, jax.core.Tracer | list | tuple | dict):
            for path, tracer in _used(code, name, value):
                yield f"uses `{path}`", path, tracer


def _tracers_in(value: Any) -> list[Any]:
    """The tracers in a value or in the containers in it, among the first 300 items.

    The limit keeps the check cheap for large containers.
    """
    found = []
    todo = [value]
    left = 300
    while todo and left:
        value = todo.pop()
        left = left - 1
        if isinstance(value, jax.core.Tracer):
            found.append(value)
        elif isinstance(value, list | tuple | dict):
            inner = value.values() if isinstance(value, dict) else value
            todo += itertools.islice(inner, left)
    return found


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


def _used(
    code: types.CodeType, name: str, value: Any, of_object: bool = False
) -> Iterator[tuple[str, Any]]:
    """(source, tracer) for each use of a tracer that is in the variable `name`.

    The code, and functions that are defined in it, are searched for places that read
    the variable. `x[0]["loss"]`, with constants, is followed to the item. With
    `of_object`, `value` is the dictionary of the object that the variable holds.
    """
    steps = _steps(code)
    for i, step in enumerate(steps):
        if not _reads(step, name):
            continue
        path = name
        found = value
        rest = steps[i + 1 :]
        if of_object:
            if rest[0].opname not in _ATTRIBUTES or rest[0].argval not in value:
                continue
            path = f"{name}.{rest[0].argval}"
            found = value[rest[0].argval]
            rest = rest[1:]
        while isinstance(found, list | tuple | dict) and _is_index(rest):
            path = f"{path}[{rest[0].argval!r}]"
            try:
                found = found[rest[0].argval]
            except (KeyError, IndexError, TypeError):
                found = None  # the function will raise this error when it runs
            rest = rest[2:]
        before = steps[i - 1].argval if i and steps[i - 1].opname in _CALLED else None
        asks = before in _ASK or _asks(rest)
        wants = before in _WANT or (rest and "FORMAT" in rest[0].opname)
        if isinstance(found, jax.core.Tracer):
            if not asks:
                yield path, found
        elif wants or (of_object and not asks):  # a loop over what an object holds
            for tracer in _tracers_in(found):
                yield path, tracer
    for inner in code.co_consts:  # code of the functions defined inside
        if isinstance(inner, types.CodeType) and name in inner.co_freevars:
            yield from _used(inner, name, value, of_object)


@functools.lru_cache(maxsize=1024)
def _steps(code: types.CodeType) -> list[dis.Instruction]:
    return [i for i in dis.get_instructions(code) if i.opname not in _PASSED_OVER]


def _reads(step: dis.Instruction, name: str) -> bool:
    """Whether this instruction puts the variable on the stack, perhaps as the last of
    two.
    """
    if step.opname not in _READS and "LOAD_FAST" not in step.opname:
        return False
    last = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
    return bool(last == name)


def _is_index(rest: Sequence[dis.Instruction]) -> bool:
    """Whether the next two instructions index with a constant."""
    return (
        len(rest) > 1
        and rest[0].opname in _CONSTANTS
        and (rest[1].opname == "BINARY_SUBSCR" or rest[1].argrepr == "[]")
    )


_PASSED_OVER = {"CACHE", "PRECALL", "PUSH_NULL", "EXTENDED_ARG", "NOP"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
_CALLED = {"LOAD_GLOBAL", "LOAD_NAME"} | _ATTRIBUTES
_READS = {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
# Python 3.15 has the last one for None, -1 and others.
_CONSTANTS = {"LOAD_CONST", "LOAD_SMALL_INT", "LOAD_COMMON_CONSTANT"}


def _asks(rest: Sequence[dis.Instruction]) -> bool:
    """Whether the next instructions use only what is known of a traced value."""
    if not rest:
        return False
    if rest[0].opname in _ATTRIBUTES:
        return rest[0].argval in _KNOWN
    if rest[0].opname in _CONSTANTS and rest[0].argval is None:
        return any(step.opname == "IS_OP" for step in rest[1:2])
    return rest[0].opname.endswith("_NONE")  # `POP_JUMP_IF_NONE` and its like
