"""Runs the rows of a call with vmap_method="parallel" on an executor.

Rows are sent in chunks, about four for each worker. So the cost of a task is shared by
several rows if there are many, and the workers still end at about the same time. If the
executor can't take back a task that has not begun, only two chunks for each worker are
submitted at once, and the rest can be dropped here.

Guarantees
  * Results are in row order.
  * If rows fail, the exception of the first failing row is raised. Rows behind it that
    have not begun are cancelled; rows before it end, since one of them may fail too.
  * After a timeout or Ctrl-C no row begins, and running rows are left to themselves.
  * A worker that dies fails the call, instead of leaving it waiting.
"""

from __future__ import annotations

import contextvars
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

import jax
import numpy as np

from hostcall import _jax, _native
from hostcall._core.errors import CallTimeoutError
from hostcall._core.source import name_of
from hostcall._core.wait import SLICE, slice_of
from hostcall._runtime import executors, waits, workers
from hostcall._runtime.workers import Bound, Current, Row, place_here, split

_CHUNKS = 4  # for each worker
_UNDER_WAY = 2  # chunks for each worker, if they can't be taken back


def run_rows(
    run: Bound,
    rows: Sequence[Row],
    current: Current,
    executor: Any = None,
    once: bool = False,
) -> list[Any]:
    """Runs all rows at the same time; returns their results in row order.

    Args:
        run: the function. Code of hostcall's own may have steps (`HostCode.split`).
        rows: (args, kwargs) of each row.
        current: returns what `hc.current()` answers in a row, by the row's number.
        executor: see `executors.is_executor`; None for the default pool.
        once: no row may run twice.

    Raises:
        BaseException: what the first failing row raised.
        CallTimeoutError: the rows are late.
    """
    own = None
    if executor is None:
        # A row on a thread of the pool makes this call and waits for it. Rows in the
        # same pool could wait for a free thread forever, so they get a pool of their
        # own.
        if workers.is_in_pool():
            own = workers.pool_of(len(rows))
        executor = own or workers.default_pool
    try:
        return _Run(run, rows, current, executor, once).values(rows[0])
    finally:
        if own is not None:
            own.shutdown(wait=False)


def _shared(rows: Sequence[Row]) -> list[np.ndarray]:
    """The arrays that all rows share, as far as the first two tell."""
    if len(rows) < 2:
        return []
    pairs = zip(*map(jax.tree.leaves, rows[:2]), strict=False)
    same = {id(a): a for a, b in pairs if a is b and type(a) is np.ndarray}
    return [array for array in same.values() if not array.dtype.hasobject]


