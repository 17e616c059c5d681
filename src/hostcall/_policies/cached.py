"""Looks a call's rows up before its function is called (`hc.host(cache=)`).

A row that is found makes no JAX arrays or typed keys, and goes to no executor.

A row's key is a digest of

  * what is the same in all calls of a plan: which of the function's codes it is, the
    shapes and dtypes of arguments and results, `float64=`, the fills of masked rows,
    and JAX's settings of its trace, if those are not the process's own;
  * the structure of the arguments with the static ones, pickled, and what functions and
    classes in them are (pickles have their names only);
  * the bytes of its arrays. So -0.0 differs from 0.0, and a NaN equals itself.

Guarantees, for the calls of one HostFunction in this process
  * Calls with one key at the same time compute it once; the others wait for that
    value, even if it is too large to be kept. Two kinds of calls compute (below).
  * If the computation fails, nothing is kept, and one of those that waited computes.
  * Waits do not hold the GIL, and Ctrl-C ends them.

Why nothing waits in a circle, if host code runs its programs in its own thread:

  1. A call computes all the keys that it has claimed before it waits for others'.
  2. A call in a program that host code started may be needed by the very computation
     that it would wait for. It never waits, and computes. So those that wait are
     calls of programs that the process's own threads started.
  3. Nor does a call on a thread of XLA's: the computation's own program may need that
     thread, or one of the pool that it belongs to.
  4. What is inside this layer (a merged call) never waits for a key.

No lock is held while a value is computed, read from a disk, or waited for.
"""

from __future__ import annotations

import hashlib
import io
import math
import pickle
import types
from collections.abc import Sequence
from typing import Any

import numpy as np

from hostcall import _native
from hostcall._core.errors import SpecError
from hostcall._core.fingerprint import fingerprint
from hostcall._core.spec import Static
from hostcall._core.wait import wait
from hostcall._policies import stores
from hostcall._policies.layer import Choices, Flat, Inner, Leaves, Site
from hostcall._policies.stores import Part, Pending, Values
from hostcall._runtime import host_device, loop, workers

Found = dict[bytes, Values | None]  # by key; None for one that is not known

# The bytes of smaller arrays are copied: that takes less time than a view.
_SMALL = 4096

# Static arguments that can't change, so that one pickle serves all calls.
_CONSTANT = (str, bytes, type(None), type, types.FunctionType)


class Cached:
    """Calls the layer inside for rows that are not known, each once."""

    def __init__(self, inner: Inner, choices: Choices, part: Part) -> None:
        self._inner, self._results = inner, choices.results
        self._count = choices.tally or (lambda hits, misses: None)
        self._cache, self._key = part.cache, _Keys(choices, part)
        self._shapes = [(x.shape, np.dtype(x.dtype)) for x in choices.avals]
        self._sizes = [math.prod(shape) * kind.itemsize for shape, kind in self._shapes]
        self._second = host_device.level(choices.device.client) > 1

    def rows(self, rows: Sequence[Leaves], site: Site) -> list[Flat]:
        get, keys = self._cache.store.get, [self._key.of(row) for row in rows]
        if len(keys) == 1 and (value := get(keys[0])) is not None:  # as often
            self._count(1, 0)
            return [self._arrays(value)]
        found = {key: get(key) for key in keys}  # None: not known yet
        computed = 0
        while missing := [key for key, value in found.items() if value is None]:
            mine: dict[bytes, Pending] = {}
            try:
                theirs = self._claim(missing, mine, found)
                again = [k for k in missing if k not in theirs and found[k] is None]
                if again:
                    which = [keys.index(key) for key in again]
                    asked = [rows[i] for i in which]
                    values = self._inner.rows(asked, site.only(which))
                    computed += len(again)
                    for key, leaves in zip(again, values, strict=True):
                        found[key] = kept = self._bytes(leaves)
                        self._cache.store.put(key, kept)
            finally:
                self._end(mine, found)
            for key, flight in theirs.items():
                flight.waiting += 1
                wait(flight.wait)
                found[key] = flight.value
        self._count(len(rows) - computed, computed)
        return [self._arrays(found[key]) for key in keys]

    def _claim(
        self, keys: Sequence[bytes], mine: dict[bytes, Pending], found: Found
    ) -> dict[bytes, Pending]:
        """Claims keys, into `mine`. Returns those that others compute, if this call may
        wait for that; see above.
        """
        # What a task's threads wait for, the task waits for; and a loop must not wait.
        inside = self._second or workers.stand_in() is not None
        may_wait = not (inside or loop.running() or _native.on_foreign_thread())
        theirs = {}
        for key in keys:
            # Into `mine` first: whatever interrupts this, `_end` takes it out again.
            mine[key] = flight = Pending()
            other = self._cache.under_way.setdefault(key, flight)
            if other is flight:
                # It may have been computed since the last look.
                found[key] = self._cache.store.get(key)
                continue
            del mine[key]
            if may_wait:
                theirs[key] = other
        return theirs

    def _end(self, mine: dict[bytes, Pending], found: Found) -> None:
        under_way = self._cache.under_way
        for key, flight in mine.items():
            if under_way.get(key) is flight:
                del under_way[key]
            flight.value = found[key]
            flight.set()

    def _bytes(self, value: Flat) -> Values:
        coerce = self._results.coerce
        return tuple(coerce(i, leaf).tobytes() for i, leaf in enumerate(value))

    def _arrays(self, value: Values | None) -> Flat:
        """Read-only arrays in the memory of the bytes."""
        # A cache on a disk, or a server's, may return anything.
        plain = type(value) is tuple and all(type(part) is bytes for part in value)
        if value is None or not plain or [*map(len, value)] != self._sizes:
            raise SpecError(
                f"hostcall: the cache of `{self._results.name}` has an entry that is"
                " not one of its results. Is something else written to that cache?",
                code="hc-load",
            )
        each = zip(self._shapes, value, strict=True)
        return tuple(np.ndarray(shape, dtype, part) for (shape, dtype), part in each)


