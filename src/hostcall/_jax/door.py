"""The door to JAX's private modules, which checks what is needed of them (needs.py).

`from hostcall._jax.door import core as _core` is JAX's module itself if it has all
names of the table. If it has not, it is a view of the module, where a `Missing` stands
for each name that is not there. It may be passed around, and raises where it is used:

    while hostcall is imported   an ImportError: without this, nothing works
    later                        a HostcallError with the code hc-jax

Both name the part, this JAX and the versions that are known to work. So a JAX that
nobody has seen loses only what needs what it has not.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any, NoReturn

import jax

from hostcall._jax.needs import (
    CALLED,
    INSTALL,
    MODULES,
    NEEDS,
    NEWEST,
    OLDEST,
    Need,
    Part,
)


def version_of(text: str) -> tuple[int, ...]:
    """A version as numbers: those of a development version too."""
    numbers = [part for part in text.split(".") if part.isdecimal()]
    return tuple(map(int, numbers))


JAX_VERSION = version_of(jax.__version__)


def is_newer_than_tested() -> bool:
    return version_of(NEWEST) < JAX_VERSION


def _is_in(need: Need) -> bool:
    """Whether this JAX is one of those that should have it."""
    if need.since and version_of(need.since) > JAX_VERSION:
        return False
    if not need.until:
        return True
    # "0.11" is until the last release of 0.11: only so many numbers are compared.
    until = version_of(need.until)
    return JAX_VERSION[: len(until)] <= until


# --- What is missing ------------------------------------------------------------------

# Why parts of hostcall don't work under this JAX: (part, what it has not).
_missing: dict[Part, list[str]] = {}
# What makes the error, once hostcall is imported.
_refusal: list[Callable[[str], Exception]] = []


def refuse_by(refusal: Callable[[str], Exception]) -> None:
    """Hostcall is imported: from now on, what needs something missing is refused alone.

    `refusal` makes the error of its text.
    """
    _refusal[:] = [refusal]


def refuse(part: Part, lack: str) -> NoReturn:
    """Refuses what needs something of JAX's that this JAX has not."""
    if not _refusal:
        raise unfit(f"{lack}, without which nothing of hostcall works")
    text = f"hostcall: {part.value} can't work with jax {jax.__version__}, which has no"
    raise _refusal[0](f"{text} {lack}. {_KNOWN}")


_KNOWN = (
    f"hostcall is known to work with jax {OLDEST} to {NEWEST}: {INSTALL}. Or install a"
    " newer hostcall"
)


def unfit(lack: str) -> ImportError:
    """The error of `import hostcall` under a JAX that has not this."""
    text = f"hostcall can't be imported under jax {jax.__version__}, which has no"
    return ImportError(f"{text} {lack}. {_KNOWN}", name="jax")


def unfit_for(error: ImportError | AttributeError) -> ImportError | None:
    """The same for an error of an import of one of JAX's public names; None if the
    error is about something else.
    """
    # An ImportError has the module's name, an AttributeError the module itself.
    module = error.name if isinstance(error, ImportError) else error.obj
    name = str(getattr(module, "__name__", module))
    package, _, _ = name.partition(".")
    if package not in ("jax", "jaxlib"):
        return None
    if _KNOWN in str(error):  # it is one of `unfit` already
        return None
    return unfit(f"name of its public modules that hostcall needs ({error})")


def missing(part: Part) -> str:
    """What this JAX has not of what a part of hostcall needs; "" if it has all."""
    for need in NEEDS:
        if need.part is part and need.module not in _LATE:
            module(need.module)  # which notes in `_missing` what it lacks
    return " and ".join(_missing.get(part, ()))


def require(part: Part) -> None:
    """Refuses what needs a part that does not work under this JAX."""
    if lack := missing_of(part):
        refuse(part, lack)


missing_of = functools.cache(missing)