class _Run:
    """The rows of one call while they run.

    Attributes:
        settings: the settings of JAX that the rows have.
        current: as in `run_rows`.
        context: the context variables of the waiting thread, for rows on threads.
        place: the number of the call's place, for traces.
        until: rows from this number on do not begin. Worker threads read it while the
            waiting thread lowers it; a stale value starts a row that is then ignored.
        failing: the same, for the chunks on this process's threads that have failed.
            They lower it themselves. If two do so at once, the higher one may stay.
    """

    def __init__(
        self,
        run: Bound,
        rows: Sequence[Row],
        current: Current,
        executor: Any,
        once: bool,
    ) -> None:
        self._bound, self._name = run, name_of(run.fn)
        self._executor = executor
        self._fn, self._rows, self._finish = split(run.fn, rows)
        self._workers = executors.workers_of(executor, once)
        self._sends = executors.sends(executor)
        self._shared = _shared(self._rows) if self._sends else []
        self.place = place_here()
        self.settings, self.current = run.settings, current
        self.context = contextvars.copy_context()
        self.until = self.failing = len(rows)
        self._number = next(_numbers)
        self._started: dict[Any, range] = {}  # the rows that each task runs
        self._lanes: dict[Any, waits.Lane] = {}  # while traced, for other processes
        self._values: list[Any] = [None] * len(rows)
        self._there: list[Any] = []  # what is sent in place of the shared arrays
        self._end: float | None = None  # the time at which the rows are late
        self._failed: tuple[range, Any] | None = None  # first failed chunk and error

    def values(self, first: Row) -> list[Any]:
        wait = True
        if self._bound.timeout is not None:
            self._end = time.monotonic() + self._bound.timeout
        try:
            try:
                # Before anything is submitted: a chunk looks its run up here. No lock,
                # since each run has its own key.
                _under_way[self._number] = self
                self._workers.open()
                self._run(first)
            except (CallTimeoutError, KeyboardInterrupt, SystemExit):
                wait = False  # running rows are left to themselves
                raise
            if self._failed is not None:
                self._raise(*self._failed)
            pairs = zip(self._finish, self._values, strict=True)
            return [finish(value) for finish, value in pairs]
        finally:
            # Break a cycle: the exception that leaves here holds this frame, the frame
            # holds the futures, and they hold the exception (Dask's for as long as
            # anything refers to them).
            started, self._started, self._failed = self._started, {}, None
            self._there = []
            for lane in self._lanes.values():
                lane.end()
            self._lanes = {}
            _under_way.pop(self._number, None)
            self.until = 0  # rows on threads of this process no longer begin,
            self._workers.drop()  # nor do rows in other processes
            try:
                running = self._workers.cancel(started)
                if wait:
                    self._wait_for(running, started)
                del running
            finally:
                started.clear()
                self._workers.forget()

    def _wait_for(self, running: list[Any], started: dict[Any, range]) -> None:
        while futures.wait(running, SLICE).not_done:
            late = self._end is not None and time.monotonic() > self._end
            if late or self._workers.dead([started[task].start for task in running]):
                return

    def _run(self, first: Row) -> None:
        n, count = len(self._rows), self._workers.count()
        size = 1 if count is None else math.ceil(n / (_CHUNKS * count))
        at_once = n
        if count is not None and not self._workers.takes_back:
            at_once = _UNDER_WAY * count
        unsent = [range(i, min(i + size, n)) for i in range(0, n, size)]
        if count is None:
            self._shared = []  # Dask may have no workers yet to send shared arrays to
        self._there = [self._workers.share(array) for array in self._shared]
        while True:
            while unsent and self._failed is None and len(self._started) < at_once:
                chunk = unsent.pop(0)
                self._started[self._send(chunk)] = chunk
            # Here only chunks before a failed one are waited for: one of them may fail
            # too, and is then the first. `_wait_for` waits for those behind it.
            started = self._started.items()
            awaited = {t: c for t, c in started if c.start < self.until}
            if not awaited:
                return
            left = slice_of(self._end)
            done = self._workers.wait(awaited, left)
            if done:
                self._take(done)
                continue
            which = self._rows_of(min(awaited.values(), key=lambda c: c.start))
            if left <= 0:
                raise self._bound.late(first, which)
            self._look_for_dead(which, [chunk.start for chunk in awaited.values()])

    def _take(self, done: Collection[Any]) -> None:
        outcomes = self._workers.outcomes(done)
        for task, (value, error) in zip(done, outcomes, strict=True):
            chunk = self._started.pop(task)
            if task in self._lanes:
                self._lanes.pop(task).end()
            if error is None:
                self._values[chunk.start : chunk.stop] = value
            elif self._failed is None or chunk.start < self._failed[0].start:
                # `until` first: a chunk that can't be cancelled any more reads it
                # before each of its rows.
                self._failed, self.until = (chunk, error), chunk.start
                started = self._started.items()
                self._workers.cancel([t for t, c in started if c.start > self.until])

    def _send(self, chunk: range) -> Any:
        rows: Sequence[Any] = self._rows[chunk.start : chunk.stop]
        if self._sends:
            try:
                rows = _bytes_of(rows, self._shared, self._workers.pickler())
            except Exception as error:
                self._raise(chunk, error)
        here = _process(), self._number, self.settings.traced
        where = (*here, chunk.start, self._workers.leash)
        task = self._workers.submit(run_chunk, where, self._fn, rows, *self._there)
        if self._sends and _native.events_on():
            self._lanes[task] = waits.Lane(self.place, chunk.start, len(chunk))
        return task

    def _rows_of(self, rows: range) -> str:
        total = len(self._rows)
        if len(rows) == 1:
            return f"row {rows[0]} of {total}"
        return f"one of rows {rows[0]} to {rows[-1]} of {total}"

    def _look_for_dead(self, which: str, unfinished: list[int]) -> None:
        dead = self._workers.dead(unfinished)
        if dead:
            raise futures.BrokenExecutor(
                f"hostcall: a worker of executor= has died ({dead}) while it had rows"
                f" of `{self._name}`, perhaps {which}. The pool has started another"
                " worker, but does not run those rows again"
            )

    def _raise(self, chunk: range, error: Any) -> NoReturn:
        row = vars(error).get("hostcall_row")
        rows = chunk if row is None else chunk[row : row + 1]
        which = self._rows_of(rows)
        try:
            if len(rows) == 1:
                error.__dict__["hostcall_row"] = rows.start
            if isinstance(error, Exception):
                sent = (self._fn, self._rows[rows.start])
                executors.explain(error, self._executor, self._name, which, sent)
            raise error
        finally:
            del error


