"""Dask and Ray, whose workers may be on other machines; and which kind an executor is.

No file can be shared with such workers. And Dask runs a task again if its worker dies,
so a call with effects needs protection from that.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection
from concurrent import futures
from typing import Any

import numpy as np

from hostcall._core.errors import HostcallError
from hostcall._policies.executors import MultiprocessingPool, Workers, is_dask, is_ray
from hostcall._policies.layer import Executor, Task, Value


class RayPool(MultiprocessingPool):
    """`ray.util.multiprocessing.Pool`, whose workers may be on other machines.

    Unlike multiprocessing's pool, it fails the tasks of a worker that has died.
    """

    takes_back = False

    def count(self) -> int | None:
        return len(self._pool._actor_pool)

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


class DaskClient(Workers):
    """A Dask client.

    Not used through its `get_executor()`, which keeps the futures of failed tasks, and
    fetches each value separately.
    """

    def __init__(self, client: Any, once: bool) -> None:
        super().__init__(client)
        self._claims: list[str] | None = [] if once else None

    def count(self) -> int | None:
        return sum(self._pool.nthreads().values()) or None

    def submit(self, fn: Callable[..., Any], *args: Any) -> Any:
        if self._claims is not None:
            claim = f"hostcall-{uuid.uuid4().hex}"
            self._claims.append(claim)
            return self._pool.submit(_claimed, claim, fn, *args, pure=False)
        # With pure=True, Dask would run tasks with equal arguments only once.
        return self._pool.submit(fn, *args, pure=False)

    def wait(self, tasks: Collection[Task], seconds: float) -> Collection[Task]:
        """Waits until all tasks have ended or one has failed; returns those that ended.

        Returns nothing after `seconds`. It waits for all because fetching one value
        takes as long as fetching all of them.
        """
        import distributed

        end = time.monotonic() + seconds
        fine = ("pending", "finished")
        # One after another, so that a failure ends the wait for all.
        awaited = [task for task in tasks if not task.done()]
        try:
            while awaited and all(task.status in fine for task in tasks):
                seconds = max(0.0, end - time.monotonic())
                distributed.wait(awaited, seconds, "FIRST_COMPLETED")
                awaited = [task for task in awaited if not task.done()]
        except TimeoutError:
            return []
        return [task for task in tasks if task.done()]

    def outcomes(self, tasks: Collection[Task]) -> list[tuple[Value, Any]]:
        finished = [task for task in tasks if task.status == "finished"]
        gathered = self._pool.gather(finished)  # all at once
        values = dict(zip(finished, gathered, strict=True))
        outcomes: list[tuple[Value, Any]] = []
        for task in tasks:
            if task in values:
                outcomes.append((values[task], None))
            else:
                outcomes.append((None, _failure(task)))
        return outcomes

    def cancel(self, tasks: Collection[Task]) -> list[Any]:
        if tasks:
            self._pool.cancel(list(tasks))
        return []  # Dask does not say when the running ones end

    def share(self, array: np.ndarray) -> Any:
        return self._pool.scatter(array, broadcast=True, hash=False)

    def forget(self) -> None:
        from distributed import Event

        for claim in self._claims or ():
            Event(claim, self._pool).clear()


def _failure(task: Task) -> Any:
    if task.status == "error":
        return task.exception().with_traceback(task.traceback())
    text = f"hostcall: the Dask task ended with status {task.status}"
    return futures.CancelledError(text)


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


def workers_of(pool: Executor, once: bool) -> Workers:
    """The `Workers` for an executor. With `once`, no row runs twice, whatever fails."""
    if is_dask(pool):
        return DaskClient(pool, once)
    if is_ray(pool):
        return RayPool(pool)
    return Workers(pool) if hasattr(pool, "submit") else MultiprocessingPool(pool)
