"""Installs what hostcall replaces in JAX (patches.py), where it is first needed.

A replacement that this JAX has no place for is left out, and so are the others of its
`Part`, since they work only together: then hostcall goes without the part, with a line
in the log, or refuses what needs it.

How a replacement is checked, where it is installed:

    there       its place is there
    fits        what stands there takes the arguments that the replacement passes on
    asked       the code of the JAX module that calls it still names it: a function
                that JAX defines and does not call any more is no place
    ours        what stands there afterwards is the replacement

The tests check that each one works, under each JAX of the range.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import logging
import threading
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any, Protocol

import jax

from hostcall._jax.door import (
    is_newer_than_tested,
    missing,
    refuse,
    require,
    unwrapped,
)
from hostcall._jax.needs import NEWEST, Part
from hostcall._jax.patches import PATCHES, Patch, When

logger = logging.getLogger("hostcall")

# --- What is installed ----------------------------------------------------------------


class _Installed:
    """
    Attributes:
        lock: guards the rest, and all that JAX has in the places of the table. It is
            held while nothing of JAX runs.
        uses: those whose replacements are there, which is read without the lock.
        undo: for each replacement what puts back what stood there, in their order.
        lost: why a part can't be installed.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler may come here once more
        self.uses: frozenset[When] = frozenset()
        self.undo: list[tuple[Patch, Callable[[], None]]] = []
        self.lost: dict[Part, str] = {}


_installed = _Installed()


def install(use: When) -> None:
    """Installs what this use needs, once. Costs 30 ns afterwards."""
    if use in _installed.uses:
        return
    with _installed.lock:
        if use in _installed.uses:
            return
        if is_newer_than_tested() and not _installed.uses:
            logger.warning(
                "jax %s is newer than the newest that hostcall was tested with, %s",
                jax.__version__,
                NEWEST,
            )
        # A program is put in order as it will run: after what a block puts into it. The
        # last replacement of a name is asked first, so those of calls come before.
        if use is When.OBSERVE and When.CALLS not in _installed.uses:
            _install_all(When.CALLS)
        _install_all(use)


def _install_all(use: When) -> None:
    """Installs the replacements of a use, part by part. The caller holds the lock."""
    by_part: dict[Part, list[Patch]] = {}
    for patch in PATCHES:
        if patch.when is use:
            by_part.setdefault(patch.part, []).append(patch)
    for part, patches in by_part.items():
        # All of a part or none: half of them would be worse than JAX alone.
        reason = _why_no_part(part, patches)
        if not reason:
            for patch in patches:
                _installed.undo.append((patch, _put(patch)))
        elif part not in _installed.lost:
            _installed.lost[part] = reason
            logger.warning(
                "hostcall goes without %s: %s; %s",
                part.value,
                reason,
                part.instead or "what needs it is refused",
            )
    _installed.uses |= {use}


def _why_no_part(part: Part, patches: list[Patch]) -> str:
    """Why a part can't be installed; "" if it can."""
    absent = missing(part)
    if absent:
        return f"jax {jax.__version__} has no {absent}"
    for patch in patches:
        reason = _why_not(patch)
        if reason:
            return reason
    return ""


def install_anew() -> None:
    """For a forked child: a thread that does not exist there may hold the lock."""
    _installed.lock = threading.RLock()


def restore() -> None:
    """Puts back what stood in JAX before, unless others have replaced it since. The
    next use installs it again.
    """
    with _installed.lock:
        # The last one first: one place may have two, of which the second calls the
        # first.
        while _installed.undo:
            _, put_back = _installed.undo.pop()
            put_back()
        _installed.uses = frozenset()
        _installed.lost.clear()


def lost(part: Part) -> str:
    """Why a part could not be installed; "" if it was, or was not tried yet."""
    return _installed.lost.get(part, "")


def need(part: Part) -> None:
    """Refuses what needs a part that does not work under this JAX."""
    require(part)
    if why := lost(part):
        refuse(part, f"place for it: {why}")


def states() -> list[tuple[Patch, str]]:
    """Each replacement, and its state in words."""
    # By identity: two replacements of one place follow each other.
    installed = {id(patch) for patch, _ in _installed.undo}
    return [(patch, _state(patch, id(patch) in installed)) for patch in PATCHES]


def _state(patch: Patch, is_installed: bool) -> str:
    if is_installed:
        return "JAX's own" if patch.if_absent and _has_own(patch) else "installed"
    reason = lost(patch.part)
    return f"left out: {reason}" if reason else "not installed"


# --- One replacement ------------------------------------------------------------------


def _named(text: str) -> Any:
    """What a text such as `jax._src.dispatch:RuntimeTokenSet` names."""
    module_name, _, path = text.partition(":")
    named: Any = importlib.import_module(module_name)
    for attribute in path.split(".") if path else ():
        named = getattr(named, attribute)
    return named


