"""The rows of a call with vmap_method="parallel", all at once on an executor.

Rows go in chunks, some four for each worker, so that what a task costs is paid for many
rows where there are many, and workers still end together. Where the executor does not
take tasks back, some are held back here, where they can be dropped.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
import os
import pickle
import time
from collections.abc import Callable, Collection, Sequence
from concurrent import futures
from typing import Any, NoReturn

import numpy as np

from hostcall._core.errors import CallTimeoutError
from hostcall._core.source import name_of
from hostcall._runtime import executors, pools, workers

# On a thread of XLA's a Ctrl-C is raised between two instructions of Python.
_LOOK = 0.1  # seconds

_CHUNKS = 4  # for each worker
_UNDER_WAY = 2  # chunks for each worker, where they can't be taken back

Row = tuple[tuple[Any, ...], dict[str, Any]]

# By a number that can be pickled.
_under_way: dict[int, _Run] = {}
_numbers = itertools.count()

# Another machine may have a process of the same number; a fork has the same token.
_TOKEN = os.urandom(8).hex()


def _process() -> tuple[str, int]:
    return _TOKEN, os.getpid()


def run_chunk(
    where: tuple[tuple[str, int], int, int, str | None],
    fn: Callable[..., Any],
    rows: Sequence[Any],
    *shared: Any,
) -> list[Any]:
    """Runs on an executor's thread, in this or another process, on any machine.

    `where`: process and number of the run, number of the first row, leash. `rows` are
    bytes where they are sent. The exception of a row that fails bears its number in
    the chunk.
    """
    process, run_number, start, leash = where
    if process != _process():
        if leash is not None:
            pools.begin(leash, start)

        def go_on(i: int) -> None:
            if leash is not None and not os.path.exists(leash):
                raise _dropped()

        return _run_each(fn, rows, shared, go_on)
    run = _under_way.get(run_number)
    if run is None:
        raise _dropped()

    def begin(i: int) -> None:
        if start + i >= run.until:
            raise _dropped()
        workers.stand_in_by(functools.partial(run.current, start + i))

    with workers.as_host_code(run.ambient):
        return _run_each(fn, rows, shared, begin)


def _dropped() -> Exception:
    return futures.CancelledError("another row has failed, or the call is late")


def _run_each(
    fn: Callable[..., Any],
    rows: Sequence[Any],
    shared: Sequence[Any],
    begin: Callable[[int], None],
) -> list[Any]:
    values = []
    for i, row in enumerate(rows):
        try:
            begin(i)
            if isinstance(row, bytes):
                row = _Unpickler(row, shared).load()
            args, kwargs = row
            values.append(fn(*args, **kwargs))
        except BaseException as error:
            error.__dict__["hostcall_row"] = i  # also where attributes can't be set
            raise
    return values


class _Unpickler(pickle.Unpickler):
    def __init__(self, row: bytes, shared: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(row))
        self._shared = shared

    def persistent_load(self, number: Any) -> Any:
        return pools.fresh(self._shared[number])


def _bytes_of(rows: Sequence[Row], shared: list[np.ndarray], pickler: Any) -> list[Any]:
    """Each row with numbers in the place of what all share."""
    numbers = {id(array): number for number, array in enumerate(shared)}

    class Pickler(pickler):  # type: ignore[misc]
        def persistent_id(self, thing: Any) -> int | None:
            return numbers.get(id(thing))

    pickled = []
    for row in rows:
        file = io.BytesIO()
        Pickler(file, pickle.HIGHEST_PROTOCOL).dump(row)
        pickled.append(file.getvalue())
    return pickled


def _same(value: Any) -> Any:
    return value


def run_rows(
    executor: Any,
    fn: Callable[..., Any],
    rows: list[Row],
    current: Callable[[int], Any],
    ambient: tuple[Any, Any],
    timeout: float | None,
    describe: Callable[[str], str],
    shared: Sequence[np.ndarray] = (),
    once: bool = False,
) -> list[Any]:
    """All rows at once; their results in row order.

    A function may have `hostcall_steps(*args, **kwargs)`, which gives what is to run on
    the executor, its arguments, and what to make of its value on this thread. `shared`
    are arrays that all rows have, for an executor that sends them; with `once` no row
    is run twice.

    Raises what the first failing row raised, after the others have been cancelled or
    have ended. After a Ctrl-C, and when they are late, rows are cancelled too, but
    those that run are left to themselves.
    """
    own = None
    if executor is None:
        # Rows of a call that a row makes: in the pool they could wait for its threads,
        # which all wait for them.
        if workers.is_in_pool():
            own = workers.pool_of(len(rows))
        executor = own or workers.default_pool()
    try:
        run = _Run(executor, fn, rows, current, ambient, list(shared), once)
        return run.values(timeout, describe)
    finally:
        if own is not None:
            own.shutdown(wait=False)


class _Run:
    """Rows on their way.

    Attributes:
        until: rows from this number on are not begun.
    """

    def __init__(
        self,
        executor: Any,
        fn: Callable[..., Any],
        rows: list[Row],
        current: Callable[[int], Any],
        ambient: tuple[Any, Any],
        shared: list[np.ndarray],
        once: bool,
    ) -> None:
        self._executor, self._name = executor, name_of(fn)
        self._fn, self._rows, self._finish = _split(fn, rows)
        self._workers = executors.workers_of(executor, once)
        self._shared = shared
        self.ambient, self.current, self.until = ambient, current, len(rows)
        self._number = next(_numbers)
        self._started: dict[Any, range] = {}  # tasks, and which rows they run
        self._values: list[Any] = [None] * len(rows)
        self._there: list[Any] = []  # what workers find where rows share something
        self._end: float | None = None  # when it is late
        self._failed: tuple[range, Any] | None = None  # the first chunk, and with what

    def values(
        self, timeout: float | None, describe: Callable[[str], str]
    ) -> list[Any]:
        wait = True
        if timeout is not None:
            self._end = time.monotonic() + timeout
        try:
            try:
                _under_way[self._number] = self
                self._workers.open()
                self._run(describe)
            except (CallTimeoutError, KeyboardInterrupt, SystemExit):
                wait = False  # those that run are left to themselves
                raise
            if self._failed is not None:
                self._raise(*self._failed)
            pairs = zip(self._finish, self._values, strict=True)
            return [finish(value) for finish, value in pairs]
        finally:
            # What was raised holds this frame, and futures hold what was raised:
            # Dask's, as long as anybody holds them.
            started, self._started, self._failed = self._started, {}, None
            self._there = []
            _under_way.pop(self._number, None)
            self.until = 0
            self._workers.drop()
            try:
                running = self._workers.cancel(started)
                if wait:
                    self._wait_for(running, started)
                del running
            finally:
                started.clear()
                self._workers.forget()

    def _wait_for(self, running: list[Any], started: dict[Any, range]) -> None:
        while futures.wait(running, _LOOK).not_done:
            late = self._end is not None and time.monotonic() > self._end
            if late or self._workers.dead([started[task].start for task in running]):
                return

    def _run(self, describe: Callable[[str], str]) -> None:
        n, count = len(self._rows), self._workers.count()
        size = 1 if count is None else math.ceil(n / (_CHUNKS * count))
        at_once = n
        if count is not None and not self._workers.takes_back:
            at_once = _UNDER_WAY * count
        chunks = [range(i, min(i + size, n)) for i in range(0, n, size)]
        if count is None:
            self._shared = []  # Dask may have no workers yet, who could have it
        self._there = [self._workers.share(array) for array in self._shared]
        while True:
            while chunks and self._failed is None and len(self._started) < at_once:
                chunk = chunks.pop(0)
                self._started[self._send(chunk)] = chunk
            # Those behind one that failed are waited for at the end.
            started = self._started.items()
            awaited = {t: c for t, c in started if c.start < self.until}
            if not awaited:
                return
            left = _LOOK if self._end is None else self._end - time.monotonic()
            done = self._workers.wait(awaited, max(0.0, min(left, _LOOK)))
            if done:
                self._take(done)
                continue
            first = self._rows_of(min(awaited.values(), key=lambda c: c.start))
            if left <= 0:
                raise CallTimeoutError(describe(first))
            self._look_for_dead(first, [chunk.start for chunk in awaited.values()])

    def _take(self, done: Collection[Any]) -> None:
        outcomes = self._workers.outcomes(done)
        for task, (value, error) in zip(done, outcomes, strict=True):
            chunk = self._started.pop(task)
            if error is None:
                self._values[chunk.start : chunk.stop] = value
            elif self._failed is None or chunk.start < self._failed[0].start:
                self._failed, self.until = (chunk, error), chunk.start
                started = self._started.items()
                self._workers.cancel([t for t, c in started if c.start > self.until])

    def _send(self, chunk: range) -> Any:
        rows: Sequence[Any] = self._rows[chunk.start : chunk.stop]
        if executors.sends(self._executor):
            try:
                rows = _bytes_of(rows, self._shared, self._workers.pickler())
            except Exception as error:
                self._raise(chunk, error)
        where = (_process(), self._number, chunk.start, self._workers.leash)
        return self._workers.submit(run_chunk, where, self._fn, rows, *self._there)

    def _rows_of(self, rows: range) -> str:
        n = len(self._rows)
        if len(rows) == 1:
            return f"row {rows[0]} of {n}"
        return f"one of rows {rows[0]} to {rows[-1]} of {n}"

    def _look_for_dead(self, which: str, unfinished: list[int]) -> None:
        dead = self._workers.dead(unfinished)
        if dead:
            raise futures.BrokenExecutor(
                f"hostcall: a worker of executor= has died ({dead}) while it had rows"
                f" of `{self._name}`, {which} maybe. The pool has put another in its"
                " place, but does not run its rows again"
            )

    def _raise(self, chunk: range, error: Any) -> NoReturn:
        row = getattr(error, "hostcall_row", None)
        rows = chunk if row is None else chunk[row : row + 1]
        which = self._rows_of(rows)
        try:
            if isinstance(error, Exception):
                sent = (self._fn, self._rows[rows.start])
                executors.explain(error, self._executor, self._name, which, sent)
            raise error
        finally:
            del error


def _split(
    fn: Callable[..., Any], rows: list[Row]
) -> tuple[Callable[..., Any], list[Row], list[Callable[[Any], Any]]]:
    """What runs there, on what, and what is made of each value here."""
    steps = getattr(fn, "hostcall_steps", None)
    if steps is None:
        return fn, rows, [_same] * len(rows)
    split = [steps(*args, **kwargs) for args, kwargs in rows]
    there: list[Row] = [((part, *args), {}) for part, args, _ in split]
    return _apply, there, [finish for *_, finish in split]


def _apply(part: Callable[..., Any], *args: Any) -> Any:
    return part(*args)
