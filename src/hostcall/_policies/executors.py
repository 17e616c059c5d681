"""The kinds of `executor=`: what rows need from each.

A `concurrent.futures.Executor` can run tasks. To run the rows of a call on it, hostcall
must also know how many workers there are, send a value only once that all rows share,
stop rows that have not begun, and notice a worker that has died. For processes of this
machine files.py has what that takes. clusters.py has Dask and Ray.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
import traceback
from collections.abc import Callable, Collection
from concurrent import futures
from multiprocessing import connection
from typing import Any

import numpy as np

from hostcall._core import failures
from hostcall._core.frames import traceback_of
from hostcall._core.wait import result_of
from hostcall._policies.files import SharedFiles, chunks_begun
from hostcall._policies.layer import Executor, Task, Value

logger = logging.getLogger("hostcall")


def by_name(pool: Executor) -> bool:
    """Whether the executor sends functions by name, with pickle.

    The standard library's process pools do. Those of Dask, Ray and loky send a function
    without an importable name by value.
    """
    kind = type(pool)
    package, _, _ = kind.__module__.partition(".")
    if package == "multiprocessing":
        return kind.__name__ != "ThreadPool"
    return isinstance(pool, futures.ProcessPoolExecutor)


def is_of_processes(pool: Executor) -> bool:
    """Whether rows run in other processes of this machine."""
    return by_name(pool) or "loky" in type(pool).__module__.split(".")


class FailedRow(Exception):
    """What a chunk raises: the exception of a row, and which row of the chunk it was.

    Its text is short, since some executors cut the arguments of exceptions with a long
    one.
    """

    def __init__(self, error: Exception, row: int) -> None:
        super().__init__(error, row)
        self.error = error
        self.row = row
        trace = traceback_of(error)
        if trace is not None:  # for those that pickle this
            self.__traceback__ = trace.tb_next

    def __str__(self) -> str:
        return f"{type(self.error).__name__} in row {self.row} of a chunk"


class Workers:
    """An Executor: of threads, of processes, or of anything else.

    Attributes:
        leash: the path of the leash; None if workers run in this process, or may run on
            other machines.
        takes_back: whether submitted tasks that have not begun can still be stopped.
    """

    takes_back = True
    leash: str | None = None

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._files = SharedFiles()
        # Tasks that have ended, for `wait`; None once no task is waited for.
        self._ended: queue.SimpleQueue[Task] | None = queue.SimpleQueue()

    def open(self) -> None:
        """Lets rows begin."""
        pool = self._pool
        if isinstance(pool, futures.ProcessPoolExecutor) and pool._processes == {}:
            # Workers that were forked before JAX started are sound, so those that exist
            # already are left alone. `multiprocessing.Pool` forks when it is made.
            context = pool._mp_context
            if context is not None and context.get_start_method() == "fork":
                logger.warning(
                    "executor= forks this process, in which JAX has started. The"
                    " workers inherit locks of JAX's threads and may hang. Make the"
                    " executor with mp_context=multiprocessing.get_context('spawn'), or"
                    " 'forkserver'"
                )
        if is_of_processes(pool):
            self.leash = self._files.new_leash()

    def count(self) -> int | None:
        """How many tasks run at once; None if that is not known."""
        return getattr(self._pool, "_max_workers", None)

    def submit(self, fn: Callable[..., Any], *args: Any) -> Task:
        return self._noticed(self._pool.submit(fn, *args))

    def _noticed(self, task: futures.Future[Any]) -> futures.Future[Any]:
        # A callback, not `futures.wait`: that is not woken for tasks which an executor
        # cancels in shutdown(cancel_futures=True).
        task.add_done_callback(self._note)
        return task

    def _note(self, task: futures.Future[Any]) -> None:
        if (ended := self._ended) is not None:
            ended.put(task)

    def wait(self, tasks: Collection[Task], seconds: float) -> Collection[Task]:
        """Waits until a task has ended, or for `seconds`.

        Returns the tasks that have ended since the last call.
        """
        assert self._ended is not None, "`forget` comes after the last wait"
        ended = []
        with contextlib.suppress(queue.Empty):
            ended.append(self._ended.get(timeout=seconds))
            while True:
                ended.append(self._ended.get_nowait())
        return ended

    def outcomes(self, tasks: Collection[Task]) -> list[tuple[Value, Any]]:
        """(value, None) or (None, exception) for each of some tasks that have ended."""
        return [_outcome(task) for task in tasks]

    def cancel(self, tasks: Collection[Task]) -> list[Any]:
        """Cancels tasks that have not begun; returns the others, for `futures.wait`."""
        return [task for task in tasks if not task.cancel()]

    def dead(self, unfinished: Collection[int]) -> str:
        """Says which worker has died while it had an unfinished chunk; "" if none.

        `unfinished` has the first row of each of these chunks.
        """
        del unfinished
        return ""

    def share(self, array: np.ndarray) -> Any:
        """What to send in place of an array. In a worker, `fresh` turns it back."""
        return self._files.put(array)

    def drop(self) -> None:
        """Stops rows that have not begun, and deletes the shared arrays."""
        self._files.delete()

    def pickler(self) -> Any:
        """The pickler class that turns rows into bytes."""
        if by_name(self._pool):
            # Imported here, since most programs never make a pool of processes.
            from multiprocessing.reduction import ForkingPickler

            return ForkingPickler
        try:
            import cloudpickle
        except ImportError:
            from joblib.externals import cloudpickle
        return cloudpickle.Pickler

    def forget(self) -> None:
        """Called when no task is waited for any more, to release what was kept for
        them.
        """
        self._ended = None  # a task holds this object by its callback: a cycle


def _outcome(task: futures.Future[Any]) -> tuple[Any, Any]:
    try:
        return result_of(task), None
    except BaseException as error:
        return None, error


def fresh(shared: Any) -> np.ndarray:
    """In a worker: a row's own copy of a shared array."""
    return shared.copy() if isinstance(shared, np.ndarray) else shared.get()  # type: ignore[no-any-return]


