"""What a callback may not start: programs that wait for the callback itself.

A guard stands, while a callback runs, in the place of the value of a setting whose
truth JAX asks for before it executes a program (`_jax.ExecutionGuard`). There is one
of each kind for the same devices, since JAX's caches have it in their keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from hostcall import _jax, _native
from hostcall._core.errors import DeadlockError
from hostcall._runtime import host_device

# --- Of programs over several devices ------------------------------------------------


@cache
def of_several(devices: frozenset[Any]) -> _jax.ExecutionGuard:
    """The guard for callbacks of programs over these devices."""
    return _jax.ExecutionGuard(_refuses(devices))


def _refuses(devices: frozenset[Any]) -> Callable[[Sequence[Any]], None]:
    def check(of_program: Sequence[Any]) -> None:
        if len(of_program) > 1 and not devices.isdisjoint(of_program):
            raise _would_wait()

    return check


def _would_wait() -> Exception:
    return DeadlockError(
        "hostcall: a callback of a program over several devices started another"
        " program over some of them. It would wait for ever: those devices are busy"
        " until the callback returns. Compute with NumPy, or on one device (JAX inside"
        " a callback has one of its own by default: jnp.asarray(np.asarray(x))), or do"
        " that part in the program that calls"
    )


# --- Of pure calls on XLA's threads --------------------------------------------------


class CallInside(BaseException):
    """Ends a pure call that its scout wants made again, inside a host callback."""


@cache
def scout(devices: frozenset[Any] | None) -> _jax.ExecutionGuard:
    """Looks whether a callback computes on the process's own CPU devices.

    It does where its arrays are committed to them. A program of theirs may wait there
    for the callback that starts it; inside one of XLA's host callbacks it does not
    (native/handlers/host_callback.h), but those cost a scalar call most of its time. So
    a pure call, which may be repeated, is made outside first, and again if the scout
    says so.

    `devices` are those that `of_several` guards, which the scout does too.
    """
    refuse = None if devices is None else _refuses(devices)

    def check(of_program: Sequence[Any]) -> None:
        if refuse is not None:
            refuse(of_program)
        on_process = any(
            device.platform == "cpu" and not host_device.is_host(device.client)
            for device in of_program
        )
        # False where the setting outlived the call: on a thread of XLA's, in one of
        # JAX's own callbacks.
        if on_process and _native.ask_inside():
            raise CallInside

    return _jax.ExecutionGuard(check)