class _Keys:
    """The keys of the rows of one plan."""

    def __init__(self, choices: Choices, part: Part) -> None:
        callback = choices.callback
        self._name, self._in_memory = choices.results.name, part.cache.in_memory
        about: tuple[Any, ...] = (
            part.label,
            [(shape, str(dtype)) for shape, dtype in choices.shapes],
            callback.policy.float64,
            [(x.shape, str(x.dtype)) for x in choices.avals],
            choices.compressed and callback.fills,
            [None if k is None else str(k) for k in callback.template.keys],
            str(callback.results.treedef),
        )
        if callback.traced is not None:  # its function may compute other values
            about = (*about, callback.traced)
        self._template = part.template or callback.template
        self._start = hashlib.sha256(repr(about).encode())
        statics = [x for x in self._template.leaves if isinstance(x, Static)]
        text = self._statics()  # in any case, so that it fails when it is lowered
        self._constant = all(type(x.value) in _CONSTANT for x in statics)
        if self._constant:
            self._start.update(text)

    def of(self, row: Leaves) -> bytes:
        digest = self._start.copy()
        if not self._constant:
            digest.update(self._statics())
        for array in row:
            if array.nbytes < _SMALL:
                digest.update(array.tobytes())
            else:
                digest.update(array.reshape(-1).view(np.uint8))
        return digest.digest()

    def _statics(self) -> bytes:
        leaves = self._template.leaves
        marks = [x.value if isinstance(x, Static) else _Array for x in leaves]
        try:
            file = io.BytesIO()
            pickler = _Pickler(file, self._in_memory)
            pickler.dump(self._template.treedef.unflatten(marks))
            return file.getvalue() + repr(pickler.met).encode()
        except Exception as error:
            raise SpecError(
                f"hostcall: `{self._name}` has cache=, whose keys hold its static"
                f" arguments, pickled. One of them can't be pickled: {error}. Pass it"
                " as arrays, strings or other objects that can, or drop cache=",
                code="hc-pickle",
            ) from error


class _Array:
    """Stands for an array among static arguments."""


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

    def persistent_id(self, thing: Any) -> str | None:
        if thing is _Array:
            return "array"  # not its module's name, which a release may change
        if not isinstance(thing, (type, types.FunctionType)):
            return None
        if self._in_memory:
            self.met.append(stores.kept.number_of(thing))
        elif isinstance(thing, types.FunctionType):
            self.met.append(fingerprint(thing))
        return None
