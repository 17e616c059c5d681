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
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any, NoReturn

import jax
import numpy as np

from hostcall import _jax
from hostcall._core import config
from hostcall._core.daemon import DaemonPool
from hostcall._core.errors import CallTimeoutError
from hostcall._core.process import PerProcess
from hostcall._core.source import name_of
from hostcall._core.wait import wait
from hostcall._policies import executors
from hostcall._policies.layer import Row, RowContext, TimedFunction
from hostcall._runtime import workers

_CHUNKS = 4  # for each worker
_UNDER_WAY = 2  # chunks for each worker, if they can't be taken back


class _ThisThread(threading.local):
    in_pool = False  # whether it is of a pool below


_thread = _ThisThread()


def _pool(threads: int) -> DaemonPool:
    return DaemonPool(threads, lambda: setattr(_thread, "in_pool", True))


# For rows without an `executor=`. Threads start when they are needed.
_default = _pool(config.POOL_WORKERS)


class OnExecutor:
    """A plain function whose rows run at the same time.

    Args:
        timed: the function. Code of hostcall's own may have a part for each process
            (`TimedFunction.split`).
        pool: of `executor=`, as `hc.host` takes it; None for the default one.
        once: no row may run twice.
    """

    def __init__(
        self, timed: TimedFunction, pool: Any = None, once: bool = False
    ) -> None:
        self.timed = timed
        self.name = name_of(timed.fn)
        self.pool = pool
        self.once = once
        self.sends = pool is not None and executors.sends(pool)

    def rows(self, rows: Sequence[Row], site: RowContext) -> list[Any]:
        pool = _default if self.pool is None else self.pool
        if pool is not _default or not _thread.in_pool:
            return _RowsThere(self, pool, rows, site).values()
        # A row on a thread of the pool makes this call and waits for it. Rows in the
        # same pool could wait for a free thread forever, so they get a pool of their
        # own.
        inner_pool = _pool(len(rows))
        try:
            return _RowsThere(self, inner_pool, rows, site).values()
        finally:
            inner_pool.shutdown()


def _shared(rows: Sequence[Row]) -> list[np.ndarray]:
    """The arrays that all rows share, as far as the first two tell."""
    if len(rows) < 2:
        return []
    leaves, leaves_of_second = map(jax.tree.leaves, rows[:2])
    # The engine makes one array for all rows of an argument without a batch axis.
    shared = {
        id(leaf): leaf
        for leaf, of_second in zip(leaves, leaves_of_second, strict=False)
        if leaf is of_second and type(leaf) is np.ndarray
    }
    # Python objects can't be put into a file as they are.
    return [array for array in shared.values() if not array.dtype.hasobject]


