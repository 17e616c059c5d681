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
import math
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent import futures
from typing import Any, NoReturn

import jax
import numpy as np

from hostcall._core import config
from hostcall._core.daemon import DaemonPool
from hostcall._core.errors import CallTimeoutError
from hostcall._core.source import name_of
from hostcall._core.wait import wait
from hostcall._policies import chunks, clusters, executors, worker_failures
from hostcall._policies.layer import (
    Executor,
    Row,
    RowContext,
    Task,
    TimedFunction,
    Value,
)
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
        self, timed: TimedFunction, pool: Executor = None, once: bool = False
    ) -> None:
        self.timed = timed
        self.name = name_of(timed.fn)
        self.pool = pool
        self.once = once
        self.sends = pool is not None and executors.sends(pool)

    def rows(self, rows: Sequence[Row], site: RowContext) -> list[Value]:
        if self.pool is not None:
            return RunningRows(self, self.pool, rows, site).values()
        if not _thread.in_pool:
            return RunningRows(self, _default, rows, site).values()
        # A row on a thread of the pool makes this call and waits for it. Rows in the
        # same pool could wait for a free thread forever, so they get a pool of their
        # own.
        inner_pool = _pool(len(rows))
        try:
            return RunningRows(self, inner_pool, rows, site).values()
        finally:
            inner_pool.shutdown()


def _shared(rows: Sequence[Row]) -> list[np.ndarray]:
    """The arrays that all rows share, as far as the first two tell."""
    if len(rows) < 2:
        return []
    leaves, leaves_of_second = map(jax.tree.leaves, rows[:2])
    shared = {}
    for leaf, of_second in zip(leaves, leaves_of_second, strict=False):
        # The engine makes one array for all rows of an argument without a batch axis.
        # Python objects in it can't be put into a file as they are.
        is_array = type(leaf) is np.ndarray
        if is_array and leaf is of_second and not leaf.dtype.hasobject:
            shared[id(leaf)] = leaf  # each once
    return list(shared.values())


