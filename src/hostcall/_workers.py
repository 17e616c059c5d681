"""Host code on other threads or processes: vmap_method="parallel" and `timeout=`."""

from __future__ import annotations

import contextvars
import itertools
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

from hostcall import _config, _executors, _jax
from hostcall._errors import CallTimeoutError
from hostcall._where import name_of

_lock = threading.Lock()
_pool: futures.ThreadPoolExecutor | None = None

# Which thread really runs what another one waits for; `hc.status()` looks here.
delegates: dict[int, int] = {}

# What `hc.current()` answers on a thread that works for another one.
_stand_in = threading.local()

# Set on the threads of the default pool.
_in_pool = threading.local()


def stand_in() -> Any | None:
    return getattr(_stand_in, "current", None)


def default_pool() -> futures.ThreadPoolExecutor:
    """The pool for parallel rows without an `executor=`; made at its first use."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = futures.ThreadPoolExecutor(
                _config.POOL_WORKERS,
                thread_name_prefix="hostcall",
                initializer=lambda: setattr(_in_pool, "yes", True),
            )
        return _pool


@contextmanager
def _as_host_code(ambient: tuple[Any, Any], current: Any) -> Iterator[None]:
    """The calling thread finds what the waiting thread would find in a callback.

    `ambient` is the call's host device, and its guard or None.
    """
    device, guard = ambient
    saved = []
    for kind, setting, swap, put_back, _, value in _jax.ambient_settings():
        value = {_jax.DEVICE: device, _jax.GUARD: guard}.get(kind, value)
        if value is not None:
            saved.append((put_back, setting, swap(setting, value)))
    before = stand_in()
    _stand_in.current = current
    try:
        yield
    finally:
        _stand_in.current = before
        for put_back, setting, value in saved:
            put_back(setting, value)


# --- Rows in parallel --------------------------------------------------------------

# ((host device, guard), current) of rows under way, by a number that can be pickled.
_contexts: dict[int, tuple[tuple[Any, Any], Any]] = {}
_context_numbers = itertools.count()

# Another machine may have a process of the same number; a fork has the same token.
_TOKEN = os.urandom(8).hex()


def _process() -> tuple[str, int]:
    return _TOKEN, os.getpid()


def _run_row(
    process: tuple[str, int],
    context: int,
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    """Runs on an executor's thread, in this or another process, on any machine."""
    if process != _process():
        return fn(*args, **kwargs)
    ambient, current = _contexts[context]
    with _as_host_code(ambient, current):
        return fn(*args, **kwargs)


def _same(value: Any) -> Any:
    return value


def _end(tasks: list[futures.Future[Any]], wait: bool) -> None:
    # Not for those that are cancelled: an executor that was shut down with
    # cancel_futures=True never notices, and `futures.wait` would wait for it.
    running = [task for task in tasks if not task.cancel()]
    if wait:
        futures.wait(running)


def run_rows(
    executor: Any,
    fn: Callable[..., Any],
    rows: list[tuple[tuple[Any, ...], dict[str, Any]]],
    currents: list[Any],
    ambient: tuple[Any, Any],
    timeout: float | None,
    describe: Callable[[str], str],
) -> list[Any]:
    """All rows at once; their results in row order.

    A function may have `hostcall_steps(*args, **kwargs)`, which gives what is to run on
    the executor, its arguments, and what to make of its value on this thread.

    Raises what the first failing row raised, after the others have been cancelled or
    have ended.
    """
    end = None if timeout is None else time.monotonic() + timeout
    if executor is None and getattr(_in_pool, "yes", False):
        # Rows of a call that a row makes. In the pool they could wait for its threads,
        # which all wait for them.
        executor = futures.ThreadPoolExecutor(len(rows))
        try:
            return run_rows(executor, fn, rows, currents, ambient, timeout, describe)
        finally:
            executor.shutdown(wait=False)
    chosen = default_pool() if executor is None else _executors.as_executor(executor)
    steps = getattr(fn, "hostcall_steps", None)
    numbers = []
    late = False
    task: futures.Future[Any] | None = None
    tasks: list[tuple[futures.Future[Any], Any, Callable[[Any], Any]]] = []
    try:
        for (args, kwargs), current in zip(rows, currents, strict=True):
            number = next(_context_numbers)
            _contexts[number] = (ambient, current)
            numbers.append(number)
            there, finish = fn, _same
            if steps is not None:
                there, args, finish = steps(*args, **kwargs)
                kwargs = {}
            sent = (_process(), number, there, args, kwargs)
            tasks.append((chosen.submit(_run_row, *sent), sent, finish))
        values = []
        for row, (task, sent, _) in enumerate(tasks):
            left = None if end is None else max(0.0, end - time.monotonic())
            which = f"row {row} of {len(rows)}"
            try:
                values.append(task.result(left))
            except (futures.TimeoutError, TimeoutError):
                if task.done():
                    raise  # the function's own
                late = True
                raise CallTimeoutError(describe(which)) from None
            except Exception as error:
                _executors.explain(error, executor, name_of(fn), which, sent)
                raise
        return [
            finish(value) for value, (*_, finish) in zip(values, tasks, strict=True)
        ]
    except BaseException:
        _end([task for task, *_ in tasks], wait=not late)
        raise
    finally:
        for number in numbers:
            _contexts.pop(number, None)
        # What was raised holds this frame, and futures hold what was raised: Dask's,
        # as long as anybody holds them.
        task = None
        tasks.clear()


# --- One call with a time limit ----------------------------------------------------


class _Worker(threading.Thread):
    """Runs one job at a time. A daemon: a job that never ends must not keep the
    process.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True, name="hostcall-timeout")
        self.jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            self.jobs.get()()
            with _lock:
                _idle.append(self)


_idle: list[_Worker] = []


def run_with_timeout(
    fn: Callable[[], Any],
    seconds: float,
    ambient: tuple[Any, Any],
    current: Any,
    describe: Callable[[str], str],
) -> Any:
    """`fn()` on a worker; CallTimeoutError with the worker's stack when it is late.

    The worker goes on to the end of a late job, whose result is dropped.
    """
    outcome: list[Any] = []
    done = threading.Event()
    context = contextvars.copy_context()

    def job() -> None:
        try:
            with _as_host_code(ambient, current):
                outcome.append((context.run(fn), None))
        except BaseException as error:
            outcome.append((None, error))
        done.set()

    with _lock:
        worker = _idle.pop() if _idle else None
    worker = worker or _Worker()
    waiting = threading.get_ident()
    assert worker.ident is not None
    delegates[waiting] = worker.ident
    try:
        worker.jobs.put(job)
        if not done.wait(seconds):
            raise CallTimeoutError(describe(_stack_of(worker.ident)))
    finally:
        delegates.pop(waiting, None)
    value, error = outcome.pop()
    if error is not None:
        try:
            raise error
        finally:  # a cycle through this frame would keep what the exception holds
            del error
    return value


def _stack_of(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "its thread has ended"
    lines = traceback.format_stack(frame)
    here = os.path.dirname(os.path.abspath(__file__))
    users = [line for line in lines if here not in line and "threading.py" not in line]
    return "it is stuck in:\n" + "".join(users or lines).rstrip()
