"""What may be given as `executor=`: how rows get there, and what comes back.

Beside the methods of a `concurrent.futures.Executor` rows need to know how many workers
there are, to send a value once that all rows share, to learn of a worker that has died,
and not to run a row twice where that matters. Each kind has its own way.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Collection
from concurrent import futures
from typing import Any

import numpy as np

from hostcall._errors import HostcallError, SpecError


def is_executor(given: Any) -> bool:
    """An Executor, a client of Dask, or a pool like multiprocessing's (Ray's too)."""
    return any(hasattr(given, name) for name in ("submit", "apply_async"))


def by_name(given: Any) -> bool:
    """Whether functions go to the workers as names, by pickle: the standard library's
    process pools. Those of Dask, Ray and loky send what has no name by value.
    """
    kind = type(given)
    if kind.__module__.partition(".")[0] == "multiprocessing":
        return kind.__name__ != "ThreadPool"
    return isinstance(given, futures.ProcessPoolExecutor)


def sends(given: Any) -> bool:
    """Whether rows get copies of their arguments, in another process."""
    where = type(given).__module__.split(".")
    return by_name(given) or _is_dask(given) or "loky" in where or where[0] == "ray"


def _is_dask(given: Any) -> bool:
    return hasattr(given, "get_executor")


def workers_of(given: Any, once: bool) -> Workers:
    """With `once` no row is run twice, whatever fails."""
    if _is_dask(given):
        return _Dask(given, once)
    if type(given).__module__.partition(".")[0] == "ray":
        return _RayPool(given)
    if not hasattr(given, "submit"):
        return _Pool(given)
    return Workers(given)


class Workers:
    """An Executor: of threads, of processes, or of anything.

    Attributes:
        leash: a file of this machine; rows begin as long as it is there. None: they may
            be on other machines, or in this process.
        takes_back: whether tasks that have not begun can be kept from it.
    """

    takes_back = True
    _is_here = True  # the workers are on this machine

    def __init__(self, given: Any) -> None:
        self._given = given
        self._files: list[str] = []
        self.leash = self._file() if sends(given) and self._is_here else None
        self._ended: queue.SimpleQueue[Any] = queue.SimpleQueue()

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

    def dead(self) -> str:
        """Which worker has died, with what it had to do, since the tasks were sent."""
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
            return pickle.Pickler
        import cloudpickle

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


def fresh(shared: Any) -> np.ndarray:
    """A row's own array of what its worker got."""
    if isinstance(shared, np.ndarray):
        return shared.copy()
    array: np.ndarray = shared.get()
    return array


class _Pool(Workers):
    """`multiprocessing.Pool`. It replaces a worker that has died, and never tells of
    the task that died with it.
    """

    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        self._alive: list[Any] | None = None  # threads do not die, and Ray's tell
        if by_name(pool):
            self._alive = [w for w in list(pool._pool) if w.exitcode is None]

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

    def dead(self) -> str:
        if self._alive is None:
            return ""
        known = set(map(id, self._alive))
        self._alive += [w for w in list(self._given._pool) if id(w) not in known]
        for worker in self._alive:
            code = worker.exitcode
            # One that has done `maxtasksperchild` tasks ends with 0.
            if code or (code == 0 and self._given._maxtasksperchild is None):
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                return f"process {worker.pid}, {how}"
        return ""


class _RayPool(_Pool):
    """`ray.util.multiprocessing.Pool`, whose workers may be on other machines. It tells
    of those that have died.
    """

    takes_back = _is_here = False

    def count(self) -> int | None:
        return len(self._given._actor_pool)

    def share(self, array: np.ndarray) -> Any:
        import ray

        return _RayReference(ray.put(array))

    def pickler(self) -> Any:
        from ray import cloudpickle

        return cloudpickle.Pickler


class _RayReference:
    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def get(self) -> np.ndarray:
        import ray

        return np.array(ray.get(self._reference))  # Ray's own can't be written to


def _with_traceback(fn: Callable[..., Any], args: Any) -> Any:
    """Runs there. An exception that is pickled loses its traceback."""
    try:
        return fn(*args)
    except Exception as error:
        error.add_note("hostcall: in a worker:\n" + traceback.format_exc().rstrip())
        raise


