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
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hostcall._core.errors import SpecError
from hostcall._core.fingerprint import fingerprint
from hostcall._core.spec import Static, Template
from hostcall._engine.counters import tally_of
from hostcall._engine.info import CallInfo
from hostcall._engine.params.equation import Equation
from hostcall._runtime import host_device, loop, workers
from hostcall._runtime.caches import Cache, Values

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
class Part:
    """Where the values of one of a HostFunction's codes are kept.

    Attributes:
        cache: of the HostFunction.
        label: which of its codes this is.
        template: the arguments of the HostFunction, with the static ones.
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
        self._part: Part = callback.cache
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
        self._start = hashlib.sha256(repr(about).encode())
        statics = [x for x in self._template.leaves if isinstance(x, Static)]
        text = self._statics()  # in any case, so that it fails when it is lowered
        self._constant = all(type(x.value) in _CONSTANT for x in statics)
        if self._constant:
            self._start.update(text)

    @property
    def _template(self) -> Template:
        assert self._part.template is not None
        return self._part.template

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
