"""What is sent to an executor, and what a worker does with it.

A chunk is a call of `run_chunk`. Threads of this process get the rows as they are, and
the run itself, which tells them before each row whether it may still begin. Workers in
other processes get bytes, and None in place of the run; they look at the leash.

The pickle of a row has a number in place of each array that all rows share: such an
array is sent once, beside the chunks (`Workers.share`).
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any, Protocol

import numpy as np

from hostcall import _jax
from hostcall._core.process import PerProcess
from hostcall._policies import executors, files
from hostcall._policies.layer import Row, Value

SentRow = Row | bytes  # as it is, or pickled


class ChunkedRun(Protocol):
    """The rows of one call while they run (`on_executor.RunningRows`)."""

    def chunk(
        self, start: int, rows: Sequence[SentRow], shared: Sequence[Any]
    ) -> list[Value]: ...


class PickledRuns(PerProcess):
    """The runs of this process, by number. A pickled run is a number.

    The token names the process: one on another machine may have the same id.
    """

    def __init__(self) -> None:
        self.token = os.urandom(8)
        self._numbers = itertools.count()
        self.alive = weakref.WeakValueDictionary[int, ChunkedRun]()
        super().__init__()

    def add(self, run: ChunkedRun) -> int:
        number = next(self._numbers)
        self.alive[number] = run
        return number


runs = PickledRuns()


def run_of(token: bytes, number: int) -> ChunkedRun | None:
    """What a pickled run is: the run, or None in another process."""
    if token != runs.token:
        return None
    run = runs.alive.get(number)
    if run is None:  # its call is over
        raise dropped()
    return run


def run_chunk(
    run: ChunkedRun | None,
    start: int,
    traced: _jax.Traced | None,
    leash: str | None,
    fn: Callable[..., Any],
    rows: Sequence[SentRow],
    *shared: Any,
) -> list[Value]:
    """Runs a chunk; called by the executor, in this or another process or machine.

    Args:
        run: the run; None in another process.
        start: the number of the first row.
        traced: the settings of JAX that the run's trace had of its own.
        leash: the path of the leash, if the run has one.
        fn: the function.
        rows: (args, kwargs) of each row, or bytes if they were sent.
        *shared: arrays that all rows share, as `Workers.share` made them.
    """
    if run is not None:
        return run.chunk(start, rows, shared)
    if leash is not None:
        files.begin_chunk(leash, start)

    def rows_that_begin() -> Iterator[Row]:
        for row in rows:
            # The process of the call has deleted it: no further row may begin.
            if leash is not None and not os.path.exists(leash):
                raise dropped()
            yield unpickled(row, shared)

    former_settings = None if traced is None else traced.enter()
    try:
        return run_each(fn, rows_that_begin())
    finally:
        if traced is not None and former_settings is not None:
            traced.leave(former_settings)


def run_each(fn: Callable[..., Any], rows: Iterable[Row]) -> list[Value]:
    """Calls `fn` for one row after the other, on this thread.

    `rows` may do what comes before each row.
    """
    values: list[Value] = []
    try:
        for args, kwargs in rows:
            values.append(fn(*args, **kwargs))
    except Exception as error:  # any other may end a worker, so it stays what it is
        raise executors.FailedRow(error, len(values)) from None
    return values


def as_raised(error: BaseException) -> tuple[BaseException, int | None]:
    """The exception that a row raised, as if it had been sent by itself, and which row
    of its chunk that was, if it is known.
    """
    if not isinstance(error, executors.FailedRow):
        return error, None
    error.error.with_traceback(error.__traceback__)
    if error.__cause__ is not None:  # the traceback in another process, as text
        error.error.__cause__ = error.__cause__
    return error.error, error.row


def dropped() -> Exception:
    return futures.CancelledError(
        "hostcall: this row did not begin: another row failed, or the call is late"
    )


class _Unpickler(pickle.Unpickler):
    def __init__(self, row: bytes, shared: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(row))
        self._shared = shared

    def persistent_load(self, number: Any) -> Any:
        return executors.fresh(self._shared[number])


def unpickled(row: SentRow, shared: Sequence[Any]) -> Row:
    if not isinstance(row, bytes):
        return row
    return _Unpickler(row, shared).load()  # type: ignore[no-any-return]


def pickled(
    rows: Sequence[Row], shared: Sequence[np.ndarray], pickler: Any
) -> list[bytes]:
    """Pickles each row, with a number in place of each array that all rows share."""
    numbers = {id(array): number for number, array in enumerate(shared)}

    class Pickler(pickler):  # type: ignore[misc]
        def persistent_id(self, value: Any) -> int | None:
            return numbers.get(id(value))

    texts = []
    for row in rows:
        file = io.BytesIO()
        Pickler(file, pickle.HIGHEST_PROTOCOL).dump(row)
        texts.append(file.getvalue())
    return texts
