"""Looks a call's rows up before its function is called (`hc.host(cache=)`).

The engine calls what `cached` returns in place of the function, with plain arrays: a
row that is found makes no JAX arrays or typed keys. Rows of a parallel call go through
`cached_rows`, in this process, before any of them is sent to an executor.

A row's key is a digest of

  * what is the same in all calls of a plan: which of the function's codes it is, the
    shapes and dtypes of arguments and results, the fills of masked rows, and JAX's
    settings of its trace, if those are not the process's own;
  * the structure of the arguments with the static ones, pickled, and what functions and
    classes in them are (pickles have their names only);
  * the bytes of its arrays. So -0.0 differs from 0.0, and a NaN equals itself.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import pickle
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hostcall import _native
from hostcall._core import config
from hostcall._core.errors import SpecError
from hostcall._core.fingerprint import fingerprint
from hostcall._core.process import Owned
from hostcall._core.spec import Static, Template
from hostcall._core.wait import wait
from hostcall._engine.counters import tally_of
from hostcall._engine.info import CallInfo
from hostcall._engine.options import CachePart, is_dictionary
from hostcall._engine.params.equation import Equation
from hostcall._runtime import host_device, loop, workers

# The bytes of smaller arrays are copied: that takes less time than a view.
_SMALL = 4096

# Static arguments that can't change, so that one pickle serves all calls.
_CONSTANT = (str, bytes, type(None), type, types.FunctionType)


# Each function and class that was a static argument, or its class. Two of one name get
# two numbers.
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_next = itertools.count()


class _Pickler(pickle.Pickler):
    """Notes the functions and classes that it meets, which it pickles by name.

    Args:
        file: as for pickle.Pickler.
        in_memory: whether the keys are for this process. Others know a function by its
            code, and a class by its name alone.
    """

    def __init__(self, file: io.BytesIO, in_memory: bool) -> None:
        super().__init__(file)
        self._in_memory, self.met = in_memory, list[int]()

    def persistent_id(self, thing: Any) -> None:
        if not isinstance(thing, (type, types.FunctionType)):
            return
        if self._in_memory:
            self.met.append(_numbers.setdefault(thing, next(_next)))
        elif isinstance(thing, types.FunctionType):
            self.met.append(fingerprint(thing))


def _pickled(tree: Any, in_memory: bool) -> bytes:
    file = io.BytesIO()
    pickler = _Pickler(file, in_memory)
    pickler.dump(tree)
    return file.getvalue() + repr(pickler.met).encode()


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


class Rows:
    """The rows of one plan: their keys, and their values as arrays and as bytes.

    Args:
        params, info, device: as in `make_plan`.
        shapes: the shape and dtype of each array of a row.
        flat: whether the function returns a flat list, with one more array in front
            of the arguments for the mask (_engine/masks.py).
    """

    def __init__(
        self,
        params: Equation,
        info: CallInfo,
        shapes: Sequence[Any],
        flat: bool,
        device: Any,
    ) -> None:
        callback = params.callback
        self._part: Part = callback.policy.cache
        self._info, self._flat, self._avals = info, flat, params.avals
        self._dtypes = [np.dtype(aval.dtype) for aval in params.avals]
        self._sizes = [
            int(np.prod(aval.shape, dtype=np.int64)) * dtype.itemsize
            for aval, dtype in zip(params.avals, self._dtypes, strict=True)
        ]
        self._tally = tally_of(callback)
        self._may_wait = not host_device.is_second(device.client)
        about: tuple[Any, ...] = (
            self._part.label,
            [(shape, str(dtype)) for shape, dtype in shapes],
            [(x.shape, str(x.dtype)) for x in params.avals],
            flat and callback.fills,
            [None if k is None else str(k) for k in callback.template.keys],
            str(callback.results.treedef),
        )
        if callback.traced is not None:  # its function may compute other values
            about = (*about, callback.traced)
        self._template = self._part.template or callback.template
        self._start = hashlib.sha256(repr(about).encode())
        statics = [x for x in self._template.leaves if isinstance(x, Static)]
        text = self._statics()  # in any case, so that it fails when it is lowered
        self._constant = all(type(x.value) in _CONSTANT for x in statics)
        if self._constant:
            self._start.update(text)

    def _statics(self) -> bytes:
        marks = [
            x.value if isinstance(x, Static) else _Array for x in self._template.leaves
        ]
        try:
            tree = self._template.treedef.unflatten(marks)
            return _pickled(tree, self._part.cache.in_memory)
        except Exception as error:
            raise SpecError(
                f"hostcall: `{self._info.name}` has cache=, whose keys hold its static"
                f" arguments, pickled. One of them can't be pickled: {error}. Pass it"
                " as arrays, strings or other objects that can, or drop cache=",
                code="hc-pickle",
            ) from error

    def key(self, arrays: Sequence[np.ndarray]) -> bytes:
        digest = self._start.copy()
        if not self._constant:
            digest.update(self._statics())
        for array in arrays:
            small = array.nbytes < _SMALL
            digest.update(
                array.tobytes() if small else array.reshape(-1).view(np.uint8)
            )
        return digest.digest()

    def values_of(
        self,
        rows: Sequence[Sequence[np.ndarray]],
        compute: Callable[[list[int]], list[Any]],
    ) -> list[tuple[np.ndarray, ...]]:
        """The results of rows; `compute` calls the function for some of them."""

        def missing(indices: list[int]) -> list[Values]:
            return [self._bytes(value) for value in compute(indices)]

        keys = [self.key(row) for row in rows]
        if len(keys) == 1:  # the common case, without the lists and dicts of the other
            value = self._part.cache.get(keys[0])
            if value is not None:
                self._tally.add(1, 0)
                return [self._arrays(value)]
        # What a task's threads wait for, the task waits for; and a loop must not wait.
        alone = workers.stand_in() is None and loop.running() is None
        may_wait = self._may_wait and alone
        values, n = self._part.cache.values_of(keys, missing, may_wait)
        self._tally.add(len(rows) - n, n)
        return [self._arrays(value) for value in values]

    def _bytes(self, value: Any) -> Values:
        leaves = value if self._flat else self._info.flatten(value)
        return tuple(
            self._info.coerce(i, leaf).tobytes() for i, leaf in enumerate(leaves)
        )

    def _arrays(self, value: Values) -> tuple[np.ndarray, ...]:
        """Read-only arrays in the memory of the bytes."""
        # A cache on a disk, or a server's, may return anything.
        plain = type(value) is tuple and all(type(part) is bytes for part in value)
        if not plain or [len(part) for part in value] != self._sizes:
            raise SpecError(
                f"hostcall: the cache of `{self._info.name}` has an entry that is not"
                " one of its results. Is something else written to that cache?",
                code="hc-load",
            )
        parts = zip(self._avals, self._dtypes, value, strict=True)
        return tuple(np.ndarray(aval.shape, dtype, part) for aval, dtype, part in parts)


class _Array:
    """Stands for an array among static arguments."""


def cached(
    whole: Callable[..., Any], rows: Rows
) -> Callable[..., tuple[np.ndarray, ...]]:
    """`whole`, which the engine calls with plain arrays, with a look-up before it."""

    def call(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        def compute(_: list[int]) -> list[Any]:
            return [whole(*arrays)]

        return rows.values_of([arrays], compute)[0]

    return call


def cached_rows(
    run: Callable[[list[Any], list[Any]], list[Any]], rows: Rows
) -> Callable[[list[Any], list[Any]], list[Any]]:
    """A runner of parallel rows that runs those that are not found, each once."""

    def runner(given: list[Any], indices: list[Any]) -> list[Any]:
        def compute(which: list[int]) -> list[Any]:
            return run([given[i] for i in which], [indices[i] for i in which])

        return list(rows.values_of(given, compute))

    return runner


# --- What is kept ---------------------------------------------------------------------
#
# A value is kept as the bytes of its arrays, whose shapes and dtypes the reader knows.
# Bytes can't change, so no caller can change what another one gets.
#
# Guarantees, for the calls of one HostFunction in this process
#   * Calls with one key at the same time compute it once; the others wait for that
#     value, even if it is too large to be kept. Two kinds of calls compute (below).
#   * If the computation fails, nothing is kept, and one of those that waited computes.
#   * Waits do not hold the GIL, and Ctrl-C ends them.
#
# Why nothing waits in a circle, if host code runs its programs in its own thread:
#
#   1. A call computes all the keys that it has claimed before it waits for others'.
#   2. A call in a program that host code started may be needed by the very computation
#      that it would wait for. It never waits, and computes. So those that wait are
#      calls of programs that the process's own threads started.
#   3. Nor does a call on a thread of XLA's: the computation's own program may need that
#      thread, or one of the pool that it belongs to.
#
# No lock is held while a value is computed, read from a disk, or waited for.
# `_under_way` needs none: a key is claimed by `setdefault`, which is one step, and only
# its owner takes it out again.

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


class _Kept(Owned):
    """The entries of all functions of this process, which share a limit.

    Attributes:
        bytes: how many they hold.
        gone: functions whose entries the next `fit` drops.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: OrderedDict[tuple[int, bytes], Values] = OrderedDict()
        self.bytes = 0
        self.gone: list[int] = []
        super().__init__()

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
_owners = itertools.count()


class _Memory:
    """The entries of one function."""

    def __init__(self) -> None:
        self._owner = next(_owners)

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
