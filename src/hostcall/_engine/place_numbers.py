"""Numbers for the lines that write calls.

Events of the engine hold the number of a line instead of its name, since the plan that
made them may be gone when they are read. Equal lines get one number, so there are as
many as lines of the program that write calls, and some tags, however many functions
they make.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from hostcall import _native
from hostcall._core.callback import CallSpec
from hostcall._core.source import Place


class Named(NamedTuple):
    """What a number stands for."""

    name: str
    place: Place


class _Places:
    """Never shrinks. Number 0 stands for no place.

    No lock: each step below is a single one, with the GIL and without.
    """

    def __init__(self) -> None:
        # By name, file, line and function. A dictionary finds such a tuple in a third
        # of the time that a Named takes, whose classes compare in Python.
        self._numbers: dict[tuple[str, str, int, str], int] = {}
        self._named: dict[int, Named] = {}
        self._next = itertools.count(1)

    def number_of(self, callback: CallSpec) -> int:
        """The number of a call's place."""
        name = callback.lasting_tag or callback.name
        place = callback.place
        key = (name, place.file, place.line, place.function)
        known = self._numbers.get(key)
        if known is not None:
            return known
        # What a number stands for is known before anybody gets it. If two threads come
        # with one place, the number of the second is left out.
        number = next(self._next)
        self._named[number] = Named(name, place)
        # A tag may have lone surrogates, which the engine's UTF-8 can't hold.
        shown_name = name.encode(errors="backslashreplace").decode()
        shown_place = str(place).encode(errors="backslashreplace").decode()
        _native.name_place(number, shown_name, shown_place)
        return self._numbers.setdefault(key, number)

    def named(self, number: int) -> Named | None:
        """What a number stands for, or None if there is no such number."""
        return self._named.get(number)


places = _Places()
