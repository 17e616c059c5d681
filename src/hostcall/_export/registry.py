"""The host code that this process has registered by name (`hc.register`).

A program that leaves the process takes names with it, never code. Whoever loads it
looks the names up here, and only here.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from hostcall._core.errors import RegistryError, SpecError
from hostcall._core.host_code import handle
from hostcall._core.process import Guarded
from hostcall._core.source import name_of, source_of
from hostcall._export import definitions


class Name(NamedTuple):
    """A registered name with its version."""

    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.name!r} version {self.version}"


_NAME = re.compile(r"[A-Za-z_]\w*([./:-]\w+)*")


class Registered(NamedTuple):
    """What has a name.

    Attributes:
        thing: the object.
        by: the statement that registered it.
    """

    thing: Any
    by: definitions.Statement


class _Registry(Guarded):
    """
    Attributes:
        lock: guards the rest.
        things: what has a name.
        names: by the object that programs hold (`held_of`).
        replaced: what had a name before, with the reason why it has none now.
    """

    def __init__(self) -> None:
        self.things: dict[Name, Registered] = {}
        self.names: dict[Any, Name] = {}
        self.replaced: weakref.WeakKeyDictionary[Any, str]
        self.replaced = weakref.WeakKeyDictionary()
        super().__init__()


_all = _Registry()


def held_of(thing: Any) -> Any:
    """What programs hold of a registered object: a feed's stream; else the object."""
    given = handle(thing)
    return thing if given is None else given._held()


def add(thing: Any, name: str, version: int) -> None:
    """Registers an object.

    Raises:
        SpecError: the name, the version or the object can't be used.
        RegistryError: something else has the name, or the object another name.
    """
    key = _check(thing, name, version)
    held, by = held_of(thing), definitions.statement()
    with _all.lock:
        before, had = _all.things.get(key), _all.names.get(held)
        now = before or Registered(thing, by)
        if had is not None and had != key:
            raise RegistryError(
                f"hostcall: {_said(thing)} is registered as {had}, so it can't get the"
                f" name {key} too: a program would not know which to write down"
            )
        if now.thing is not thing:
            if not definitions.is_again(now.thing, now.by, thing, by):
                raise RegistryError(_taken(key, now.thing, now.by, thing))
            _all.names.pop(held_of(now.thing), None)
            _forget(held_of(now.thing), key, by)
            now = Registered(thing, by)
        _all.things[key], _all.names[held] = now, key


def _forget(held: Any, key: Name, by: definitions.Statement) -> None:
    why = (
        f"its name, {key}, was given to another definition at {by.file}:{by.line}. Use"
        " what was registered there, and trace the program again"
    )
    with contextlib.suppress(TypeError):  # no weak reference to it: it has no name then
        _all.replaced[held] = why


def why_nameless(held: Any) -> str:
    """Why an object that had a name has none now; "" if it never had one."""
    try:
        return _all.replaced.get(held, "")
    except TypeError:  # unhashable, or without weak references
        return ""


def name_of_held(held: Any) -> Name | None:
    """The name under which this object is registered, or None."""
    try:
        return _all.names.get(held)
    except TypeError:  # unhashable
        return None


def find(name: str, version: int) -> Any:
    """The object of that name. Raises RegistryError as `require` does."""
    key = Name(name, version)
    require([key])
    return _all.things[key].thing


def require(keys: Iterable[Name]) -> None:
    """Raises RegistryError, which says what is registered, if some name is not."""
    lines = []
    missing = [key for key in keys if key not in _all.things]
    for key in missing:
        others = sorted(k.version for k in list(_all.things) if k.name == key.name)
        have = ", ".join(map(str, others))
        lines.append(f"{key} (version {have} is registered here)" if have else f"{key}")
    if missing:
        name, version = missing[0]
        raise RegistryError(
            "hostcall: the program calls host code that this process has not"
            f" registered: {'; '.join(lines)}. Import the module that registers it, or"
            f" write @hc.register({name!r}, version={version}) at the function, before"
            " the program is loaded"
        )


def _check(thing: Any, name: Any, version: Any) -> Name:
    def wrong(said: str) -> SpecError:
        return SpecError(f"hostcall: {said}", code="hc-registry")

    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong(
            f"hc.register got the name {name!r}. Give words joined by dots, such as"
            ' "my_package.simulate", which all processes use'
        )
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise wrong(
            f"version= of {name!r} should be an int of 0 or more, got {version!r}."
            " Count it up when the function's results or arguments change"
        )
    if not callable(thing):
        raise wrong(
            f"hc.register({name!r}) got {thing!r}, which is not callable. Register a"
            " function, a hc.host function, a hc.feed, or the factory of a hc.Object"
        )
    try:
        hash(held_of(thing))
    except TypeError:
        raise wrong(
            f"hc.register({name!r}) got {thing!r}, which can't be hashed, so programs"
            " can't be searched for it. Register a function that calls it"
        ) from None
    return Name(name, version)


def _taken(key: Name, other: Any, by: definitions.Statement, thing: Any) -> str:
    line = f"{by.file}:{by.line}"
    advice = ""
    if definitions.may_be_again(other, thing):
        advice = (
            ". Two functions of one factory, two lambdas, or two feeds may hold"
            " different data, so neither replaces the other. A cell or module may be"
            " run again as it is"
        )
    return (
        f"hostcall: the name {key} is registered for {_said(other)} at {line}, so"
        f" it can't be given to {_said(thing)}. Use another name, or a higher version="
        f"{advice}"
    )


def _said(thing: Any) -> str:
    shown = held_of(thing) if definitions.is_feed(thing) else thing
    name, source = name_of(shown), source_of(shown)
    return f"`{name}`{source.removeprefix(name)}"
