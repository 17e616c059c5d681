"""`hc.register`: names host code, so that programs can leave the process.

A program that leaves the process takes names with it, never code. Whoever loads it
looks the names up here, and only here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from hostcall._core.errors import RegistryError, SpecError, wrong
from hostcall._core.host_code import handle
from hostcall._core.registered import Name, names
from hostcall._core.source import inspect_callable, name_of
from hostcall._export import definitions

T = TypeVar("T", bound=Callable[..., Any])

_NAME = re.compile(r"[A-Za-z_]\w*([./:-]\w+)*")


def register(name: str, *, version: int = 1) -> Callable[[T], T]:
    """Names host code, so that programs that call it can leave the process.

    ::

        @hc.register("my_package.simulate", version=1)
        def simulate(x): ...

    An exported program (`hc.export`, `jax.export`) and a serialized executable hold the
    name, never the code. Where they are loaded, the same name must be registered first,
    mostly by importing the module that does so here.

    Args:
        name: words joined by dots, such as "my_package.simulate". One object has one
            name.
        version: an int. Count it up when the arguments or results change, so that old
            programs are refused and not misread. Several versions may be registered
            side by side, for old programs and new ones.

    Returns:
        A decorator, which returns what it gets: a function, what `hc.host` returned, a
        `hc.feed`, or the factory of a `hc.Object`.

    Running a cell or a module again registers its objects anew, whatever they are.
    What `hc.load` reads afterwards calls the new ones, and so does a program that was
    loaded before and has not run so far. Programs that have run keep the old ones, and
    so does what `jax.export.deserialize` reads, until jax.clear_caches().

    Raises:
        SpecError: the name, the version or the object can't be used.
        RegistryError: something else has this name, or the object has another one. Two
            closures of one factory, two lambdas, and bound methods of two objects may
            hold different data, so they need two names.

    Cost: none when a program runs.
    """

    if not isinstance(name, str):
        raise wrong(
            "name",
            "hc.register",
            "a text, such as 'my_package.simulate'",
            name,
            '. Write hc.register("my_package.simulate")(f), or it as a decorator',
        )

    def decorate(thing: T) -> T:
        _add(thing, name, version)
        return thing

    return decorate


def held_of(thing: Any) -> Any:
    """What programs hold of a registered object: a feed's stream; else the object."""
    given = handle(thing)
    return thing if given is None else given._held()


def _add(thing: Any, name: str, version: int) -> None:
    key = _check(thing, name, version)
    held = held_of(thing)
    by = definitions.statement()
    with names.lock:
        before = names.things.get(key)
        had = names.names.get(held)
        other, where = before or (thing, by)
        if had is not None and had != key:
            raise RegistryError(
                f"hostcall: {_said(thing)} is registered as {had}, so it can't get the"
                f" name {key} too: a program would not know which to write down"
            )
        if other is not thing:
            if not definitions.is_again(other, where, thing, by):
                raise RegistryError(_taken(key, other, where, thing))
            names.names.pop(held_of(other), None)
            with contextlib.suppress(TypeError):  # it has no weak references
                names.replaced[held_of(other)] = (
                    f"its name, {key}, was given to another definition at {by.file}:"
                    f"{by.line}. Use what was registered there, and trace the program"
                    " again"
                )
            where = by
        names.things[key], names.names[held] = (thing, where), key


def why_nameless(held: Any) -> str:
    """Why an object that had a name has none now; "" if it never had one."""
    try:
        return names.replaced.get(held, "")
    except TypeError:  # unhashable, or without weak references
        return ""


def find(name: str, version: int) -> Any:
    """The object of that name. Raises RegistryError as `require` does."""
    key = Name(name, version)
    require([key])
    return names.things[key][0]


def require(keys: Iterable[Name]) -> None:
    """Raises RegistryError, which says what is registered, if some name is not."""
    lines = []
    missing = [key for key in keys if key not in names.things]
    for key in missing:
        others = sorted(k.version for k in list(names.things) if k.name == key.name)
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


def _check(thing: Any, name: str, version: Any) -> Name:
    def refused(said: str) -> SpecError:
        return SpecError(f"hostcall: {said}", code="hc-registry")

    if not _NAME.fullmatch(name):
        raise refused(
            f"hc.register got the name {name!r}. Give words joined by dots, such as"
            ' "my_package.simulate", which all processes use'
        )
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise refused(
            f"version= of {name!r} should be an int of 0 or more, got {version!r}."
            " Count it up when the function's results or arguments change"
        )
    if not callable(thing):
        raise refused(
            f"hc.register({name!r}) got {thing!r}, which is not callable. Register a"
            " function, a hc.host function, a hc.feed, or the factory of a hc.Object"
        )
    try:
        hash(held_of(thing))
    except TypeError:
        raise refused(
            f"hc.register({name!r}) got {thing!r}, which can't be hashed, so programs"
            " can't be searched for it. Register a function that calls it"
        ) from None
    return Name(name, version)


def _taken(key: Name, other: Any, by: definitions.Statement, thing: Any) -> str:
    advice = ""
    if definitions.may_be_again(other, thing):
        advice = (
            ". Two functions of one factory, two lambdas, or two feeds may hold"
            " different data, so neither replaces the other. A cell or module may be"
            " run again as it is"
        )
    return (
        f"hostcall: the name {key} is registered for {_said(other)} at {by.file}:"
        f"{by.line}, so it can't be given to {_said(thing)}. Use another name, or a"
        f" higher version={advice}"
    )


def _said(thing: Any) -> str:
    shown = held_of(thing) if definitions.is_feed(thing) else thing
    name = name_of(shown)
    source = inspect_callable(shown).source
    return f"`{name}`{source.removeprefix(name)}"
