"""Whether two objects are one definition, made again.

Whoever runs a cell of a notebook again, or reloads a module, defines its functions
again, and wants the new ones. Whoever calls a factory twice makes two functions, which
may hold other data. Python tells them apart: it compiles a cell anew each time, so a
definition that ran again has another code object. Two closures of one factory share
theirs.

Lambdas, local functions, feeds, partials, bound methods and callable instances have no
code of their own by which to know them. They are made again if the statement that
registers them is: another code object, of the same line.
"""

from __future__ import annotations

import sys
import types
from typing import Any, NamedTuple

from hostcall._core.host_code import handle, is_partial, text_of, wrapped
from hostcall._core.source import inspect_callable, is_anonymous, users_frame


class Statement(NamedTuple):
    """A line of the user's that runs.

    Attributes:
        code: the code object that it is in.
        file, line: where it is.
        module: the name of its module.
    """

    code: types.CodeType
    file: str
    line: int
    module: str


def statement() -> Statement:
    """The user's line that called hostcall on this thread."""
    frame = users_frame()
    code = frame.f_code
    module = frame.f_globals.get("__name__", "")
    return Statement(code, code.co_filename, frame.f_lineno, str(module))


def is_again(one: object, by: Statement, other: object, now: Statement) -> bool:
    """Whether `other`, which `now` registers, is `one`, which `by` did, made again."""
    if _kind(one) != _kind(other):
        return False
    before = _own_code(one)
    after = _own_code(other)
    if before is not None and after is not None and before is not after:
        return True
    return by.code is not now.code and _where(by) == _where(now)


def may_be_again(one: object, other: object) -> bool:
    """Whether two objects have the same definition, or lambdas of one function."""
    return _kind(one)[:4] == _kind(other)[:4]


def _kind(thing: Any) -> tuple[object, ...]:
    """Equal for objects that may come from one definition. Those without a name of
    their own must come from the same line.
    """
    core = _core(thing)
    given = handle(thing)
    if given is not None and is_feed(thing):
        return ("feed", given._held().__qualname__)
    named = core if text_of(core, "__qualname__") else type(core)
    name = (type(thing).__qualname__, type(core).__qualname__)
    found = (*name, text_of(named, "__module__"), named.__qualname__)
    if not is_anonymous(core):
        return found
    place = inspect_callable(core).place
    return (*found, place.file, place.line)


def is_feed(thing: object) -> bool:
    given = handle(thing)
    return given is not None and given._definition() is None


def _core(thing: Any) -> Any:
    """The function behind a HostFunction, a decorator, a partial, a bound method."""
    seen: list[object] = []  # a chain may lead back to itself
    while not any(thing is one for one in seen):
        seen.append(thing)
        given = handle(thing)
        if is_partial(thing):
            thing = thing.func
        elif type(thing) is types.MethodType:
            thing = thing.__func__
        elif given is not None:
            thing = given._definition() or thing
        elif not isinstance(thing, type):
            thing = wrapped(thing) or thing
    return thing


def _own_code(thing: object) -> object:
    """What a `def` or `class` statement makes anew each time that it runs, if the
    object holds nothing besides; else None.
    """
    given = handle(thing)
    if given is not None:
        thing = given._definition()
    core = _core(thing)
    if is_anonymous(core):
        return None
    if isinstance(thing, type):
        return thing
    return core.__code__ if type(thing) is type(core) is types.FunctionType else None


def _where(by: Statement) -> tuple[object, ...]:
    """Of an edited cell the line and the name of the "file" are others."""
    if by.module == "__main__" and "__file__" not in vars(sys.modules["__main__"]):
        return (by.module, by.code.co_qualname)
    return (by.module, by.code.co_qualname, by.file, by.line)
