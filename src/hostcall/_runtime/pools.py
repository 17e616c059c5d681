"""Executors whose workers are on this machine, as rows use them.

Beside the methods of a `concurrent.futures.Executor` rows need to know how many workers
there are, to send a value once that all rows share, and to learn of a worker that has
died.
"""

from __future__ import annotations

import contextlib
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from concurrent import futures
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np


def by_name(given: Any) -> bool:
    """Whether functions go to the workers as names, by pickle: the standard library's
    process pools. Those of Dask, Ray and loky send what has no name by value.
    """
    kind = type(given)
    if kind.__module__.partition(".")[0] == "multiprocessing":
        return kind.__name__ != "ThreadPool"
    return isinstance(given, futures.ProcessPoolExecutor)


def is_of_processes(given: Any) -> bool:
    """Whether rows run in other processes of this machine."""
    return by_name(given) or "loky" in type(given).__module__.split(".")


class Workers:
    """An Executor: of threads, of processes, or of anything.

    Attributes:
        leash: a file of this machine; rows begin as long as it is there, and it knows
            who began which. None: they may be on other machines, or in this process.
        takes_back: whether tasks that have not begun can be kept from it.
    """

    takes_back = True

    def __init__(self, given: Any) -> None:
        self._given = given
        self._files: list[str] = []
        self.leash: str | None = None
        self._ended: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def open(self) -> None:
        """From here on rows may begin."""
        if is_of_processes(self._given):
            self.leash = self._file()

    def count(self) -> int | None:
        """How many tasks run at once; None where that is not known."""
        return getattr(self._given, "_max_workers", None)

    def submit(self, fn: Callable[..., Any], *args: Any) -> Any:
        task = self._given.submit(fn, *args)
        # Not `futures.wait`: an executor that is shut down with cancel_futures=True
        # tells nobody who waits so.
        task.add_done_callback(self._ended.put)
        return task

    def wait(self, tasks: Collection[Any], seconds: float) -> Collection[Any]:
        """Those that have ended since the last time; waits until there is one, or so
        long.
        """
        ended = []
        with contextlib.suppress(queue.Empty):
            ended.append(self._ended.get(timeout=seconds))
            while True:
                ended.append(self._ended.get_nowait())
        return ended

    def outcomes(self, tasks: Collection[Any]) -> list[tuple[Any, Any]]:
        """(value, None) or (None, exception) of tasks that have ended."""
        return [_outcome(task) for task in tasks]

    def cancel(self, tasks: Collection[Any]) -> list[Any]:
        """Cancels what has not begun; gives the rest, for `futures.wait`."""
        return [task for task in tasks if not task.cancel()]

    def dead(self, unfinished: Collection[int]) -> str:
        """Which worker has died with one of the chunks that begin with these rows."""
        del unfinished
        return ""

    def share(self, array: np.ndarray) -> Any:
        """What `fresh` makes the array of, in a worker of this machine."""
        return _File(self._file(array), array)

    def _file(self, array: np.ndarray | None = None) -> str:
        size = 0 if array is None else array.nbytes
        handle, path = tempfile.mkstemp(".hostcall", dir=_memory_for(size))
        self._files.append(path)
        with os.fdopen(handle, "wb") as file:
            if array is not None:
                array.tofile(file)
        return path

    def drop(self) -> None:
        """No more rows begin, and nobody reads any more what was shared."""
        for path in self._files:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def pickler(self) -> Any:
        """The class by which rows are sent as bytes."""
        if by_name(self._given):
            return ForkingPickler
        try:
            import cloudpickle
        except ImportError:
            from joblib.externals import cloudpickle
        return cloudpickle.Pickler

    def forget(self) -> None:
        """All have ended."""


def _outcome(task: futures.Future[Any]) -> tuple[Any, Any]:
    try:
        return task.result(), None
    except BaseException as error:
        return None, error


