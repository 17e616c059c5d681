"""What pure host functions returned, kept for `hc.host(cache=)`.

A value is kept as the bytes of its arrays, whose shapes and dtypes the reader knows.
Bytes can't change, so no caller can change what another one gets.

Guarantees, for the calls of one HostFunction in this process
  * Calls with one key at the same time compute it once; the others wait for that value,
    even if it is too large to be kept. Two kinds of calls compute instead (below).
  * If the computation fails, nothing is kept, and one of those that waited computes.
  * Waits do not hold the GIL, and Ctrl-C ends them.

Why nothing waits in a circle, if host code runs its programs in its own thread:

  1. A call computes all the keys that it has claimed before it waits for others'.
  2. A call in a program that host code started may be needed by the very computation
     that it would wait for. It never waits, and computes. So those that wait are calls
     of programs that the process's own threads started.
  3. Nor does a call on a thread of XLA's: the computation's own program may need that
     thread, or one of the pool that it belongs to.

No lock is held while a value is computed, read from a disk, or waited for. `_under_way`
needs none: a key is claimed by `setdefault`, which is one step, and only its owner
takes it out again.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hostcall import _native
from hostcall._core import config
from hostcall._core.wait import wait

Values = tuple[bytes, ...]

_OVERHEAD = 200  # bytes of an entry besides its values, roughly


class _Flight:
    """A computation that other calls may wait for."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.value: Values | None = None  # set before `done`; None if it failed
        self.waiting = 0  # roughly how many calls wait; for tests


class Cache:
    """The values of one HostFunction.

    Args:
        given: "memory", a diskcache.Cache or a joblib.Memory.
        name: the function and its version; what keys in a disk cache begin with.
    """

    def __init__(self, given: Any, name: str) -> None:
        self._given, self.name = given, name
        self.in_memory = isinstance(given, str)
        self._store = _store_of(given, name)
        self._under_way: dict[bytes, _Flight] = {}

    def __reduce__(self) -> Any:
        return Cache, (self._given, self.name)

    def get(self, key: bytes) -> Values | None:
        """A value that is kept."""
        return self._store.get(key)  # type: ignore[no-any-return]

    def values_of(
        self,
        keys: Sequence[bytes],
        compute: Callable[[list[int]], list[Values]],
        may_wait: bool,
    ) -> tuple[list[Values], int]:
        """The values of `keys`, and how many of them this call computed.

        Args:
            keys: of the rows; equal ones are computed once.
            compute: computes the values of rows, given their indices in `keys`.
            may_wait: whether this call may wait for another's computation.
        """
        found: dict[bytes, Values] = {}
        missing = [k for k in dict.fromkeys(keys) if not self._find(k, found)]
        first = {key: keys.index(key) for key in missing}
        computed = 0
        while missing:
            mine: dict[bytes, _Flight] = {}
            try:
                theirs = self._claim(missing, mine, found, may_wait)
                again = [key for key in missing if key not in theirs | found.keys()]
                if again:
                    values = compute([first[key] for key in again])
                    computed += len(again)
                    for key, value in zip(again, values, strict=True):
                        found[key] = value
                        self._store.put(key, value)
            finally:
                self._end(mine, found)
            for key, flight in theirs.items():
                _wait(flight)
                if flight.value is not None:
                    found[key] = flight.value
            missing = [key for key in missing if key not in found]
        return [found[key] for key in keys], computed

    def _find(self, key: bytes, found: dict[bytes, Values]) -> bool:
        value = self.get(key)
        if value is not None:
            found[key] = value
        return value is not None

    def _claim(
        self,
        keys: Iterable[bytes],
        mine: dict[bytes, _Flight],
        found: dict[bytes, Values],
        may_wait: bool,
    ) -> dict[bytes, _Flight]:
        """Claims keys, into `mine`. Returns those that others compute."""
        theirs = {}
        for key in keys:
            # Into `mine` first: whatever interrupts this, `_end` takes it out again.
            mine[key] = flight = _Flight()
            other = self._under_way.setdefault(key, flight)
            if other is not flight:
                del mine[key]
                if may_wait and not _native.on_foreign_thread():
                    theirs[key] = other
            else:
                self._find(key, found)  # it may have been computed since the last look
        return theirs

    def _end(self, mine: dict[bytes, _Flight], found: dict[bytes, Values]) -> None:
        for key, flight in mine.items():
            if self._under_way.get(key) is flight:
                del self._under_way[key]
            flight.value = found.get(key)
            flight.done.set()

    def clear(self) -> None:
        self._store.clear()


def _wait(flight: _Flight) -> None:
    flight.waiting += 1
    wait(flight.done.wait)


def _store_of(given: Any, name: str) -> Any:
    if isinstance(given, str):
        return _Memory()
    if is_dictionary(given):
        return _Dictionary(given, name)
    return _Joblib(given, name)


# --- In memory -----------------------------------------------------------------------

_owners = itertools.count()
_kept: OrderedDict[tuple[int, bytes], Values] = OrderedDict()  # least recent first
_bytes = 0
_lock = threading.Lock()  # protects the two above


_gone: list[int] = []  # owners whose entries the next `fit` drops


class _Memory:
    """The entries of one function among those of the process, which share a limit."""

    def __init__(self) -> None:
        self._owner = next(_owners)

    def get(self, key: bytes) -> Values | None:
        with _lock:
            value = _kept.get((self._owner, key))
            if value is not None:
                _kept.move_to_end((self._owner, key))
            return value

    def put(self, key: bytes, value: Values) -> None:
        global _bytes
        if _size(value) > config.settings.cache_bytes:
            return  # else it would drop all others, and then itself
        with _lock:
            _drop((self._owner, key))
            _kept[self._owner, key] = value
            _bytes += _size(value)
        fit()

    def clear(self) -> None:
        with _lock:
            for key in [key for key in _kept if key[0] == self._owner]:
                _drop(key)

    def __del__(self, gone: list[int] = _gone) -> None:
        # With the last reference to the function, nobody can ask for its values. The
        # lock could be held by this very thread, if the garbage collector runs in it.
        # `gone` is an argument, since a module's names are None when Python ends.
        gone.append(self._owner)


def fit() -> None:
    """Drops entries, the least recently used first, until the limit holds."""
    with _lock:
        gone = set(_gone)
        del _gone[: len(gone)]
        for key in [key for key in _kept if key[0] in gone] if gone else ():
            _drop(key)
        while _kept and _bytes > config.settings.cache_bytes:
            _drop(next(iter(_kept)))


def _drop(key: tuple[int, bytes]) -> None:
    global _bytes
    value = _kept.pop(key, None)
    if value is not None:
        _bytes -= _size(value)


def _size(value: Values) -> int:
    return sum(map(len, value)) + _OVERHEAD


def memory_bytes() -> int:
    """How many bytes the entries of all functions hold."""
    return _bytes


# --- On disk -------------------------------------------------------------------------


def is_dictionary(given: Any) -> bool:
    """Whether this is a diskcache.Cache, or has its `get` and `set`."""
    return hasattr(given, "get") and hasattr(given, "set")


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
        for key in [key for key in self._given if self._is_own(key)]:
            del self._given[key]

    def _is_own(self, key: Any) -> bool:
        return isinstance(key, str) and key.startswith(self._name + " ")


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