# --- Chunks: what is sent to an executor, and what a worker does with it --------------

# The runs of this process. A chunk carries its run's number, which can be pickled.
_under_way: dict[int, Any] = {}
_numbers = itertools.count()

# Token and process id together name this process: another machine may have a process
# with the same id, and a forked child has the same token.
_TOKEN = os.urandom(8).hex()


def _process() -> tuple[str, int]:
    return _TOKEN, os.getpid()


def run_chunk(
    where: tuple[tuple[str, int], int, _jax.Traced | None, int, str | None],
    fn: Callable[..., Any],
    rows: Sequence[Any],
    *shared: Any,
) -> list[Any]:
    """Runs a chunk; called by the executor, in this or another process or machine.

    The exception of a row that fails gets the row's index in the chunk as an attribute.

    Args:
        where: the run's process and number, the settings of JAX that its trace had of
            its own, the number of the first row, and the leash.
        fn: the function.
        rows: (args, kwargs) of each row, or bytes if they were sent.
        *shared: arrays that all rows share, as `Workers.share` made them.
    """
    of, run_number, traced, start, leash = where
    if of != _process():
        if leash is not None:
            executors.begin(leash, start)

        def go_on(i: int) -> None:
            if leash is not None and not os.path.exists(leash):
                raise _dropped()

        before = None if traced is None else traced.enter()
        try:
            return _run_each(fn, rows, shared, go_on)
        finally:
            if traced is not None and before is not None:
                traced.leave(before)
    run = _under_way.get(run_number)
    if run is None:
        raise _dropped()

    def begin(i: int) -> None:
        if start + i >= min(run.until, run.failing):
            raise _dropped()
        workers.stand_in_by(functools.partial(run.current, start + i))

    started = _native.ticks()
    try:
        with workers.as_host_code(run.settings):
            # A copy, since no two threads may be in one context.
            context: contextvars.Context = run.context.copy()
            return context.run(_run_each, fn, rows, shared, begin)
    except BaseException:
        # At once: the waiting thread may take a while to notice.
        run.failing = min(run.failing, start)
        raise
    finally:
        _native.note_event(waits.ROW, run.place, started, start, len(rows))


def _dropped() -> Exception:
    return futures.CancelledError(
        "hostcall: this row did not begin: another row failed, or the call is late"
    )


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
            # Through `__dict__`, since some exceptions refuse to have attributes set.
            error.__dict__["hostcall_row"] = i
            raise
    return values


class _Unpickler(pickle.Unpickler):
    def __init__(self, row: bytes, shared: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(row))
        self._shared = shared

    def persistent_load(self, number: Any) -> Any:
        return executors.fresh(self._shared[number])


def _bytes_of(rows: Sequence[Row], shared: list[np.ndarray], pickler: Any) -> list[Any]:
    """Pickles each row, with a number in place of each array that all rows share."""
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