class _Dask(Workers):
    """A client of Dask. Its own `get_executor()` keeps the futures of tasks that
    failed, and asks for each value by itself.
    """

    _is_here = False

    def __init__(self, client: Any, once: bool) -> None:
        super().__init__(client)
        self._claims: list[str] | None = [] if once else None

    def count(self) -> int | None:
        return sum(self._given.nthreads().values()) or None

    def submit(self, fn: Callable[..., Any], *args: Any) -> Any:
        if self._claims is not None:
            claim = f"hostcall-{uuid.uuid4().hex}"
            self._claims.append(claim)
            fn, args = _claimed, (claim, fn, *args)
        return self._given.submit(fn, *args, pure=False)

    def wait(self, tasks: Collection[Any], seconds: float) -> Collection[Any]:
        """All of them, or those there are when one has failed: to ask for values takes
        as long for one as for all.
        """
        import distributed

        end = time.monotonic() + seconds
        awaited = [task for task in tasks if not task.done()]
        with contextlib.suppress(TimeoutError):
            while awaited and all(t.status in ("pending", "finished") for t in tasks):
                left = max(0.0, end - time.monotonic())
                distributed.wait(awaited, left, "FIRST_COMPLETED")
                awaited = [task for task in awaited if not task.done()]
            return [task for task in tasks if task.done()]
        return []

    def outcomes(self, tasks: Collection[Any]) -> list[tuple[Any, Any]]:
        finished = [task for task in tasks if task.status == "finished"]
        values = dict(zip(finished, self._given.gather(finished), strict=True))
        return [
            (values[task], None) if task in values else (None, _failure(task))
            for task in tasks
        ]

    def cancel(self, tasks: Collection[Any]) -> list[Any]:
        if tasks:
            self._given.cancel(list(tasks))
        return []  # what becomes of those that run Dask does not tell

    def share(self, array: np.ndarray) -> Any:
        return self._given.scatter(array, broadcast=True, hash=False)

    def forget(self) -> None:
        from distributed import Event

        for claim in self._claims or ():
            Event(claim, self._given).clear()


def _failure(task: Any) -> BaseException:
    if task.status == "error":
        error: BaseException = task.exception().with_traceback(task.traceback())
        return error
    return futures.CancelledError(f"Dask: the task is {task.status}")


def _claimed(claim: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Runs there, once: Dask sends tasks again whose worker has died, done or not."""
    from distributed import Event

    event = Event(claim)
    if event.is_set():
        raise HostcallError(
            "hostcall: the worker of Dask's that ran these rows has died. Dask would"
            " run them again, but they have effects (order= is not 'pure'), and may be"
            " run once only"
        )
    event.set()
    return fn(*args)


# --- What to say when workers fail ---------------------------------------------------


def explain(error: BaseException, given: Any, name: str, which: str, sent: Any) -> None:
    """Of a row that failed where the function did not: adds a note, or raises what says
    more.
    """
    if isinstance(error, futures.BrokenExecutor):
        error.add_note(
            f"hostcall: {which} of `{name}`: a worker of executor= has died (killed,"
            " out of memory, a crash; or it could not import the main module: with"
            ' "spawn" a script needs `if __name__ == "__main__":`). This executor is'
            " broken: make a new one"
        )
    elif by_name(given) and _may_be_of_pickle(error):
        try:
            pickle.dumps(sent)
        except Exception as reason:
            raise SpecError(
                f"hostcall: `{name}` or its arguments can't be sent to another process:"
                f" {reason}. Functions go by name: define it at the top level of a"
                " module; or give an executor that sends functions by value (Dask,"
                " loky), or threads"
            ) from error
        if "pickle" in str(error):
            error.add_note(
                f"hostcall: {which}: what `{name}` returns comes back by pickle. Of a"
                " forward rule these are the residuals too: leave what can be pickled,"
                " or arrays (residuals=)"
            )


def _may_be_of_pickle(error: BaseException) -> bool:
    kinds = (pickle.PicklingError, AttributeError, TypeError, ValueError)
    return isinstance(error, kinds) or type(error).__name__ == "MaybeEncodingError"
