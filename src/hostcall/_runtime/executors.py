"""What may be given as `executor=`, and what to say when its workers fail.

Pools of this machine are in `_pools`; here are those that reach others, which also have
to be kept from running a row twice where that matters.
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
    """An Executor, a client of Dask, or a pool like multiprocessing's (Ray's too)."""
    return any(hasattr(given, name) for name in ("submit", "apply_async"))


def sends(given: Any) -> bool:
    """Whether rows get copies of their arguments, in another process."""
    return is_of_processes(given) or _is_dask(given) or _is_ray(given)


def _is_dask(given: Any) -> bool:
    return hasattr(given, "get_executor")


def _is_ray(given: Any) -> bool:
    return type(given).__module__.partition(".")[0] == "ray"


def workers_of(given: Any, once: bool) -> Workers:
    """With `once` no row is run twice, whatever fails."""
    if _is_dask(given):
        return _Dask(given, once)
    if _is_ray(given):
        return _RayPool(given)
    if not hasattr(given, "submit"):
        return Pool(given)
    return Workers(given)


class _RayPool(Pool):
    """`ray.util.multiprocessing.Pool`, whose workers may be on other machines. It tells
    of those that have died.
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

        return np.array(ray.get(self._reference))  # Ray's own can't be written to


class _Dask(Workers):
    """A client of Dask. Its own `get_executor()` keeps the futures of tasks that
    failed, and asks for each value by itself.
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
