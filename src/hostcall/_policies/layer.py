"""The one shape of what stands between the engine and the user's function.

A layer has one method, `rows(rows, site)`: results in row order for rows that the
engine gave together. It does one thing (drops rows, runs them on an executor), and
leaves the rest to the layer inside it. `stack.entries` puts them together.

What holds for each layer
  * An error is the first failing row's, by row order. What runs rows at the same time
    tells the site which that was (`RowContext.failed`).
  * No row is kept: rows may be views of XLA's memory.
  * A layer does not change once it is made: several threads are in it at the same time.
    What belongs to one execution is in locals and in its `RowContext`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import jax
import numpy as np

from hostcall import _native
from hostcall._core.callback import CallSpec
from hostcall._core.dlpack import DLPackArray
from hostcall._core.errors import CallTimeoutError
from hostcall._core.host_code import as_host_code
from hostcall._core.process import PerProcess
from hostcall._core.source import name_of
from hostcall._native import ResultForm
from hostcall._runtime import context, flights, running
from hostcall._runtime.workers import ThreadSettings

Row = tuple[tuple[Any, ...], dict[str, Any]]  # as the user's function gets it
Leaves = Sequence[Any]  # the same as one array for each leaf of a call's arguments
Flat = Sequence[np.ndarray]  # one array for each leaf of a row's results
Index = tuple[int, ...]  # of a row, along each batch axis
Current = Callable[[int], Any]  # what `hc.current()` answers in a row, by its number
Value: TypeAlias = Any  # what the user's function returned for a row
Executor: TypeAlias = Any  # what users give as executor=, of whatever library
Task: TypeAlias = Any  # what an executor answers to a call that was submitted

Given = TypeVar("Given", contravariant=True)
Result = TypeVar("Result")
T = TypeVar("T")


class Layer(Protocol[Given, Result]):
    def rows(self, rows: Sequence[Given], site: RowContext) -> list[Result]: ...


class Runs(Layer[Row, Value], Protocol):
    """Runs the function: the innermost.

    Attributes:
        sends: whether it sends rows to other processes.
    """

    sends: bool


Body = Layer[Leaves, Value]  # called with leaves, the function's results
Inner = Layer[Leaves, Flat]  # plain arrays in, plain arrays out


class RowContext(NamedTuple):
    """One execution. Made on the thread that is in the call.

    Attributes:
        indices: of the rows in their batch; empty for one row that has none of its own.
    """

    indices: Sequence[Index] = ()

    def current(self) -> Current:
        """What `hc.current()` answers in each row. To be asked on the call's thread."""
        call = context.current()
        indices = self.indices
        if call is None or not indices:
            return lambda row: call
        return lambda row: call.at_row(indices[row])

    def failed(self, row: int) -> None:
        """Tells the engine which row failed, on the thread that is in the call.

        Not on the exception: rows of several calls may fail with one object.
        """
        if self.indices:
            _native.failed_row(self.indices[row])


class ChecksResults(Protocol):
    """What checks the results of a call: its `CallHooks`."""

    name: str

    def flatten(self, value: Value) -> list[Any]: ...

    def coerce(self, number: int, value: Any) -> np.ndarray: ...

    def shaped(self, number: int, value: Any, shape: tuple[int, ...]) -> np.ndarray: ...


class Choices(NamedTuple):
    """What a plan says about its layers.

    Attributes:
        callback: the function, its trees and its policy.
        results: checks results.
        device: where JAX code in the function runs.
        guard: what examines the programs that the function starts, or None.
        converters: how each array becomes what the function gets.
        avals: of one row's results.
        levels: how many batch axes the function itself sees.
        grid: whether the engine may give several rows.
        parallel: whether rows, if there are any, run at the same time.
        once: whether no row may run twice.
        compressed: whether the function gets a batch without the rows that `where`
            drops.
        form: of what the function returns.
        tap: whether results are ignored.
        batch: of a compressed tap: for each vmap, the outermost first, whether each
            operand has its axis, and its size.
    """

    callback: CallSpec
    results: ChecksResults
    device: Any = None
    guard: Any = None
    converters: Sequence[Callable[[Any], Any] | None] = ()
    avals: Sequence[Any] = ()
    levels: int = 0
    grid: bool = False
    parallel: bool = False
    once: bool = False
    compressed: bool = False
    form: ResultForm = ResultForm.TREE
    tap: bool = False
    batch: Sequence[tuple[Sequence[bool], int]] = ()


class Shared(PerProcess):
    """What several calls share, while one of them has it."""

    def __init__(self) -> None:
        # Two programs may be lowered at once, and a destructor may lower a third.
        self._lock = threading.RLock()
        self.things = weakref.WeakValueDictionary[Hashable, Any]()
        super().__init__()

    def one(self, key: Hashable, make: Callable[[], T]) -> T:
        """The one thing of this key, which is made now if nobody has it."""
        with self._lock:
            existing: T | None = self.things.get(key)
            if existing is None:
                # A destructor that runs in `make` may have made one meanwhile.
                existing = self.things.setdefault(key, make())
            return existing


shared = Shared()


# --- What the layers share in which the function runs ---------------------------------


class TimedFunction(NamedTuple):
    """A function, and what all its runs share.

    Attributes:
        fn: the function.
        settings: the settings of JAX that it runs with, on other threads.
        timeout: seconds for all rows of a run together, or None.
        name: what messages call it; "" for the function's own name.
    """

    fn: Callable[..., Value]
    settings: ThreadSettings
    timeout: float | None = None
    name: str = ""

    def late(self, row: Row, stuck: str) -> CallTimeoutError:
        """The error of a run that takes too long; has the shapes of one of its rows."""
        running.log(flights.LATE)
        # By their types: a leaf may be a user's object, which may answer anything.
        kinds = (np.ndarray, np.generic, jax.Array, DLPackArray)
        shown = []
        for leaf in jax.tree.leaves(row):
            if issubclass(type(leaf), kinds):
                shown.append(f"{leaf.dtype}{list(leaf.shape)}")
        shapes = ", ".join(shown)
        name = self.name or name_of(self.fn)
        return CallTimeoutError(
            f"hostcall: `{name}`({shapes}) took longer than timeout={self.timeout} s;"
            f" {stuck}"
        )

    def split(
        self, rows: Sequence[Row]
    ) -> tuple[Callable[..., Value], Sequence[Row], list[Callable[[Value], Value]]]:
        """The function and rows to run elsewhere, and what finishes each row here.

        Code of hostcall's own, a rule, may have a part that only this process can run
        (`HostCode.split`): the trees of its arguments can't be pickled, and residuals
        stay here. All rows have it or none, since they are calls of one function. A
        user's function runs elsewhere as it is.
        """
        host_code = as_host_code(self.fn)
        sendable_rows: list[Row] = []
        finishes = []
        for args, kwargs in rows:
            split = host_code.split(args, kwargs)
            if split is not None:
                part, part_args, finish = split
                # The part may differ from row to row, so it goes as an argument.
                sendable_rows.append(((part, *part_args), {}))
                finishes.append(finish)
        if not sendable_rows:
            return self.fn, rows, [same] * len(rows)
        assert len(sendable_rows) == len(rows), "rows are calls of one function"
        return apply, sendable_rows, finishes


def same(value: Value) -> Value:
    """Finishes a row whose value is its result."""
    return value


def apply(part: Callable[..., Value], *args: Any) -> Value:
    """Calls the part of a row that runs elsewhere (`TimedFunction.split`)."""
    return part(*args)
