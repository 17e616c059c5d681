"""What host code needs on another thread than its call's: settings, `hc.current()`.

The layers that run functions elsewhere (_policies) use it, and threads of hostcall's
that call the user's code.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

from hostcall import _jax, _native
from hostcall._runtime import host_device

# Waiting thread -> the worker that runs its function, once it has begun, for
# `hc.monitor.status()`. No lock: a thread writes its own key only.
delegates: dict[int, list[int]] = {}

# What answers `hc.current()` in host code on a thread that is in no call itself: one
# that has rows of a call, or the event loop's, which runs other tasks in between.
# With the thread that it holds for; None: also for threads that inherit it, as those do
# that asyncio.to_thread starts in a coroutine.
answer: contextvars.ContextVar[tuple[int | None, Callable[[], Any]] | None]
answer = contextvars.ContextVar("hostcall_current", default=None)

# Whether a coroutine is a tap's, for which the worker of taps waits.
in_tap: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "hostcall_in_tap", default=False
)


def stand_in() -> Any | None:
    """What `hc.current()` is here by `answer`; None without."""
    thread_and_ask = answer.get()
    if thread_and_ask is None:
        return None
    thread, ask = thread_and_ask
    is_meant = thread is None or thread == threading.get_ident()
    return ask() if is_meant else None


def in_call() -> bool:
    """Whether the calling thread runs host code of a call or tap."""
    return _native.current() is not None or stand_in() is not None


def answer_here(ask: Callable[[], Any]) -> None:
    """Answers on this thread alone. (On a Python without the GIL, threads that a row
    starts inherit its context variables, and may outlive it.)
    """
    answer.set((threading.get_ident(), ask))


class ThreadSettings:
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
        of_call = {_native.Ambient.DEVICE: device, _native.Ambient.GUARD: guard}
        # The settings with their values; None for one leaves the thread's as it is.
        self._values: list[tuple[Any, Any]] = []
        # Those that are the same in all host code have a fixed value in the table.
        for kind, setting, fixed in _jax.AMBIENT:
            value = of_call.get(kind, fixed)
            if value is not None:
                self._values.append((setting, value))

    @classmethod
    def here(cls) -> ThreadSettings:
        """Those of the calling thread, which runs host code."""
        values = {kind: setting.get_local() for kind, setting, _ in _jax.AMBIENT}
        return cls(
            device=values.get(_native.Ambient.DEVICE),
            guard=values.get(_native.Ambient.GUARD),
            traced=_jax.traced_here(),
        )

    def enter(self) -> tuple[list[Any], list[Any]]:
        """Sets all of them on the calling thread, or none if it is interrupted.

        Returns the former values.
        """
        former = [setting.get_local() for setting, _ in self._values]
        try:
            for setting, value in self._values:
                setting.set_local(value)
            return former, [] if self.traced is None else self.traced.enter()
        except BaseException:
            # Ctrl-C may come between any two: some may be set, and all are put back.
            self._put_back(former)
            raise

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Calls `step(*args)` with the settings, and puts the thread's own back."""
        former, former_of_trace = self.enter()
        try:
            return step(*args)
        finally:
            # A pool's thread runs other code next, so the second part comes also if
            # Ctrl-C ends the first.
            try:
                if self.traced is not None:
                    self.traced.leave(former_of_trace)
            finally:
                self._put_back(former)

    def _put_back(self, former: list[Any]) -> None:
        for (setting, _), value in zip(self._values, former, strict=True):
            setting.set_local(value)


def be_host_code() -> bool:
    """Makes this thread run host code from now on, on behalf of no call.

    JAX then computes on a client for host code. False if JAX has no client so far: ask
    again later, as this would start one.
    """
    if not _jax.back_ends_started():
        return False
    ThreadSettings(host_device.host_device_for(None)).enter()
    return True
