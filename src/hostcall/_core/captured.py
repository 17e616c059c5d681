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

from hostcall._core.host_code import is_partial, own_dictionary
from hostcall._core.source import closed_over


def has_tracers_text(value: Any) -> bool:
    """Whether this is a string into which a traced value was formatted."""
    return isinstance(value, str) and ("Traced<" in value or "Tracer(" in value)


class Capture(NamedTuple):
    """A traced value that a function would use.

    Attributes:
        phrase: how the function gets it, as a verb phrase: "uses `x`".
        name: what to call it as an argument.
        tracer: the value.
    """

    phrase: str
    name: str
    tracer: Any


def traced_values(fn: Any, ids_seen: set[int]) -> Iterator[Capture]:
    """The traced values that a function would use.

    Args:
        fn: the function.
        ids_seen: of the functions that have been searched already; `fn` is added.
    """
    if id(fn) in ids_seen:  # functions may use each other
        return
    ids_seen.add(id(fn))
    if is_partial(fn):
        yield from _in_partial(fn)
        yield from traced_values(fn.func, ids_seen)
        return
    owner = None
    if type(fn) is types.MethodType:
        owner = fn.__self__
        fn = fn.__func__
    elif type(fn) is not types.FunctionType and not isinstance(fn, type):
        owner = fn
        fn = vars(type(fn)).get("__call__")  # an object that can be called
    if type(fn) is not types.FunctionType:  # C's, whose variables nobody sees
        return
    if owner is not None:
        yield from _in_owner(fn, owner)
    yield from _in_defaults(fn)
    for name, value in closed_over(fn).items():
        if type(value) in (types.FunctionType, types.MethodType) or is_partial(value):
            for capture in traced_values(value, ids_seen):
                phrase = f"uses `{name}`, which {capture.phrase}"
                yield capture._replace(phrase=phrase)
        elif isinstance(value, jax.core.Tracer | list | tuple | dict):
            for path, tracer in _used(fn.__code__, name, value):
                yield Capture(f"uses `{path}`", path, tracer)


def _in_partial(fn: functools.partial[Any]) -> Iterator[Capture]:
    bound: dict[str, object] = {}
    for number, value in enumerate(fn.args):
        bound[f"argument {number}"] = value
    for name, value in fn.keywords.items():
        bound[f"`{name}`"] = value
    for label, value in bound.items():
        phrase = f"uses {label} of its functools.partial"
        for tracer in _tracers_in(value):
            yield Capture(phrase, "x", tracer)


def _in_owner(fn: types.FunctionType, owner: object) -> Iterator[Capture]:
    """Those that a method reads of its own object."""
    attributes = own_dictionary(owner)
    if attributes is None or not fn.__code__.co_argcount:
        return
    itself = fn.__code__.co_varnames[0]  # `self`, as it is usually called
    for path, tracer in _used(fn.__code__, itself, attributes, of_object=True):
        _, _, name = path.partition(".")
        yield Capture(f"uses `{path}`", name, tracer)


def _in_defaults(fn: types.FunctionType) -> Iterator[Capture]:
    code = fn.__code__
    values = fn.__defaults__ or ()
    # Defaults belong to the last parameters by position.
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    defaults = dict(zip(names, values, strict=True))
    defaults |= fn.__kwdefaults__ or {}
    for name, value in defaults.items():
        for tracer in _tracers_in(value):
            yield Capture(f"uses the default of `{name}`", name, tracer)


_MOST_LOOKS = 300


def _tracers_in(value: Any) -> list[Any]:
    """The tracers in a value or in the containers in it, among the first 300 items.

    The limit keeps the check cheap for large containers, and ends it in one that holds
    itself.
    """
    tracers = []
    stack = [value]
    looks = 0
    while stack and looks < _MOST_LOOKS:
        value = stack.pop()
        looks += 1
        if isinstance(value, jax.core.Tracer):
            tracers.append(value)
        elif isinstance(value, list | tuple | dict):
            items = value.values() if isinstance(value, dict) else value
            stack += itertools.islice(items, _MOST_LOOKS - looks)
    return tracers


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
    the variable. With `of_object`, `value` is the dictionary of the object that the
    variable holds.

    Whether a place uses the value, the instructions beside it say:

        x.shape             LOAD_DEREF x | LOAD_ATTR shape             known in a trace
        x is None           LOAD_DEREF x | LOAD_CONST None | IS_OP     known
        len(x)              LOAD_GLOBAL len | LOAD_DEREF x             known
        x + 1               LOAD_DEREF x                               a use
        m["loss"] + 1       LOAD_DEREF m | LOAD_CONST | BINARY_SUBSCR  a use of an item
        print(m)            LOAD_GLOBAL print | LOAD_DEREF m           a use of all of m
        m                   LOAD_DEREF m                               no use of items

    A tracer is used wherever nothing says that only its shape is asked for. A container
    is used only where it is printed or formatted: what else is done with it is not
    followed, since a correct program must not be refused.
    """
    steps = _steps(code)
    for i, step in enumerate(steps):
        if not _reads(step, name):
            continue
        # What the next instructions make of it: an attribute of the object, then an
        # item of the container in it, as far as they are constants.
        path = name
        reached = value
        rest = steps[i + 1 :]
        if of_object:
            attribute = rest[0].argval
            if rest[0].opname not in _ATTRIBUTES or attribute not in value:
                continue
            path = f"{name}.{attribute}"
            reached = value[attribute]
            rest = rest[1:]
        while isinstance(reached, list | tuple | dict) and _is_index(rest):
            index = rest[0].argval
            path = f"{path}[{index!r}]"
            try:
                reached = reached[index]
            except (KeyError, IndexError, TypeError):
                reached = None  # the function will raise this error when it runs
            rest = rest[2:]
        # What it is an argument of, if that is called with it alone.
        called = None
        if i > 0 and steps[i - 1].opname in _CALLED:
            called = steps[i - 1].argval
        asks = called in _ASK or _asks(rest)
        is_formatted = bool(rest) and "FORMAT" in rest[0].opname
        wants = called in _WANT or is_formatted
        if isinstance(reached, jax.core.Tracer):
            if not asks:
                yield path, reached
        elif wants or (of_object and not asks):  # a loop over what an object holds
            for tracer in _tracers_in(reached):
                yield path, tracer
    for const in code.co_consts:  # code of the functions defined inside
        if isinstance(const, types.CodeType) and name in const.co_freevars:
            yield from _used(const, name, value, of_object)


@functools.lru_cache(maxsize=1024)
def _steps(code: types.CodeType) -> list[dis.Instruction]:
    return [i for i in dis.get_instructions(code) if i.opname not in _PASSED_OVER]


def _reads(step: dis.Instruction, name: str) -> bool:
    """Whether this instruction puts the variable on the stack, perhaps as the last of
    two.
    """
    if step.opname not in _READS and "LOAD_FAST" not in step.opname:
        return False
    variable = step.argval
    if isinstance(variable, tuple):  # of an instruction that loads two
        variable = variable[-1]
    return bool(variable == name)


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
    step = rest[0]
    if step.opname in _ATTRIBUTES:  # x.shape
        return step.argval in _KNOWN
    if step.opname in _CONSTANTS and step.argval is None:  # x is None
        return len(rest) > 1 and rest[1].opname == "IS_OP"
    return step.opname.endswith("_NONE")  # `POP_JUMP_IF_NONE` and its like
