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

    def decorate(target: T) -> T:
        _add(target, name, version)
        return target

    return decorate


def held_of(target: Any) -> Any:
    """What programs hold of a registered object: a feed's stream; else the object."""
    as_handle = handle(target)
    return target if as_handle is None else as_handle._held()


def _add(target: Any, name: str, version: int) -> None:
    """Gives an object its name, unless either has another one."""
    key = _check(target, name, version)
    in_programs = held_of(target)
    by = definitions.statement()
    with names.lock:  # looking and changing are one step
        entry = names.things.get(key)
        old_name = names.names.get(in_programs)
        registered, statement = entry or (target, by)
        if old_name is not None and old_name != key:
            raise RegistryError(
                f"hostcall: {_said(target)} is registered as {old_name}, so it can't"
                f" get the name {key} too: a program would not know which to write"
                " down"
            )
        if registered is not target:
            # The name has another object, which may only be the same definition, made
            # again: whoever calls the name would get other code unawares.
            if not definitions.is_again(registered, statement, target, by):
                raise RegistryError(_taken(key, registered, statement, target))
            names.names.pop(held_of(registered), None)
            with contextlib.suppress(TypeError):  # it has no weak references
                names.replaced[held_of(registered)] = (
                    f"its name, {key}, was given to another definition at {by.file}:"
                    f"{by.line}. Use what was registered there, and trace the program"
                    " again"
                )
            statement = by
        # Registered again as it is, it keeps the statement that it had.
        names.things[key] = (target, statement)
        names.names[in_programs] = key


def why_nameless(in_programs: Any) -> str:
    """Why an object that had a name has none now; "" if it never had one."""
    try:
        return names.replaced.get(in_programs, "")
    except TypeError:  # unhashable, or without weak references
        return ""


def find(name: str, version: int) -> Any:
    """The object of that name. Raises RegistryError as `require` does."""
    key = Name(name, version)
    require([key])
    return names.things[key][0]


def require(keys: Iterable[Name]) -> None:
    """Raises RegistryError, which says what is registered, if some name is not."""
    missing = [key for key in keys if key not in names.things]
    if not missing:
        return
    name, version = missing[0]
    all_missing = "; ".join(map(_with_versions, missing))
    raise RegistryError(
        "hostcall: the program calls host code that this process has not"
        f" registered: {all_missing}. Import the module that registers it, or"
        f" write @hc.register({name!r}, version={version}) at the function, before"
        " the program is loaded"
    )


def _with_versions(missing: Name) -> str:
    """A name, with the versions of it that are registered, if there are any."""
    # A copy, since another thread may register something.
    registered = list(names.things)
    versions = sorted(key.version for key in registered if key.name == missing.name)
    if not versions:
        return str(missing)
    shown = ", ".join(map(str, versions))
    return f"{missing} (version {shown} is registered here)"


def _check(target: Any, name: str, version: Any) -> Name:
    """The name and version as a key; refuses what no program could hold."""

    def refused(text: str) -> SpecError:
        return SpecError(f"hostcall: {text}", code="hc-registry")

    if not _NAME.fullmatch(name):
        raise refused(
            f"hc.register got the name {name!r}. Give words joined by dots, such as"
            ' "my_package.simulate", which all processes use'
        )
    # True is an int, and would be version 1.
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise refused(
            f"version= of {name!r} should be an int of 0 or more, got {version!r}."
            " Count it up when the function's results or arguments change"
        )
    if not callable(target):
        raise refused(
            f"hc.register({name!r}) got {target!r}, which is not callable. Register a"
            " function, a hc.host function, a hc.feed, or the factory of a hc.Object"
        )
    # The table of names finds an object by its hash, when a program is lowered.
    try:
        hash(held_of(target))
    except TypeError:
        raise refused(
            f"hc.register({name!r}) got {target!r}, which can't be hashed, so programs"
            " can't be searched for it. Register a function that calls it"
        ) from None
    return Name(name, version)


def _taken(key: Name, registered: Any, by: definitions.Statement, target: Any) -> str:
    """The error for a name that another object has."""
    advice = ""
    if definitions.may_be_again(registered, target):
        advice = (
            ". Two functions of one factory, two lambdas, or two feeds may hold"
            " different data, so neither replaces the other. A cell or module may be"
            " run again as it is"
        )
    return (
        f"hostcall: the name {key} is registered for {_said(registered)} at {by.file}:"
        f"{by.line}, so it can't be given to {_said(target)}. Use another name, or a"
        f" higher version={advice}"
    )


def _said(target: Any) -> str:
    shown = held_of(target) if definitions.is_feed(target) else target
    name = name_of(shown)
    source = inspect_callable(shown).source
    return f"`{name}`{source.removeprefix(name)}"