class Missing:
    """Stands for something that this JAX has not. It raises where it is used."""

    __hash__ = object.__hash__

    def __init__(self, part: Part, path: str) -> None:
        self.__part = part
        self.__path = path

    def __refuse(self, *_: object, **__: object) -> NoReturn:
        refuse(self.__part, self.__path)

    def __getattr__(self, name: str) -> Missing:
        if name == "__code__":  # whoever asks a function what it takes
            self.__refuse()
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Missing(self.__part, f"{self.__path}.{name}")

    def __or__(self, other: object) -> Missing:  # in an alias of types
        return self

    __ror__ = __or__
    __call__ = __getitem__ = __setitem__ = __contains__ = __iter__ = __len__ = __refuse
    __bool__ = __enter__ = __exit__ = __eq__ = __ne__ = __refuse  # type: ignore[assignment]
    __int__ = __float__ = __index__ = __refuse
    __instancecheck__ = __subclasscheck__ = __mro_entries__ = __refuse


class _View:
    """A module of JAX that has not all that is needed of it."""

    def __init__(self, module: ModuleType | None, missing: dict[str, Missing]) -> None:
        self.__module = module
        self.__missing = missing

    def __getattr__(self, name: str) -> Any:
        if name in self.__missing:
            return self.__missing[name]
        return getattr(self.__module, name)


# --- The modules ----------------------------------------------------------------------

# JAX imports them when they are needed, and so does hostcall.
_LATE = ("custom_partitioning", "flattree", "key_reuse", "pallas", "roofline")


@functools.cache
def module(alias: str) -> Any:
    """A module of JAX, or a view of it, by its name in MODULES."""
    path = MODULES[alias]
    jax_module = _imported(path)
    gone: dict[str, Missing] = {}
    for need in NEEDS:
        if need.module != alias or not _is_in(need):
            continue
        names = need.names.split()
        if not names and jax_module is None:
            names = [""]  # the module itself is what is needed
        for name in names:
            lack = _lack_of(jax_module, alias, name)
            if lack:
                gone[name] = Missing(need.part, lack)
                _missing.setdefault(need.part, []).append(lack)
    if gone or jax_module is None:
        return _View(jax_module, gone)
    return jax_module


def _lack_of(jax_module: ModuleType | None, alias: str, name: str) -> str:
    """What this JAX has not, if it has no such name in the module, or another function
    by that name; "" if all is as needed.
    """
    path = f"{MODULES[alias]}.{name}".rstrip(".")
    if jax_module is None or not hasattr(jax_module, name):
        return path
    if (alias, name) in CALLED:
        count, keywords = CALLED[alias, name]
        if not _fits(getattr(jax_module, name), count, keywords):
            return f"{path} with the arguments that hostcall passes"
    return ""


def _imported(path: str) -> Any:
    """A module, which may be an attribute of another one; None if it is gone."""
    try:
        return importlib.import_module(path)
    except ImportError:
        outer, _, name = path.rpartition(".")
    with contextlib.suppress(ImportError):
        return getattr(importlib.import_module(outer), name, None)
    return None


def unwrapped(function: Any) -> FunctionType | None:
    """The function of Python's inside its wrappers; None for a class, and for one that
    is written in C++.
    """
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function if isinstance(function, FunctionType) else None


def _fits(function: Any, count: int, keywords: Sequence[str]) -> bool:
    """Whether a function takes so many arguments by position, and these by name; True
    for one whose parameters can't be read.

    From its code, since `inspect.signature` takes longer, and hostcall's import asks
    for each function that it calls.
    """
    function = unwrapped(function)
    if function is None:
        return True
    code = function.__code__
    positional = code.co_varnames[: code.co_argcount]
    every = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    takes_more = bool(code.co_flags & inspect.CO_VARARGS)
    takes_any_keyword = bool(code.co_flags & inspect.CO_VARKEYWORDS)
    if count > len(positional) and not takes_more:
        return False
    if not set(keywords) <= set(every) and not takes_any_keyword:
        return False
    # What has no default must be given.
    defaults = function.__defaults__ or ()
    has_default = {*positional[len(positional) - len(defaults) :]}
    has_default |= set(function.__kwdefaults__ or ())
    given_here = {*positional[:count], *keywords}
    return set(every) <= has_default | given_here


def __getattr__(alias: str) -> Any:
    if alias not in MODULES:
        raise AttributeError(f"needs.py has no module {alias!r}")
    return module(alias)
