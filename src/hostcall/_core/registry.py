"""The host code that this process has registered by name (`hc.register`).

A program that leaves the process takes names with it, never code. Whoever loads it
looks the names up here, and only here.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from hostcall._core.errors import RegistryError, SpecError
from hostcall._core.source import name_of, source_of


class Name(NamedTuple):
    """A registered name with its version."""

    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.name!r} version {self.version}"


_NAME = re.compile(r"[A-Za-z_]\w*([./:-]\w+)*")

# Guards both. Held for a few dictionary operations, and never while other code runs.
_lock = threading.Lock()
_things: dict[Name, Any] = {}
_names: dict[Any, Name] = {}  # by the object that programs hold (`held_of`)


def held_of(thing: Any) -> Any:
    """What programs hold of a registered object: a feed's stream; else the object."""
    return getattr(thing, "hostcall_held", thing)


def add(thing: Any, name: str, version: int) -> None:
    """Registers an object.

    Raises:
        SpecError: the name, the version or the object can't be used.
        RegistryError: something else has the name, or the object another name.
    """
    key = _check(thing, name, version)
    held = held_of(thing)
    with _lock:
        other, had = _things.get(key), _names.get(held)
        if other is not None and other is not thing and not _same(other, thing):
            raise RegistryError(
                f"hostcall: the name {key} is registered for {_said(other)}, so it"
                f" can't be given to {_said(thing)}. Use another name, or a"
                " higher version="
            )
        if had is not None and had != key:
            raise RegistryError(
                f"hostcall: {_said(thing)} is registered as {had}, so it can't get the"
                f" name {key} too: a program would not know which to write down"
            )
        if other is not None:
            _names.pop(held_of(other), None)
        _things[key] = thing
        _names[held] = key


def name_of_held(held: Any) -> Name | None:
    """The name under which this object is registered, or None."""
    try:
        return _names.get(held)
    except TypeError:  # unhashable
        return None


def find(name: str, version: int) -> Any:
    """The object of that name.

    Raises RegistryError, which says what is registered, if there is none.
    """
    found = _things.get(Name(name, version))
    if found is None:
        raise RegistryError(missing([Name(name, version)]))
    return found


def is_here(key: Name) -> bool:
    return key in _things


def missing(keys: list[Name]) -> str:
    """The text of an error about names that this process has not registered."""
    lines = []
    for key in keys:
        others = sorted(k.version for k in list(_things) if k.name == key.name)
        have = ", ".join(map(str, others))
        lines.append(
            f"{key}" + (f" (version {have} is registered here)" if others else "")
        )
    return (
        "hostcall: the program calls host code that this process has not registered:"
        f" {'; '.join(lines)}. Import the module that registers it, or write"
        f" @hc.register({keys[0].name!r}, version={keys[0].version}) at the function,"
        " before the program is loaded"
    )


def _check(thing: Any, name: Any, version: Any) -> Name:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SpecError(
            f"hostcall: hc.register got the name {name!r}. Give words joined by dots,"
            ' such as "my_package.simulate", which all processes use'
        )
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise SpecError(
            f"hostcall: version= of {name!r} should be an int of 0 or more, got"
            f" {version!r}. Count it up when the function's results or arguments change"
        )
    if not callable(thing):
        raise SpecError(
            f"hostcall: hc.register({name!r}) got {thing!r}, which is not callable."
            " Register a function, a hc.host function, a hc.feed, or the factory of a"
            " hc.Object"
        )
    try:
        hash(held_of(thing))
    except TypeError:
        raise SpecError(
            f"hostcall: hc.register({name!r}) got {thing!r}, which can't be hashed, so"
            " programs can't be searched for it. Register a function that calls it"
        ) from None
    return Name(name, version)


def _same(one: Any, other: Any) -> bool:
    """Whether two objects are the same definition, made again by running its cell or
    module a second time.
    """
    return type(one) is type(other) and _definition(one) == _definition(other)


def _definition(thing: Any) -> Any:
    qualname = getattr(thing, "__qualname__", None)
    return (getattr(thing, "__module__", None), qualname) if qualname else id(thing)


def _said(thing: Callable[..., Any]) -> str:
    place = source_of(thing)
    return f"`{name_of(thing)}`" + (f" ({place})" if place else "")
