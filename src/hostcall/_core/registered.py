"""The names of host code (`hc.register`): the table of this process.

Each program that is lowered asks whether what it calls has a name. Whatever else names
are for is in _export/registry.py.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from hostcall._core.process import Guarded


class Name(NamedTuple):
    """A registered name with its version."""

    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.name!r} version {self.version}"


class Names(Guarded):
    """
    Attributes:
        lock: guards the rest.
        things: what has a name, and the statement that registered it
            (_export/definitions.py).
        names: by the object that programs hold: of a feed its stream.
        replaced: what had a name before, with the reason why it has none now.
    """

    def __init__(self) -> None:
        self.things: dict[Name, tuple[Any, Any]] = {}
        self.names: dict[Any, Name] = {}
        self.replaced: weakref.WeakKeyDictionary[Any, str]
        self.replaced = weakref.WeakKeyDictionary()
        super().__init__()

    def of(self, value: Any) -> Name | None:
        """The name of what a program holds, or None."""
        try:
            return self.names.get(value)
        except TypeError:  # unhashable
            return None


names = Names()
