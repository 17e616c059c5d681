"""The kinds of `executor=`, and the messages for failures of their workers.

_runtime/pools.py has the executors with workers on this machine. This file has those
whose workers may be on other machines (Dask, Ray). Dask runs a task again if its worker
dies, so a call with effects needs protection from that.
"""

from __future__ import annotations

import contextlib
import pickle
import time
import uuid
from collections.abc import Callable, Collection
from concurrent import futures
from typing import Any

import numpy as np

from hostcall._core.errors import HostcallError, SpecError
from hostcall._runtime.pools import Pool, Workers, by_name, is_of_processes


def is_executor(given: Any) -> bool:
    """Whether this is an Executor, a Dask client, or a pool like multiprocessing's.

    Ray's pool is one of the last kind.
    """
    return any(hasattr(given, name) for name in ("submit", "apply_async"))


def sends(given: Any) -> bool:
    """Whether rows are sent to another process, and get copies of their arguments."""
    return is_of_processes(given) or _is_dask(given) or _is_ray(given)


def _is_dask(given: Any) -> bool:
    return hasattr(given, "get_executor")


def _is_ray(given: Any) -> bool:
    return type(given).__module__.partition(".")[0] == "ray"


def workers_of(given: Any, once: bool) -> Workers:
    """The `Workers` for an executor. With `once`, no row runs twice, whatever fails."""
    if _is_dask(given):
        return _Dask(given, once)
    if _is_ray(given):
        return _RayPool(given)
    if not hasattr(given, "submit"):
        return Pool(given)
    return Workers(given)


class _RayPool(Pool):
    """`ray.util.multiprocessing.Pool`, whose workers may be on other machines.

    Unlike multiprocessing's pool, it fails the tasks of a worker that has died.
    """

    takes_back = False

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

        return np.array(ray.get(self._reference))  # a copy: Ray's array is read-only


class _Dask(Workers):
    """A Dask client.

    Not used through its `get_executor()`, which keeps the futures of failed tasks, and
    fetches each value separately.
    """

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
        # With pure=True, Dask would run tasks with equal arguments only once.
        return self._given.submit(fn, *args, pure=False)

    def wait(self, tasks: Collection[Any], seconds: float) -> Collection[Any]:
        """Waits until all tasks have ended or one has failed; returns those that ended.

        Returns nothing after `seconds`. It waits for all because fetching one value
        takes as long as fetching all of them.
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
        return []  # Dask does not say when the running ones end

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
    return futures.CancelledError(
        f"hostcall: the Dask task ended with status {task.status}"
    )


def _claimed(claim: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Runs `fn` on the worker, unless it has run before.

    Dask sends a task again if its worker has died, even if the task had ended. The
    event is kept by Dask's scheduler, so it outlives the worker.
    """
    from distributed import Event

    event = Event(claim)
    if event.is_set():
        raise HostcallError(
            "hostcall: the Dask worker that ran these rows has died. Dask would run"
            " them again, but they have effects (order= is not 'pure') and must run"
            " only once",
            code="hc-worker",
        )
    event.set()
    return fn(*args)


# --- Messages for failures of workers ------------------------------------------------


def explain(error: BaseException, given: Any, name: str, which: str, sent: Any) -> None:
    """Explains a row that failed outside the user's function.

    Adds a note to `error`, or raises a clearer error. Does nothing for other errors.

    Args:
        error: what the row failed with.
        given: the executor.
        name: the name of the function.
        which: the row, in words.
        sent: the function and arguments that were sent.
    """
    if isinstance(error, futures.BrokenExecutor):
        error.add_note(
            f"hostcall: {which} of `{name}` failed because a worker of executor= has"
            " died. It may have crashed, run out of memory, been killed, or failed to"
            ' import the main module (with "spawn", a script needs'
            ' `if __name__ == "__main__":`). Make a new executor: this one is broken'
        )
    elif by_name(given) and _may_be_of_pickle(error):
        try:
            pickle.dumps(sent)
        except Exception as reason:
            raise SpecError(
                f"hostcall: `{name}` or its arguments can't be sent to another process:"
                f" {reason}. This executor sends functions by name: define `{name}` at"
                " the top level of a module, or pass an executor that sends functions"
                " by value (Dask, loky) or uses threads",
                code="hc-pickle",
            ) from error
        if "pickle" in str(error):
            error.add_note(
                f"hostcall: {which} failed. This executor pickles what `{name}`"
                " returns, and the residuals of a forward rule. Return objects that can"
                " be pickled, or declare array residuals with residuals="
            )


def _may_be_of_pickle(error: BaseException) -> bool:
    kinds = (pickle.PicklingError, AttributeError, TypeError, ValueError)
    return isinstance(error, kinds) or type(error).__name__ == "MaybeEncodingError"