class _RowsThere:
    """The rows of one call while they run.

    Chunks that run in this process get this object, also if the executor pickles it. In
    another process it is None.

    Attributes:
        until: rows behind the one of this number do not begin, since it has failed. All
            threads lower it. If two do so at once, the higher one may stay, and starts
            a row that is then ignored.
        over: no row begins. Only the waiting thread sets it, so that it stays set.
    """

    def __init__(
        self, of: OnExecutor, pool: Any, rows: Sequence[Row], site: RowContext
    ) -> None:
        n = len(rows)
        self._of = of
        self._timed = of.timed
        self._pool = pool
        self._first = rows[0]  # whose shapes messages have
        self._fn, self._rows, self._finish = of.timed.split(rows)
        self._workers = executors.workers_of(pool, of.once)
        self._site = site
        self._current = site.current()
        self._context = contextvars.copy_context()  # for rows on threads
        self.until = n
        self.over = False
        self._at_once = n  # how many chunks are submitted and not done
        self._unsent: list[range] = []
        self._started: dict[Any, range] = {}  # the rows that each task runs
        self._values: list[Any] = [None] * n
        self._shared: list[np.ndarray] = []  # the arrays that all rows share, and
        self._stand_ins: list[Any] = []  # what is sent in place of them
        self._failed: tuple[range, Any] | None = None  # first failed chunk and error
        self._number = next(_runs.numbers)
        _runs.alive[self._number] = self

    def __reduce__(self) -> Any:
        return _run_of, (_runs.token, self._number)

    def values(self) -> list[Any]:
        began = time.monotonic()
        leaves_running_rows = False
        try:
            try:
                self._workers.open()
                self._divide()
                seconds = self._timed.timeout
                if seconds is not None:  # sharing arrays takes a part of it
                    seconds = max(0.0, seconds - (time.monotonic() - began))
                if not wait(self._step, seconds, self._look_for_dead):
                    stuck = self._rows_of(self._oldest())
                    raise self._timed.late(self._first, stuck)
            except (CallTimeoutError, KeyboardInterrupt, SystemExit):
                leaves_running_rows = True
                raise
            if self._failed is not None:
                self._raise(*self._failed)
            pairs = zip(self._finish, self._values, strict=True)
            return [finish(value) for finish, value in pairs]
        finally:
            # Break a cycle: the exception that leaves here holds this frame, the frame
            # holds the futures, and they hold the exception (Dask's for as long as
            # anything refers to them).
            started = self._started
            self._started = {}
            self._failed = None
            self._stand_ins = []
            self.over = True  # rows on threads of this process no longer begin,
            self._workers.drop()  # nor do rows in other processes
            try:
                running = self._workers.cancel(started)
                if not leaves_running_rows:
                    self._wait_for(running, started, began)
                del running
            finally:
                started.clear()
                self._workers.forget()
                # Chunks that still run have theirs.
                self._rows = ()
                self._values = []
                self._finish = []

    def _wait_for(
        self, running: list[Any], started: dict[Any, range], began: float
    ) -> None:
        """Waits for rows behind a failed one, until they are late too."""
        unfinished = [started[task].start for task in running]

        def have_ended(seconds: float) -> bool:
            not_done = futures.wait(running, seconds).not_done
            # The task of a worker that has died may never be done.
            return not not_done or bool(self._workers.dead(unfinished))

        seconds = self._timed.timeout
        if seconds is not None:
            seconds -= time.monotonic() - began
        wait(have_ended, seconds)

    def _divide(self) -> None:
        n = len(self._rows)
        count = self._workers.count()
        size = 1 if count is None else math.ceil(n / (_CHUNKS * count))
        self._unsent = [range(i, min(i + size, n)) for i in range(0, n, size)]
        if count is None:
            return  # Dask may have no workers yet to send shared arrays to
        if not self._workers.takes_back:
            self._at_once = _UNDER_WAY * count
        if self._of.sends:
            self._shared = _shared(self._rows)
            self._stand_ins = [self._workers.share(array) for array in self._shared]

    def _step(self, seconds: float) -> bool:
        """Waits so long for chunks at most; True if none is waited for any more."""
        self._send_more()
        done = self._workers.wait(self._awaited(), seconds)
        if done:
            self._take(done)
            self._send_more()
        return not self._awaited()

    def _awaited(self) -> dict[Any, range]:
        """The tasks that are waited for, with their rows.

        These are only the ones before a failed one: one of them may fail too, and is
        then the first. `_wait_for` waits for those behind it.
        """
        started = self._started.items()
        return {task: rows for task, rows in started if rows.start <= self.until}

    def _oldest(self) -> range:
        return min(self._awaited().values(), key=lambda rows: rows.start)

    def _send_more(self) -> None:
        while self._unsent and not self._failed and len(self._started) < self._at_once:
            chunk = self._unsent.pop(0)
            self._started[self._send(chunk)] = chunk

    def _take(self, done: Collection[Any]) -> None:
        outcomes = self._workers.outcomes(done)
        for task, (value, error) in zip(done, outcomes, strict=True):
            chunk = self._started.pop(task)
            if error is None:
                self._values[chunk.start : chunk.stop] = value
            elif self._failed is None or chunk.start < self._failed[0].start:
                # `until` first: a chunk that can't be cancelled any more reads it
                # before each of its rows.
                self._failed = chunk, error
                self.until = min(self.until, chunk.start)
                self._workers.cancel(
                    [
                        task
                        for task, rows in self._started.items()
                        if rows.start > chunk.start
                    ]
                )

    def _send(self, chunk: range) -> Any:
        rows: Sequence[Any] = self._rows[chunk.start : chunk.stop]
        if self._of.sends:
            try:
                rows = _bytes_of(rows, self._shared, self._workers.pickler())
            except Exception as error:
                self._raise(chunk, error)
        setting = (chunk.start, self._timed.settings.traced, self._workers.leash)
        return self._workers.submit(
            run_chunk, self, setting, self._fn, rows, *self._stand_ins
        )

    def chunk(self, start: int, rows: Sequence[Any], shared: Sequence[Any]) -> Any:
        """Runs the rows from `start` on, on the calling thread of this process."""

        def rows_that_begin() -> Iterator[Row]:
            for i, row in enumerate(rows, start):
                if self.over or i > self.until:
                    raise _dropped()
                workers.answer_here(functools.partial(self._current, i))
                yield _taken(row, shared)

        context = self._context.copy()  # since no two threads may be in one context
        settings = self._timed.settings
        try:
            return settings.run(context.run, _run_each, self._fn, rows_that_begin())
        except BaseException:
            # At once: the waiting thread may take a while to notice.
            self.until = min(self.until, start)
            raise

    def _rows_of(self, rows: range) -> str:
        total = len(self._rows)
        if len(rows) == 1:
            return f"row {rows[0]} of {total}"
        return f"one of rows {rows[0]} to {rows[-1]} of {total}"

    def _look_for_dead(self) -> None:
        dead = self._workers.dead([rows.start for rows in self._awaited().values()])
        if dead:
            raise futures.BrokenExecutor(
                f"hostcall: a worker of executor= has died ({dead}) while it had rows"
                f" of `{self._of.name}`, perhaps {self._rows_of(self._oldest())}. The"
                " pool has started another worker, but does not run those rows again"
            )

    def _raise(self, chunk: range, error: Any) -> NoReturn:
        error, row = _as_raised(error)
        rows = chunk if row is None else chunk[row : row + 1]
        try:
            if len(rows) == 1:
                self._site.failed(rows.start)
            if isinstance(error, Exception):
                executors.explain(
                    error=error,
                    pool=self._pool,
                    name=self._of.name,
                    which=self._rows_of(rows),
                    sent_objects=(self._fn, self._rows[rows.start]),
                )
            raise error
        finally:
            del error


