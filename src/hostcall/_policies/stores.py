"""Where `hc.host(cache=)` keeps results: in memory, on a disk, in a server.

A value is kept as the bytes of its arrays, whose shapes and dtypes the reader knows.
Bytes can't change, so no caller can change what another one gets.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hostcall._core import config
from hostcall._core.options import CachePart, is_dictionary
from hostcall._core.process import Owned
from hostcall._core.spec import Template

Values = tuple[bytes, ...]

_OVERHEAD = 200  # bytes of an entry besides its values, roughly


class Pending(threading.Event):
    """A computation that other calls may wait for; set when it has ended."""

    value: Values | None = None  # set before; None if it failed
    waiting = 0  # roughly how many calls wait; for tests


class Cache:
    """The values of one HostFunction.

    Args:
        given: "memory", a diskcache.Cache or a joblib.Memory.
        name: the function and its version; what keys in a disk cache begin with.

    Attributes:
        under_way: what is being computed. A key is claimed by `setdefault`, which is
            one step, and only its owner takes it out again: that needs no lock.
    """

    def __init__(self, given: Any, name: str) -> None:
        self._given, self.name = given, name
        self.in_memory = isinstance(given, str)
        self.store: _Memory | _Dictionary | _Joblib
        if self.in_memory:
            self.store = _Memory()
        else:
            kind = _Dictionary if is_dictionary(given) else _Joblib
            self.store = kind(given, name)
        self.under_way: dict[bytes, Pending] = {}

    def __reduce__(self) -> Any:
        return Cache, (self._given, self.name)


@dataclass(frozen=True)
class Part(CachePart):
    """Where the values of one of a HostFunction's codes are kept.

    Attributes:
        cache: of the HostFunction.
        label: which of its codes this is.
        template: the arguments of the HostFunction, with the static ones, if it is one
            of its rules; None for those of the call.
    """

    cache: Cache
    label: str = ""
    template: Template | None = None


# --- In memory -----------------------------------------------------------------------


class _Kept(Owned):
    """The entries of all functions of this process, which share a limit.

    Attributes:
        bytes: how many they hold.
        gone: functions whose entries the next `fit` drops.
        owners: numbers for functions. A forked child goes on with these and those of
            `number_of`, since it has its parent's functions.
    """

    owners: ClassVar[Iterator[int]] = itertools.count()
    _numbers: ClassVar[MutableMapping[Any, int]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: OrderedDict[tuple[int, bytes], Values] = OrderedDict()
        self.bytes = 0
        self.gone: list[int] = []
        super().__init__()

    def number_of(self, thing: Any) -> int:
        """A number for a function or class in keys: two of one name have two."""
        return self._numbers.setdefault(thing, next(self.owners))

    def get(self, key: tuple[int, bytes]) -> Values | None:
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)  # the least recently used come first
            return value

    def put(self, key: tuple[int, bytes], value: Values) -> None:
        if _size(value) > config.settings.cache_bytes:
            return  # else it would drop all others, and then itself
        with self._lock:
            self._drop(key)
            self._values[key] = value
            self.bytes += _size(value)
        self.fit()

    def fit(self) -> None:
        """Drops entries, the least recently used first, until the limit holds."""
        with self._lock:
            count = len(self.gone)  # `__del__` may add one meanwhile
            gone = set(self.gone[:count])
            del self.gone[:count]
            for key in [key for key in self._values if key[0] in gone] if gone else ():
                self._drop(key)
            while self._values and self.bytes > config.settings.cache_bytes:
                self._drop(next(iter(self._values)))

    def _drop(self, key: tuple[int, bytes]) -> None:
        value = self._values.pop(key, None)
        if value is not None:
            self.bytes -= _size(value)


def _size(value: Values) -> int:
    return sum(map(len, value)) + _OVERHEAD


kept = _Kept()


class _Memory:
    def __init__(self) -> None:
        self._owner = next(kept.owners)

    def get(self, key: bytes) -> Values | None:
        return kept.get((self._owner, key))

    def put(self, key: bytes, value: Values) -> None:
        kept.put((self._owner, key), value)

    def clear(self) -> None:
        kept.gone.append(self._owner)
        kept.fit()

    def __del__(self, kept: _Kept = kept) -> None:
        # With the last reference to the function, nobody can ask for its values. The
        # lock could be held by this very thread, if the garbage collector runs in it.
        # `kept` is an argument, since a module's names are None when Python ends.
        kept.gone.append(self._owner)


# --- On disk -------------------------------------------------------------------------


class _Dictionary:
    def __init__(self, given: Any, name: str) -> None:
        self._given, self._name = given, name

    def _key(self, key: bytes) -> str:
        return f"{self._name} {key.hex()}"

    def get(self, key: bytes) -> Values | None:
        return self._given.get(self._key(key))  # type: ignore[no-any-return]

    def put(self, key: bytes, value: Values) -> None:
        self._given.set(self._key(key), value)

    def clear(self) -> None:
        for key in list(self._given):
            if isinstance(key, str) and key.startswith(self._name + " "):
                del self._given[key]


class _Joblib:
    """A joblib.Memory, which keeps what functions return under their arguments.

    The function is `_keep`, and `name` and `key` are what it is asked for.
    """

    def __init__(self, memory: Any, name: str) -> None:
        self._name = name
        self._memorized = memory.cache(_keep, ignore=["value"])

    def get(self, key: bytes) -> Values | None:
        asked = (self._name, key.hex())
        if not self._memorized.check_call_in_cache(*asked, None):
            return None
        try:
            # Raises, and so is not kept, if the entry has been dropped meanwhile.
            return self._memorized(*asked, None)  # type: ignore[no-any-return]
        except LookupError:
            return None

    def put(self, key: bytes, value: Values) -> None:
        self._memorized(self._name, key.hex(), value)

    def clear(self) -> None:
        raise NotImplementedError


def _keep(name: str, key: str, value: Values | None) -> Values:
    if value is None:
        raise LookupError(name, key)
    return value
