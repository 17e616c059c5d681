"""Runs host code on other threads: the pool for parallel rows, and `timeout=`.

A worker runs the function while the call's own thread waits for it. So the worker needs
the settings and the answer of `hc.current()` that the waiting thread would have.
"""

from __future__ import annotations

import contextvars
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from hostcall import _jax, _native
from hostcall._core import config
from hostcall._core.daemon import DaemonPool, start
from hostcall._core.errors import CallTimeoutError
from hostcall._core.wait import wait
from hostcall._runtime import flights, host_device

_lock = threading.Lock()
_pool: DaemonPool | None = None

# Waiting thread -> the worker that runs its function, for `hc.monitor.status()`.
delegates: dict[int, int] = {}

# What `hc.current()` answers on a worker, as a function.
_stand_in = threading.local()

# The same in a coroutine (tasks.py), whose thread runs others in between. Threads that
# asyncio.to_thread starts in it inherit the answer.
in_task: contextvars.ContextVar[Callable[[], Any] | None] = contextvars.ContextVar(
    "hostcall_current", default=None
)

# Whether a coroutine is a tap's, for which the worker of taps waits.
in_tap: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "hostcall_in_tap", default=False
)

# Set on the threads of the default pool.
_in_pool = threading.local()


def stand_in() -> Any | None:
    current = getattr(_stand_in, "current", None) or in_task.get()
    return None if current is None else current()


def stand_in_by(current: Callable[[], Any]) -> None:
    """Inside `as_host_code`, sets what `hc.current()` answers from now on."""
    _stand_in.current = current


def is_in_pool() -> bool:
    """Whether this is a thread of the default pool."""
    return getattr(_in_pool, "yes", False)


def pool_of(threads: int) -> DaemonPool:
    return DaemonPool(threads, lambda: setattr(_in_pool, "yes", True))


def default_pool() -> DaemonPool:
    """The pool for parallel rows without an `executor=`; made when first needed."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = pool_of(config.POOL_WORKERS)
        return _pool


class Settings:
    """The settings of JAX that host code of a call has, for other threads than its own.

    Args:
        device: the call's host device.
        guard: what examines the programs that it starts, or None.
        traced: the settings that its trace had of its own, or None.
    """

    def __init__(
        self, device: Any, guard: Any = None, traced: _jax.Traced | None = None
    ) -> None:
        self.traced = traced
        given = {_native.Ambient.DEVICE: device, _native.Ambient.GUARD: guard}
        self._given = [
            (each.swap, each.set, each.setting, value)
            for each in _jax.ambient_settings()
            if (value := given.get(each.kind, each.value)) is not None
        ]

    @classmethod
    def here(cls) -> Settings:
        """Those of the calling thread, which runs host code."""
        now = {each.kind: each.get(each.setting) for each in _jax.ambient_settings()}
        device, guard = map(now.get, (_native.Ambient.DEVICE, _native.Ambient.GUARD))
        return cls(device, guard, _jax.traced_here())

    def enter(self) -> tuple[list[Any], list[Any]]:
        """Sets them on the calling thread. Returns the former values."""
        before = [swap(setting, value) for swap, _, setting, value in self._given]
        return before, [] if self.traced is None else self.traced.enter()

    def leave(self, before: tuple[list[Any], list[Any]]) -> None:
        """Sets what `enter` has returned."""
        if self.traced is not None:
            self.traced.leave(before[1])
        for (_, put_back, setting, _), value in zip(
            self._given, before[0], strict=True
        ):
            put_back(setting, value)

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Calls `step(*args)` with the settings, and puts the thread's own back."""
        before = self.enter()
        try:
            return step(*args)
        finally:
            self.leave(before)


class as_host_code:
    """Gives a worker the settings that the waiting thread would have in its callback.

    `current` returns what `hc.current()` answers. This is not a `@contextmanager`:
    contextlib sets an attribute on exceptions that pass through, which some exceptions
    refuse.
    """

    def __init__(
        self, settings: Settings, current: Callable[[], Any] | None = None
    ) -> None:
        self._settings, self._current = settings, current

    def __enter__(self) -> None:
        self._saved = self._settings.enter()
        self._before = getattr(_stand_in, "current", None)
        _stand_in.current = self._current

    def __exit__(self, *_: object) -> None:
        _stand_in.current = self._before
        self._settings.leave(self._saved)


def be_host_code() -> bool:
    """Makes this thread run host code from now on, on behalf of no call.

    JAX then computes on a client for host code. False if JAX has no client so far: ask
    again later, as this would start one.
    """
    if not _jax.back_ends_started():
        return False
    Settings(host_device.above(None)).enter()
    return True


# --- One call with a time limit ----------------------------------------------------


class _Worker(threading.Thread):
    """Runs one job at a time. It is a daemon thread, so that a job that never ends does
    not keep the process alive.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True, name="hostcall-timeout")
        self.jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        start(self, "timeout=")

    def run(self) -> None:
        while True:
            self.jobs.get()()
            # Only now can another call get this worker, so a late job delays no other.
            with _lock:
                _idle.append(self)


_idle: list[_Worker] = []  # protected by `_lock`


def run_with_timeout(
    fn: Callable[[], Any],
    seconds: float,
    settings: Settings,
    current: Any,
    describe: Callable[[str], str],
) -> Any:
    """Runs `fn()` on a worker; raises CallTimeoutError, with its stack, if it is late.

    Python can't stop a thread, so the worker finishes a late job, and its result is
    dropped.
    """
    outcome: list[Any] = []
    done = threading.Event()
    context = contextvars.copy_context()

    def job() -> None:
        try:
            with as_host_code(settings, lambda: current):
                outcome.append((context.run(fn), None))
        except BaseException as error:
            outcome.append((None, error))
        done.set()  # after the outcome, which the waiting thread reads next

    with _lock:
        worker = _idle.pop() if _idle else None
    worker = worker or _Worker()
    waiting = threading.get_ident()
    assert worker.ident is not None
    # No lock: only this thread writes its own key, and `status()` looks up one key.
    delegates[waiting] = worker.ident
    try:
        worker.jobs.put(job)
        if not wait(done.wait, seconds):
            flights.tell("a call takes longer than its timeout")
            raise CallTimeoutError(describe(_stack_of(worker.ident)))
    finally:
        delegates.pop(waiting, None)
    value, error = outcome.pop()
    if error is not None:
        try:
            raise error
        finally:  # breaks the cycle error -> traceback -> this frame -> error
            del error
    return value


def _stack_of(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "its thread has ended"
    lines = traceback.format_stack(frame)
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the package
    users = [line for line in lines if here not in line and "threading.py" not in line]
    return "it is stuck in:\n" + "".join(users or lines).rstrip()