# --- Chunks: what is sent to an executor, and what a worker does with it --------------


class _PickledRuns(PerProcess):
    """The runs of this process, by number.

    The token names the process: one on another machine may have the same id.
    """

    def __init__(self) -> None:
        self.token = os.urandom(8)
        self.numbers = itertools.count()
        self.alive = weakref.WeakValueDictionary[int, _RowsThere]()
        super().__init__()


_runs = _PickledRuns()


def _run_of(token: bytes, number: int) -> _RowsThere | None:
    """What a pickled run is: the run, or None in another process."""
    if token != _runs.token:
        return None
    if (run := _runs.alive.get(number)) is None:
        raise _dropped()
    return run


def run_chunk(
    run: _RowsThere | None,
    setting: tuple[int, _jax.Traced | None, str | None],
    fn: Callable[..., Any],
    rows: Sequence[Any],
    *shared: Any,
) -> list[Any]:
    """Runs a chunk; called by the executor, in this or another process or machine.

    Args:
        run: the run; None in another process.
        setting: the number of the first row, the settings of JAX that the run's trace
            had of its own, and the leash.
        fn: the function.
        rows: (args, kwargs) of each row, or bytes if they were sent.
        *shared: arrays that all rows share, as `Workers.share` made them.
    """
    start, traced, leash = setting
    if run is not None:
        return run.chunk(start, rows, shared)  # type: ignore[no-any-return]
    if leash is not None:
        executors.begin(leash, start)

    def rows_that_begin() -> Iterator[Row]:
        for row in rows:
            # The process of the call has deleted it: no further row may begin.
            if leash is not None and not os.path.exists(leash):
                raise _dropped()
            yield _taken(row, shared)

    former_settings = None if traced is None else traced.enter()
    try:
        return _run_each(fn, rows_that_begin())
    finally:
        if traced is not None and former_settings is not None:
            traced.leave(former_settings)


def _run_each(fn: Callable[..., Any], rows: Iterable[Row]) -> list[Any]:
    """Calls `fn` for one row after the other, on this thread.

    `rows` may do what comes before each row.
    """
    values: list[Any] = []
    try:
        for args, kwargs in rows:
            values.append(fn(*args, **kwargs))
    except Exception as error:  # any other may end a worker, so it stays what it is
        raise executors.FailedRow(error, len(values)) from None
    return values


def _as_raised(error: BaseException) -> tuple[BaseException, int | None]:
    """The exception that a row raised, as if it had been sent by itself, and which row
    of its chunk that was, if it is known.
    """
    if not isinstance(error, executors.FailedRow):
        return error, None
    error.error.with_traceback(error.__traceback__)
    if error.__cause__ is not None:  # the traceback in another process, as text
        error.error.__cause__ = error.__cause__
    return error.error, error.row


def _dropped() -> Exception:
    return futures.CancelledError(
        "hostcall: this row did not begin: another row failed, or the call is late"
    )


class _Unpickler(pickle.Unpickler):
    def __init__(self, row: bytes, shared: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(row))
        self._shared = shared

    def persistent_load(self, number: Any) -> Any:
        return executors.fresh(self._shared[number])


def _taken(row: Any, shared: Sequence[Any]) -> Row:
    return _Unpickler(row, shared).load() if isinstance(row, bytes) else row  # type: ignore[no-any-return]


def _bytes_of(rows: Sequence[Row], shared: list[np.ndarray], pickler: Any) -> list[Any]:
    """Pickles each row, with a number in place of each array that all rows share."""
    numbers = {id(array): number for number, array in enumerate(shared)}

    class Pickler(pickler):  # type: ignore[misc]
        def persistent_id(self, value: Any) -> int | None:
            return numbers.get(id(value))

    pickled = []
    for row in rows:
        file = io.BytesIO()
        Pickler(file, pickle.HIGHEST_PROTOCOL).dump(row)
        pickled.append(file.getvalue())
    return pickled
