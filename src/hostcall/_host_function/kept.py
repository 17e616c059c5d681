"""The options `cache=` and `version=` of `hc.host`, and the names of entries."""

from __future__ import annotations

import os
import stat
import sys
import types
from pathlib import Path

import numpy as np

from hostcall._core.errors import SpecError, conflict
from hostcall._core.host_code import asked, text_of
from hostcall._core.source import is_anonymous, name_of
from hostcall._host_function.rules import Function
from hostcall._policies.stores import Cache, Part


def part_of(
    shown: str, fn: Function, cache: object, version: str | int | None
) -> Part | None:
    """The function's place in the cache that its options say, or None without one.

    Raises:
        SpecError: `cache` or `version` does not fit the function.
    """
    if cache is None:
        return None
    module = text_of(fn, "__module__") or "builtins"
    if module == "__main__":  # each script has one
        file = vars(sys.modules["__main__"]).get("__file__")
        module = os.path.abspath(file) if file else os.getcwd()
    if not isinstance(cache, str):
        _check_disk(shown, fn, version)
        _check_folder(shown, cache)
    return Part(Cache(cache, f"hostcall {module}.{name_of(fn)} version {version!r}"))


def _check_disk(shown: str, fn: Function, version: str | int | None) -> None:
    if version is None:
        why = (
            "no version=. Give version=1, and another number whenever the code of the"
            " function, of its rules, or of what they call changes"
        )
    elif not _goes_by_name(fn):
        why = (
            f"its entries go by the function's module and name. `{name_of(fn)}` may be"
            " one of several functions of that name (a lambda, a closure, a decorator's"
            " wrapper, a partial, a bound method, a ufunc of np.frompyfunc): define it"
            " at the top level of a module, with arguments for what it closes over; or"
            " use cache='memory'"
        )
    else:
        return
    raise conflict(f"`{shown}`", f"a cache that outlives the process, and {why}")


def _check_folder(shown: str, cache: object) -> None:
    """Refuses a folder that others can write to: both packages read pickles in it."""
    store = getattr(cache, "store_backend", None)  # of joblib
    folder = getattr(store, "location", None) or getattr(cache, "directory", None)
    if not isinstance(folder, (str, os.PathLike)):
        return  # a cache of another kind, such as a server's
    why = _open_to_others(folder)
    if why:
        raise SpecError(
            f"hostcall: `{shown}` has a cache in {os.fspath(folder)!r}, and {why}."
            " Entries are pickles, so whoever writes one runs code in this process. Use"
            f" a folder of your own, or type: chmod go-w {os.fspath(folder)!r}",
            code="hc-option",
        )


# Whoever can write to a folder runs code in a process that unpickles it.


def _open_to_others(folder: str | os.PathLike[str]) -> str:
    """What lets another user write to a folder, or put another in its place; "" if
    nothing does. Looks at owners and modes, not at access lists.
    """
    path = Path(os.path.realpath(folder))
    for each in (path, *path.parents):
        try:
            found = each.stat()
        except FileNotFoundError:  # it will be made, in the next one
            continue
        # Root trusts every owner: a container's mounts belong to a user outside it.
        if found.st_uid not in (0, os.geteuid()) and os.geteuid():
            return f"{each} belongs to another user"
        # In a folder with the sticky bit, such as /tmp, others can't replace ours.
        if each != path and found.st_mode & stat.S_ISVTX:
            continue
        if found.st_mode & stat.S_IWOTH:
            return f"all users can write to {each}"
        if found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid):
            return f"the group of {each} can write to it"
    return ""


def _is_private(group: int) -> bool:
    """Whether the group is this user's own, as most Linux systems make one for each."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    # A group of the user's name may be another's primary one, which lists no members.
    own = group in (0, user.pw_gid) and found.gr_name in ("root", user.pw_name)
    return own and set(found.gr_mem) <= {user.pw_name}


_BOUND = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)


def _goes_by_name(fn: Function) -> bool:
    """Whether the function is the only one of its module and name."""
    if isinstance(fn, np.ufunc):
        return vars(np).get(fn.__name__) is fn or bool(text_of(fn, "__module__"))
    if not text_of(fn, "__qualname__") or is_anonymous(fn):
        return False
    if isinstance(fn, _BOUND) and not isinstance(fn.__self__, types.ModuleType):
        return False
    # functools.wraps gives a wrapper the name of what it wraps; its code has its own.
    code = asked(fn, "__code__", types.CodeType)
    closes = type(fn) is types.FunctionType and fn.__closure__
    return not closes and (code is None or "<locals>" not in code.co_qualname)


def clear(part: Part | None, name: str) -> None:
    if part is None:
        raise SpecError(
            f"hostcall: `{name}` has no cache= that could be cleared", code="hc-option"
        )
    try:
        part.cache.store.clear()
    except NotImplementedError:
        raise SpecError(
            f"hostcall: joblib.Memory can't drop the results of `{name}` alone. Give"
            " another version=, or call the Memory's clear(), which drops all",
            code="hc-option",
        ) from None
