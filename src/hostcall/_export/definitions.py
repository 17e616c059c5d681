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


def is_again(
    registered: object, by: Statement, candidate: object, now: Statement
) -> bool:
    """Whether `candidate`, which the statement `now` registers, is `registered`, which
    `by` did, made again.
    """
    if _kind(registered) != _kind(candidate):
        return False
    registered_code = _own_code(registered)
    candidate_code = _own_code(candidate)
    both_have_code = registered_code is not None and candidate_code is not None
    if both_have_code and registered_code is not candidate_code:
        # The `def` or `class` itself ran again. Two functions of one factory share it.
        return True
    # Without a definition of their own the line that registers them must have run
    # again, which a loop over closures does not: its code object is the same.
    return by.code is not now.code and _where(by) == _where(now)


def may_be_again(registered: object, candidate: object) -> bool:
    """Whether two objects have the same definition, or lambdas of one function."""
    return _kind(registered).names == _kind(candidate).names


class _Kind(NamedTuple):
    """Equal for objects that may come from one definition.

    Attributes:
        names: of classes, the module and the function.
        line: the file and line of a function without a name of its own, such as a
            lambda: all lambdas of a function have its name.
    """

    names: tuple[str, ...]
    line: tuple[str, int] | None = None


def _kind(target: Any) -> _Kind:
    as_handle = handle(target)
    if as_handle is not None and is_feed(target):
        return _Kind(("feed", as_handle._held().__qualname__))
    core = _core(target)
    # An instance has no name of its own: its class has.
    named = core if text_of(core, "__qualname__") else type(core)
    names = (
        type(target).__qualname__,
        type(core).__qualname__,
        text_of(named, "__module__"),
        named.__qualname__,
    )
    if not is_anonymous(core):
        return _Kind(names)
    place = inspect_callable(core).place
    return _Kind(names, (place.file, place.line))


def is_feed(target: object) -> bool:
    as_handle = handle(target)
    return as_handle is not None and as_handle._definition() is None


def _core(target: Any) -> Any:
    """The function behind a HostFunction, a decorator, a partial, a bound method."""
    visited: list[object] = []  # a chain may lead back to itself
    while not any(target is earlier for earlier in visited):
        visited.append(target)
        as_handle = handle(target)
        if is_partial(target):
            target = target.func
        elif type(target) is types.MethodType:
            target = target.__func__
        elif as_handle is not None:
            target = as_handle._definition() or target
        elif not isinstance(target, type):
            target = wrapped(target) or target
    return target


def _own_code(target: object) -> object:
    """What a `def` or `class` statement makes anew each time that it runs, if the
    object holds nothing besides; else None.
    """
    as_handle = handle(target)
    if as_handle is not None:
        target = as_handle._definition()
    core = _core(target)
    if is_anonymous(core):
        # A factory makes many of one code object, and they may hold other data.
        return None
    if isinstance(target, type):
        return target
    # A partial or a bound method holds arguments besides the code.
    is_function = type(target) is type(core) is types.FunctionType
    return core.__code__ if is_function else None


def _where(by: Statement) -> tuple[object, ...]:
    """The place of a statement, by which it is known if it runs again."""
    is_interactive = "__file__" not in vars(sys.modules["__main__"])
    if by.module == "__main__" and is_interactive:
        # An edited cell of a notebook has another line and another "file".
        return (by.module, by.code.co_qualname)
    return (by.module, by.code.co_qualname, by.file, by.line)
