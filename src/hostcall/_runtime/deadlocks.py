"""Refuses programs that would wait for the callback that starts them.

The idea: while a callback runs, a guard takes the place of the value of
`jax_no_execution`. JAX reads that value before it executes a program, and so asks the
guard first (`_jax.ExecutionGuard`).

There is one guard of each kind for each set of devices. JAX's caches have the guard in
their keys, so a new guard for each call would compile every program again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from hostcall import _jax, _native
from hostcall._core.errors import DeadlockError
from hostcall._runtime import flights, host_device

# --- Callbacks of programs over several devices --------------------------------------
#
# How such a callback would deadlock:
#
#   1. A program over devices 0 and 1 calls the function. Each device's queue is busy
#      with that program until the function has returned.
#   2. The function dispatches a program over devices 1 and 2, and waits for its result.
#   3. That program waits for device 1, which waits for the function.
#
# A program on one device is allowed: the callback's own thread runs it (see below, and
# _runtime/host_device.py).


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
    flights.tell("a callback would deadlock")
    return DeadlockError(
        "hostcall: a callback of a program over several devices started another"
        " program over some of them. It would wait forever: those devices are busy"
        " until the callback returns. Compute with NumPy, or on one device (inside a"
        " callback, JAX's default device is a separate one:"
        " jnp.asarray(np.asarray(x))), or move that part into the calling program"
    )


# --- Pure calls on XLA's threads -----------------------------------------------------
#
# A pure call may run on a thread of XLA's pool. If its function starts a program on the
# process's own CPU devices, that program waits for a thread of the same pool, and all
# of them may be in such calls. Inside one of XLA's host callbacks there is no such wait
# (native/handlers/host_callback.h), but entering one costs a scalar call most of its
# time. A pure call may be repeated, so:
#
#   1. The call is made outside a host callback, with a scout as its guard.
#   2. If the function starts such a program, the scout raises CallInside.
#   3. The engine drops that attempt, makes the call again inside a host callback, and
#      from then on starts there.


class CallInside(BaseException):
    """Ends a pure call, which the engine then repeats inside a host callback."""


@cache
def scout(devices: frozenset[Any] | None) -> _jax.ExecutionGuard:
    """A guard that raises CallInside for programs on the process's own CPU devices.

    A callback starts those if its arrays are committed to these devices. `devices`, if
    not None, are guarded as by `of_several` too.
    """
    refuse = None if devices is None else _refuses(devices)

    def check(of_program: Sequence[Any]) -> None:
        if refuse is not None:
            refuse(of_program)
        on_process = any(
            device.platform == "cpu" and not host_device.is_host(device.client)
            for device in of_program
        )
        # `ask_inside` is False if no call of this thread has a scout. The setting stays
        # on XLA's threads after the call, and JAX's own callbacks run there too.
        if on_process and _native.ask_inside():
            raise CallInside

    return _jax.ExecutionGuard(check)
