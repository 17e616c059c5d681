"""Numbers for the places of calls, and what the report knows about each.

Events of the engine hold the number of a place instead of its name, since the plan that
made them may be gone when they are read. Equal places get one number, so there are as
many as lines of the program that write calls, however many functions they make.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from hostcall import _native
from hostcall._core.source import Place
from hostcall._engine.callback import Callback


class Named(NamedTuple):
    """What a number stands for."""

    name: str
    place: Place


# Guarded by the lock; never shrinks. Number 0 stands for no place.
_named: list[Named | None] = [None]
_numbers: dict[Named, int] = {}
_lock = threading.Lock()


def number_of(callback: Callback) -> int:
    """The number of a call's place."""
    key = Named(callback.shown, callback.place)
    found = _numbers.get(key)  # no lock: a dict's lookup is atomic, and entries stay
    if found is not None:
        return found
    with _lock:
        if key not in _numbers:
            # A tag may have lone surrogates, which the engine's UTF-8 can't hold.
            texts = (key.name, str(key.place))
            shown = [t.encode(errors="backslashreplace").decode() for t in texts]
            _native.name_place(len(_named), *shown)
            _named.append(key)
            _numbers[key] = len(_named) - 1
        return _numbers[key]


def named(number: int) -> Named | None:
    """What a number stands for, or None if there is no such number."""
    return _named[number] if 0 <= number < len(_named) else None
