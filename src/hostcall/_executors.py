"""What may be given as `executor=`, and what to say when its workers fail."""

from __future__ import annotations

import functools
import pickle
import traceback
from collections.abc import Callable
from concurrent import futures
from typing import Any

from hostcall._errors import SpecError


def is_executor(given: Any) -> bool:
    """An Executor, a client of Dask, or a pool like multiprocessing's (Ray's too)."""
    return any(hasattr(given, name) for name in ("submit", "apply_async"))


def as_executor(given: Any) -> futures.Executor:
    """Anything that may be given, with the methods of an Executor."""
    if hasattr(given, "get_executor"):  # a client of Dask
        return _Dask(given)
    if hasattr(given, "submit"):
        return given  # type: ignore[no-any-return]
    return _Pool(given)


class _Dask(futures.Executor):
    """A Dask client. Its own `get_executor()` keeps the futures of tasks that failed:
    the frame that raises what the worker raised holds them.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def submit(
        self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> futures.Future[Any]:
        task: futures.Future[Any] = futures.Future()
        there = self._client.submit(fn, *args, pure=False, **kwargs)

        def ended(task: futures.Future[Any]) -> None:
            if task.cancelled():
                there.cancel()

        task.add_done_callback(ended)
        there.add_done_callback(functools.partial(_hand_over, task))
        return task


def _hand_over(task: futures.Future[Any], there: Any) -> None:
    """On a thread of Dask's, when a task has ended."""
    if not task.set_running_or_notify_cancel():
        return
    if there.status == "finished":
        task.set_result(there.result())
    elif there.status == "error":
        task.set_exception(there.exception().with_traceback(there.traceback()))
    else:
        task.set_exception(futures.CancelledError(f"Dask: the task is {there.status}"))


class _Pool(futures.Executor):
    """`multiprocessing.Pool`, and those made after it (Ray's)."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def submit(
        self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> futures.Future[Any]:
        task: futures.Future[Any] = futures.Future()
        task.set_running_or_notify_cancel()  # the pool can't take it back
        self._pool.apply_async(
            _with_traceback,
            (fn, args, kwargs),
            callback=task.set_result,
            # Ray's pool puts another exception around the worker's.
            error_callback=lambda e: task.set_exception(getattr(e, "underlying", e)),
        )
        return task


def _with_traceback(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs there. An exception that is pickled loses its traceback."""
    try:
        return fn(*args, **kwargs)
    except Exception as error:
        error.add_note("hostcall: in a worker:\n" + traceback.format_exc().rstrip())
        raise


def by_name(given: Any) -> bool:
    """Whether functions go to the workers as names, by pickle: the standard library's
    process pools. Those of Dask, Ray and loky send what has no name by value.
    """
    kind = type(given)
    standard = kind.__module__.partition(".")[0] == "multiprocessing"
    if standard and kind.__name__ != "ThreadPool":
        return True
    return isinstance(given, futures.ProcessPoolExecutor)


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