class _File:
    """An array in a file of this machine's memory, where it has such files. Each row
    gets pages of its own of what it writes to.
    """

    def __init__(self, path: str, array: np.ndarray) -> None:
        self.path, self.dtype, self.shape = path, array.dtype, array.shape

    def get(self) -> np.ndarray:
        pages = np.memmap(self.path, self.dtype, "c", shape=self.shape)
        return pages.view(np.ndarray)


def _memory_for(size: int) -> str | None:
    """The folder of files that are no disk's; None where there is no room in it."""
    try:
        there = os.statvfs("/dev/shm")
    except (OSError, AttributeError):
        return None
    room = there.f_bavail * there.f_frsize > 2 * size
    return "/dev/shm" if room and os.access("/dev/shm", os.W_OK) else None


def begin(leash: str, start: int) -> None:
    """In a worker: notes who runs the chunk from this row on, if rows may begin."""
    with contextlib.suppress(FileNotFoundError):
        file = os.open(leash, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, b"%d %d\n" % (start, os.getpid()))
        finally:
            os.close(file)


def fresh(shared: Any) -> np.ndarray:
    """A row's own array of what its worker got."""
    if isinstance(shared, np.ndarray):
        return shared.copy()
    array: np.ndarray = shared.get()
    return array


_ON_ITS_WAY = 2.0  # seconds


class Pool(Workers):
    """`multiprocessing.Pool`. It replaces a worker that has died, and never tells of
    the task that died with it.
    """

    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        self._seen: dict[int, Any] | None = None  # threads do not die, and Ray's tell
        self._since: float | None = None  # somebody is missed
        self._begun_last: dict[int, int] = {}
        if by_name(pool):
            self._seen = {w.pid: w for w in list(pool._pool) if w.exitcode is None}

    def count(self) -> int | None:
        return getattr(self._given, "_processes", None)

    def submit(self, fn: Callable[..., Any], *args: Any) -> Any:
        task: futures.Future[Any] = futures.Future()
        task.add_done_callback(self._ended.put)
        task.set_running_or_notify_cancel()  # the pool can't take it back
        self._given.apply_async(
            _with_traceback,
            (fn, args),
            callback=task.set_result,
            # Ray's pool puts another exception around the worker's.
            error_callback=lambda e: task.set_exception(getattr(e, "underlying", e)),
        )
        return task

    def _begun(self) -> dict[int, int]:
        """By the first row of each chunk that runs or has run the worker's number."""
        if self.leash is not None:
            with contextlib.suppress(FileNotFoundError), open(self.leash) as file:
                pairs = (line.split() for line in file)
                self._begun_last = {int(start): int(pid) for start, pid in pairs}
        return self._begun_last

    def drop(self) -> None:
        self._begun()  # some may be waited for
        super().drop()

    def dead(self, unfinished: Collection[int]) -> str:
        if self._seen is None:
            return ""
        processes = list(self._given._pool)
        self._seen.update((worker.pid, worker) for worker in processes)
        alive = {worker.pid for worker in processes if worker.exitcode is None}
        begun = self._begun()
        lost = [begun[s] for s in unfinished if s in begun and begun[s] not in alive]
        if not lost and not any(start in begun for start in unfinished):
            # One may have died before it could say what it had.
            lost = [pid for pid, worker in self._seen.items() if worker.exitcode]
        if not lost:
            self._since = None
            return ""
        # What it had done may still be on its way.
        self._since = self._since or time.monotonic()
        if time.monotonic() - self._since < _ON_ITS_WAY:
            return ""
        code = self._seen[lost[0]].exitcode if lost[0] in self._seen else None
        how = "" if code is None else f", exit code {code}"
        if code is not None and code < 0:
            how = f", signal {-code}"
        return f"process {lost[0]}{how}"


def _with_traceback(fn: Callable[..., Any], args: Any) -> Any:
    """Runs there. An exception that is pickled loses its traceback."""
    try:
        return fn(*args)
    except Exception as error:
        error.add_note("hostcall: in a worker:\n" + traceback.format_exc().rstrip())
        raise
