"""The CPU device that is JAX's default device inside a callback.

A callback may use JAX. If it used the client that runs its own program, it could hang:
a CPU client admits 32 programs at a time on a device, and all 32 may be waiting for
callbacks. So inside a callback the default device belongs to another client, made for
host code. It runs each program on the thread that dispatches it.

The same holds for a callback of a program on such a client: it gets the next client.
Clients form a ladder, and a program waits only for programs on clients above its own,
so nothing waits in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from hostcall import _jax, _native
from hostcall._core.errors import DeadlockError, HostcallError
from hostcall._core.process import PerProcess, starting
from hostcall._runtime import flights

# Rungs of the ladder. Each keeps threads until the process ends, three or four for each
# core, and nothing but a recursion needs many. Python's own limit would come too late:
# the threads of a machine run out before its 1,000 frames.
_MOST = 32


class _Ladder(PerProcess):
    """
    Attributes:
        clients: those made for host code, lowest rung first. They only become more, so
            that a look needs no lock. A forked child keeps its parent's for ever: a
            client's destructor joins its threads, which do not exist there.
    """

    def __init__(self) -> None:
        self.clients: list[Any] = []
        super().__init__()


_ladder = _Ladder()


def nesting_level(client: Any | None) -> int:
    """The number of a client's rung; 0 for the process's own clients, 1 for the first
    that was made for host code. Programs on a higher one are started by host code.
    """
    for number, of_host_code in enumerate(_ladder.clients, 1):
        if of_host_code is client:
            return number
    return 0


def host_device_for(client: Any | None) -> Any:
    """The host device for callbacks of programs that run on `client`.

    None stands for the process's own clients.

    Raises:
        HostcallError: the ladder ends there: callbacks run programs that call, and so
            on, without an end.

    Cost: 8 ms for the first call on each rung of the ladder, which makes the client.
    """
    below = nesting_level(client)
    # Without the lock: the ladder only grows.
    if below == len(_ladder.clients):
        _add_rung(client)
    return _ladder.clients[below].local_devices()[0]


def _add_rung(client: Any | None) -> None:
    """Makes the client above this one, unless another thread has made it meanwhile."""
    with starting.lock:
        below = nesting_level(client)
        assert below <= len(_ladder.clients) <= _MOST, "a rung is made above another"
        if below == _MOST:
            raise HostcallError(
                f"hostcall: programs and their host functions are nested {_MOST} deep:"
                " a host function runs a program that calls a host function, and so"
                " on. It probably runs the program that called it. If it should"
                " compute the same thing, call the Python function that the program"
                " was made of, with NumPy arrays; a recursion belongs inside one host"
                " function, or in jax.lax.while_loop",
                code="hc-recursion",
            )
        if below == len(_ladder.clients):
            _ladder.clients.append(_jax.make_host_client())


def host_device_here() -> Any:
    """The host device for a call that the calling thread makes eagerly."""
    # Inside host code it is that of the code's own rung; outside, a device of the
    # process's clients, the name of a platform, or None.
    default = _jax.default_device.value
    return host_device_for(getattr(default, "client", None))


# --- Programs that would wait for the callback that starts them -----------------------
#
# The idea: while a callback runs, a guard takes the place of the value of
# `jax_no_execution`. JAX reads that value before it executes a program, and so asks the
# guard first (`_jax.ExecutionGuard`).
#
# There is one guard of each kind for each set of devices. JAX's caches have the guard
# in their keys, so a new guard for each call would compile every program again.

# --- Callbacks of programs over several devices --------------------------------------
#
# How such a callback would deadlock:
#
#   1. A program over devices 0 and 1 calls the function. Each device's queue is busy
#      with that program until the function has returned.
#   2. The function dispatches a program over devices 1 and 2, and waits for its result.
#   3. That program waits for device 1, which waits for the function.
#
# A program on one device is allowed: the callback's own thread runs it (see above).


_WOULD_WAIT = (
    "hostcall: a callback of a program over several devices started another program"
    " over some of them. It would wait forever: those devices are busy until the"
    " callback returns. Compute with NumPy, or on one device (inside a callback, JAX's"
    " default device is a separate one: jnp.asarray(np.asarray(x))), or move that part"
    " into the calling program"
)


# --- Pure calls on XLA's threads -----------------------------------------------------
#
# A pure call may run on a thread of XLA's pool. If its function starts a program on the
# process's own CPU devices, that program waits for a thread of the same pool, and all
# of them may be in such calls. Inside one of XLA's host callbacks there is no such wait
# (native/handlers/host_callback.h), but entering one costs a scalar call most of its
# time. A pure call may be repeated, so:
#
#   1. The call is made outside a host callback, and scouts.
#   2. If the function starts such a program, the call's guard raises CallInside.
#   3. The engine drops that attempt, makes the call again inside a host callback, and
#      from then on starts there.


class CallInside(BaseException):
    """Ends a pure call, which the engine then repeats inside a host callback."""


@cache
def guard(
    devices: frozenset[Any] | None, *, scouts: bool = False
) -> _jax.ExecutionGuard:
    """A guard that refuses programs over some of these devices, if not None.

    With `scouts` it raises CallInside for programs on the process's own CPU devices. A
    callback starts those if its arrays are committed to these devices.
    """

    def check(of_program: Sequence[Any]) -> None:
        # A program on one device runs on the callback's own thread.
        if devices and len(of_program) > 1 and not devices.isdisjoint(of_program):
            flights.log(flights.DEADLOCK)
            raise DeadlockError(_WOULD_WAIT)
        if not scouts:
            return
        on_process = any(
            device.platform == "cpu" and nesting_level(device.client) == 0
            for device in of_program
        )
        # `ask_inside` is False if no call of this thread scouts. The setting stays
        # on XLA's threads after the call, and JAX's own callbacks run there too.
        if on_process and _native.ask_inside():
            raise CallInside

    return _jax.ExecutionGuard(check)