def _has_own(patch: Patch) -> bool:
    """Whether JAX has an entry that is not hostcall's."""
    entry = _named(patch.holder).get(_named(patch.name))
    return not str(getattr(entry, "__module__", "")).startswith("hostcall.")


def _why_not(patch: Patch) -> str:
    """Why this JAX has no place for a replacement; "" if it has."""
    version = f"jax {jax.__version__}"
    try:
        holder = _named(patch.holder)
        if patch.is_entry:
            target = holder[_named(patch.name)]
        else:
            target = getattr(holder, patch.name)
    except (ImportError, AttributeError):
        return f"{version} has no {patch}"
    except KeyError:
        return "" if patch.if_absent else f"{version} has no {patch}"
    if patch.takes and not _takes(target, patch.takes):
        expected = ", ".join(patch.takes)
        return f"{patch} of {version} takes other arguments than {expected}"
    for name in patch.has:
        if not hasattr(target, name):
            return f"{patch} of {version} has no {name}"
    if patch.asked_in and not _asks(_named(patch.asked_in), patch.name):
        return f"{version} does not call {patch} in {patch.asked_in}"
    return ""


def _takes(function: Any, wanted: tuple[str, ...]) -> bool:
    """Whether a function of JAX has these parameters first. One that is written in C++
    does not say.
    """
    function = unwrapped(function)
    if function is None:
        return True
    code = function.__code__
    parameters = [*code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        # CPython puts the name of *args behind those that go by keyword alone.
        rest = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
        parameters.append(f"*{rest}")
    return parameters[: len(wanted)] == [*wanted]


def _asks(module: ModuleType, name: str) -> bool:
    """Whether a function or method of a module names this one."""
    for member in vars(module).values():
        for code in _codes(member):
            if name in code.co_names:
                return True
    return False


def _codes(member: Any) -> list[CodeType]:
    """The codes of a function, or of the methods of a class, with those inside them."""
    if isinstance(member, type):
        codes_of_methods = map(_codes, vars(member).values())
        return list(itertools.chain.from_iterable(codes_of_methods))
    function = getattr(member, "__func__", member)  # of a static method
    function = getattr(function, "__wrapped__", function)  # of a cached one
    codes = [function.__code__] if isinstance(function, FunctionType) else []
    for code in codes:  # it grows: a lambda may be in a function that is in a method
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    return codes


def _put(patch: Patch) -> Callable[[], None]:
    """Installs a replacement; returns what puts back what stood there."""
    holder = _named(patch.holder)
    if patch.is_entry:
        key = _named(patch.name)
        stood = holder.get(key)
        if patch.if_absent and stood is not None:
            return lambda: None
        return put_entry(holder, key, _replacement(patch, stood))
    stood = getattr(holder, patch.name)
    replacement = _replacement(patch, stood)
    attribute = staticmethod(replacement) if patch.is_static else replacement
    put_back = put_attribute(holder, patch.name, attribute)
    assert getattr(holder, patch.name) is replacement, f"{patch} can't be replaced"
    return put_back


def _replacement(patch: Patch, stood: Any) -> Any:
    """What the functions of a row make, one after another, of what stood there."""
    for by in patch.by:
        make = _named("hostcall._jax." + by.replace(".", ":"))
        stood = make(stood)
    return stood


# --- Putting something into a place of JAX's, and back --------------------------------


class _Table(Protocol):
    """What `put_entry` asks of a table."""

    def get(self, key: Any, default: Any, /) -> Any: ...

    def __setitem__(self, key: Any, value: Any, /) -> None: ...

    def __delitem__(self, key: Any, /) -> None: ...


class _OwnAttributes:
    """What a module, a class or an object has itself, as a table by names.

    A static method is there as such. What a class inherits, or an object has of its
    class, is not there: putting it back would make it the holder's own.
    """

    def __init__(self, holder: object) -> None:
        self._holder = holder

    def get(self, name: str, default: Any, /) -> Any:
        return vars(self._holder).get(name, default)

    def __setitem__(self, name: str, value: object, /) -> None:
        setattr(self._holder, name, value)

    def __delitem__(self, name: str, /) -> None:
        delattr(self._holder, name)


_ABSENT = object()


def put_entry(table: _Table, key: object, value: object) -> Callable[[], None]:
    """Puts a value under a key of a table; returns what puts back what stood there,
    unless somebody has replaced the value since.
    """
    stood = table.get(key, _ABSENT)
    table[key] = value

    def put_back() -> None:
        if table.get(key, _ABSENT) is not value:
            return  # another library's replacement, which calls ours
        if stood is _ABSENT:
            del table[key]
        else:
            table[key] = stood

    return put_back


def put_attribute(holder: object, name: str, value: object) -> Callable[[], None]:
    """The same for an attribute of a module, a class or an object."""
    return put_entry(_OwnAttributes(holder), name, value)