# Seconds in which the results of a worker that has died may still arrive.
_ON_ITS_WAY = 2.0


class MultiprocessingPool(Workers):
    """`multiprocessing.Pool`.

    It replaces a worker that has died, but never reports the task that it was running,
    so this class watches the workers.
    """

    def __init__(self, pool: Executor) -> None:
        super().__init__(pool)
        # Worker processes by id; None for pools of threads, which don't die, and for
        # Ray's, which reports the tasks of dead workers itself.
        self._seen: dict[int, Any] | None = None
        self._since: float | None = None  # when a worker was first found missing
        self._begun_last: dict[int, int] = {}  # what the leash said last
        if by_name(pool):
            self._seen = {w.pid: w for w in list(pool._pool) if not _ended(w)}

    def count(self) -> int | None:
        return getattr(self._pool, "_processes", None)

    def submit(self, fn: Callable[..., Any], *args: Any) -> Any:
        task = self._noticed(futures.Future())
        task.set_running_or_notify_cancel()  # a pool can't cancel a task
        self._pool.apply_async(
            _with_traceback,
            (fn, args),
            callback=task.set_result,
            # Ray's pool wraps the worker's exception in one of its own.
            error_callback=lambda e: task.set_exception(getattr(e, "underlying", e)),
        )
        return task

    def _begun(self) -> dict[int, int]:
        """The process id of each chunk's worker, by the chunk's first row."""
        if self.leash is not None:
            with contextlib.suppress(FileNotFoundError):  # it is dropped
                self._begun_last = chunks_begun(self.leash)
        return self._begun_last

    def drop(self) -> None:
        self._begun()  # read the leash a last time: `dead` may still be asked
        super().drop()

    def dead(self, unfinished: Collection[int]) -> str:
        if self._seen is None:
            return ""
        # A copy, since the pool's own thread replaces workers.
        for worker in list(self._pool._pool):
            self._seen[worker.pid] = worker
        lost = self._lost(unfinished)
        if not lost:
            self._since = None
            return ""
        # The worker may have sent its result before it died.
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since < _ON_ITS_WAY:
            return ""
        pid = lost[0]
        code = self._seen[pid].exitcode if pid in self._seen else None
        if code is None:
            return f"process {pid}"
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"process {pid}, {cause}"

    def _lost(self, unfinished: Collection[int]) -> list[int]:
        """The ids of workers that have ended with an unfinished chunk."""
        assert self._seen is not None, "threads don't die"
        ended = {pid: worker for pid, worker in self._seen.items() if _ended(worker)}
        begun = self._begun()
        busy = [begun[start] for start in unfinished if start in begun]
        if busy:
            return [pid for pid in busy if pid in ended or pid not in self._seen]
        # A worker may have died after it took a task and before it wrote that into the
        # leash. One that ends by design, after its last task, has the exit code 0.
        return [pid for pid, worker in ended.items() if worker.exitcode]


def _ended(worker: Any) -> bool:
    """Whether a process has ended, without asking for its exit code: of two threads
    that do so at once, and the pool has one, a forkserver's process gives one 255.
    """
    return bool(connection.wait([worker.sentinel], 0))


def _with_traceback(fn: Callable[..., Any], args: Any) -> Any:
    """Runs `fn` on the worker, with the traceback as a note on what it raises.

    An exception that is pickled loses its traceback, but keeps its notes.
    """
    try:
        return fn(*args)
    except FailedRow as failed:
        with failures.beside_a_failure("noting its traceback in the worker"):
            trace = "".join(traceback.format_exception(failed.error)).rstrip()
            note = f"hostcall: the traceback in the worker:\n{trace}"
            failures.add_note(failed.error, note)
        raise


# --- Which kind an executor is --------------------------------------------------------


def sends(pool: Executor) -> bool:
    """Whether rows are sent to another process, and get copies of their arguments."""
    return is_of_processes(pool) or is_dask(pool) or is_ray(pool)


def is_dask(pool: Executor) -> bool:
    return hasattr(pool, "get_executor")


def is_ray(pool: Executor) -> bool:
    package, _, _ = type(pool).__module__.partition(".")
    return package == "ray"