class RunningRows:
    """The rows of one call while they run.

        rows       0 1 | 2 3 | 4 5 | 6 7 | 8 9
        chunks     done  runs  runs  unsent

    The thread of the call sends chunks and takes what they return (`values`). Threads
    and processes of the executor run them (`chunk`, chunks.py). Chunks that run in this
    process get this object, also if the executor pickles it. In another process it is
    None.

    Attributes:
        until: rows behind the one of this number do not begin, since it has failed. All
            threads lower it. If two do so at once, the higher one may stay, and starts
            a row that is then ignored.
        over: no row begins. Only the waiting thread sets it, so that it stays set.
    """

    def __init__(
        self, of: OnExecutor, pool: Executor, rows: Sequence[Row], site: RowContext
    ) -> None:
        n = len(rows)
        self._of = of
        self._timed = of.timed
        self._pool = pool
        self._first = rows[0]  # whose shapes messages have
        self._fn, self._rows, self._finish = of.timed.split(rows)
        self._workers = clusters.workers_of(pool, of.once)
        self._site = site
        self._current = site.current()
        self._context = contextvars.copy_context()  # for rows on threads
        self.until = n
        self.over = False
        self._at_once = n  # how many chunks are submitted and not done
        self._unsent: list[range] = []
        self._started: dict[Task, range] = {}  # the rows that each task runs
        self._values: list[Value] = [None] * n
        self._shared: list[np.ndarray] = []  # the arrays that all rows share, and
        self._stand_ins: list[Any] = []  # what is sent in place of them
        self._failed: tuple[range, Any] | None = None  # first failed chunk and error
        self._number = chunks.runs.add(self)

    def __reduce__(self) -> Any:
        return chunks.run_of, (chunks.runs.token, self._number)

    # --- On the thread of the call ---------------------------------------------------

    def values(self) -> list[Value]:
        """Runs the rows; returns their results. To be called once."""
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
                chunk, error = self._failed
                try:
                    self._raise(chunk, error)
                finally:
                    del error
            pairs = zip(self._finish, self._values, strict=True)
            return [finish(value) for finish, value in pairs]
        finally:
            self._end(None if leaves_running_rows else began)

    def _end(self, waits_since: float | None) -> None:
        """Lets no row begin any more, and lets go of all that belongs to the run.

        Waits for the rows that run, with the limit from `waits_since` on; None: not.

        All is let go of to break a cycle: an exception that leaves `values` holds its
        frame and so this object, which has the futures, and they hold the exception
        (Dask's for as long as anything refers to them).
        """
        started = self._started
        self._started = {}
        self._failed = None
        self._stand_ins = []
        self.over = True  # rows on threads of this process no longer begin,
        self._workers.drop()  # nor do rows in other processes
        try:
            running = self._workers.cancel(started)
            if waits_since is not None:
                self._wait_for(running, started, waits_since)
            del running
        finally:
            started.clear()
            self._workers.forget()
            # Chunks that still run have theirs.
            self._rows = ()
            self._values = []
            self._finish = []

    def _wait_for(
        self, running: list[Task], started: dict[Task, range], began: float
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
        """Divides the rows into chunks, and shares the arrays that all of them have."""
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

    def _awaited(self) -> dict[Task, range]:
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

    def _take(self, done: Collection[Task]) -> None:
        """Keeps what chunks returned, or the error of the first one that failed."""
        outcomes = self._workers.outcomes(done)
        for task, (values, error) in zip(done, outcomes, strict=True):
            chunk = self._started.pop(task)
            if error is None:
                self._values[chunk.start : chunk.stop] = values
            elif self._failed is None or chunk.start < self._failed[0].start:
                self._failed = chunk, error
                # `until` first: a chunk that can't be cancelled any more reads it
                # before each of its rows.
                self.until = min(self.until, chunk.start)
                started = self._started.items()
                behind = [task for task, rows in started if rows.start > chunk.start]
                self._workers.cancel(behind)

    def _send(self, chunk: range) -> Task:
        """Submits a chunk; raises the chunk's error if it can't be pickled."""
        rows = self._rows[chunk.start : chunk.stop]
        sent_rows: Sequence[chunks.SentRow] = rows
        if self._of.sends:
            try:
                pickler = self._workers.pickler()
                sent_rows = chunks.pickled(rows, self._shared, pickler)
            except Exception as error:
                self._raise(chunk, error)
        return self._workers.submit(
            chunks.run_chunk,
            self,
            chunk.start,
            self._timed.settings.traced,
            self._workers.leash,
            self._fn,
            sent_rows,
            *self._stand_ins,
        )

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
        """Raises the error of a chunk as its row raised it, and names the row."""
        error, row = chunks.as_raised(error)
        rows = chunk if row is None else chunk[row : row + 1]
        try:
            if len(rows) == 1:
                self._site.failed(rows.start)
            if isinstance(error, Exception):
                worker_failures.explain(
                    error=error,
                    pool=self._pool,
                    name=self._of.name,
                    which=self._rows_of(rows),
                    sent_objects=(self._fn, self._rows[rows.start]),
                )
            raise error
        finally:
            del error  # its traceback has this frame, which would keep it alive

    # --- On threads of the executor, if it runs them in this process -----------------

    def chunk(
        self, start: int, rows: Sequence[chunks.SentRow], shared: Sequence[Any]
    ) -> list[Value]:
        """Runs the rows from `start` on, on the calling thread."""

        def rows_that_begin() -> Iterator[Row]:
            for i, row in enumerate(rows, start):
                if self.over or i > self.until:
                    raise chunks.dropped()
                workers.answer_here(functools.partial(self._current, i))
                yield chunks.unpickled(row, shared)

        context = self._context.copy()  # since no two threads may be in one context
        run = self._timed.settings.run
        try:
            return run(context.run, chunks.run_each, self._fn, rows_that_begin())  # type: ignore[no-any-return]
        except BaseException:
            # At once: the waiting thread may take a while to notice.
            self.until = min(self.until, start)
            raise
