"""Runs host code on other threads than its call's, which waits for it.

A worker needs the settings of JAX and the answer of `hc.current()` that the waiting
thread would have. `run_with_timeout` here, `rows.run_rows` and `tasks.run_tasks` each
take a `Bound`, rows, and what answers `hc.current()` in each of them.
"""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from hostcall import _jax, _native
from hostcall._core import config
from hostcall._core.daemon import DaemonPool
from hostcall._core.dlpack import DLPackArray
from hostcall._core.errors import CallTimeoutError
from hostcall._core.host_code import own
from hostcall._core.source import name_of
from hostcall._core.wait import wait
from hostcall._runtime import flights, host_device

# Waiting thread -> the worker that runs its function, once it has begun, for
# `hc.monitor.status()`. No lock: a thread writes its own key only.
delegates: dict[int, list[int]] = {}

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
    """A pool like the default one, for rows on threads of that."""
    return DaemonPool(threads, lambda: setattr(_in_pool, "yes", True))


# For parallel rows without an `executor=`. Threads start when they are needed.
default_pool = pool_of(config.POOL_WORKERS)


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


# --- What the runs of a function share ------------------------------------------------

Row = tuple[tuple[Any, ...], dict[str, Any]]  # its args and kwargs
Current = Callable[[int], Any]  # what `hc.current()` answers in a row, by its number


class Bound(NamedTuple):
    """A function, and what all its runs share.

    Attributes:
        fn: the function.
        settings: the settings of JAX that it runs with.
        timeout: seconds for all rows of a run together, or None.
        name: what messages call it; "" for the function's own name.
    """

    fn: Callable[..., Any]
    settings: Settings
    timeout: float | None = None
    name: str = ""

    def late(self, row: Row, stuck: str) -> CallTimeoutError:
        """The error of a run that takes too long; has the shapes of one of its rows."""
        flights.LATE.log()
        kinds = (np.ndarray, np.generic, jax.Array, DLPackArray)
        arrays = [x for x in jax.tree.leaves(row) if issubclass(type(x), kinds)]
        shapes = ", ".join(f"{a.dtype}{list(a.shape)}" for a in arrays)
        return CallTimeoutError(
            f"hostcall: `{self.name or name_of(self.fn)}`({shapes}) took longer than"
            f" timeout={self.timeout} s; {stuck}"
        )


def place_here() -> int:
    """The number of the place of this thread's call, for traces."""
    call = _native.current()
    return 0 if call is None else call[0].number  # type: ignore[no-any-return]


# --- What of a row runs elsewhere -----------------------------------------------------


def same(value: Any) -> Any:
    """Finishes a row whose value is its result."""
    return value


def apply(part: Callable[..., Any], *args: Any) -> Any:
    return part(*args)


def split(
    fn: Callable[..., Any], rows: Sequence[Row]
) -> tuple[Callable[..., Any], Sequence[Row], list[Callable[[Any], Any]]]:
    """The function and rows to run elsewhere, and for each row what finishes it here.

    See `HostCode.split`; a user's function runs elsewhere as it is.
    """
    mine = own(fn)
    steps = [None if mine is None else mine.split(*row) for row in rows]
    found = [step for step in steps if step is not None]
    if not found:
        return fn, rows, [same] * len(rows)
    there: list[Row] = [((part, *args), {}) for part, args, _ in found]
    return apply, there, [finish for *_, finish in found]


# --- `timeout=` of a plain function ---------------------------------------------------

_threads = DaemonPool(None, name="hostcall-timeout", what="timeout=")


def run_with_timeout(run: Bound, rows: Sequence[Row], current: Current) -> list[Any]:
    """Runs the one row on a worker; raises CallTimeoutError if it is late.

    Python can't stop a thread, so the worker finishes a late job, and its result is
    dropped.
    """
    ((args, kwargs),) = rows
    done = threading.Event()
    context = contextvars.copy_context()
    worker: list[int] = []

    def job() -> Any:
        worker.append(threading.get_ident())
        with as_host_code(run.settings, lambda: current(0)):
            return context.run(run.fn, *args, **kwargs)

    waiting = threading.get_ident()
    outcome = _threads.submit(job)
    outcome.add_done_callback(lambda _: done.set())
    delegates[waiting] = worker
    try:
        if not wait(done.wait, run.timeout):
            raise run.late(rows[0], _stack_of(worker))
        return [outcome.result()]
    finally:
        delegates.pop(waiting, None)
        del outcome  # breaks the cycle error -> this frame -> outcome -> error


def _stack_of(worker: list[int]) -> str:
    if not worker:
        return "its thread has not begun"
    frame = sys._current_frames().get(worker[0])
    if frame is None:
        return "its thread has ended"
    lines = traceback.format_stack(frame)
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the package
    users = [line for line in lines if here not in line and "threading.py" not in line]
    return "it is stuck in:\n" + "".join(users or lines).rstrip()
