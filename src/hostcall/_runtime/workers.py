"""What host code needs on other threads than its call's.

A worker runs the function while the call's own thread waits for it. So the worker needs
the settings and the answer of `hc.current()` that the waiting thread would have.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

from hostcall import _jax, _native
from hostcall._core import config
from hostcall._core.daemon import DaemonPool
from hostcall._runtime import host_device

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
