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

import threading
from typing import Any

from hostcall import _jax
from hostcall._core.errors import HostcallError

# Rungs of the ladder. Each keeps threads until the process ends, three or four for each
# core, and nothing but a recursion needs many. Python's own limit would come too late:
# the threads of a machine run out before its 1,000 frames.
_MOST = 32

_ladder: list[Any] = []  # host clients, lowest rung first; never shrinks
_lock = threading.Lock()


def _level(client: Any | None) -> int:
    for level, host in enumerate(_ladder):
        if host is client:
            return level + 1
    return 0


def clients() -> list[Any]:
    """The clients that have been made for host code so far."""
    return list(_ladder)


def is_host(client: Any | None) -> bool:
    """Whether this client was made for host code."""
    with _lock:
        return _level(client) > 0


def is_second(client: Any | None) -> bool:
    """Whether programs on the rung below this client are started by host code."""
    with _lock:
        return _level(client) > 1


def above(client: Any | None) -> Any:
    """The host device for callbacks of programs that run on `client`.

    None stands for the process's own clients.

    Raises:
        HostcallError: the ladder ends there: callbacks run programs that call, and so
            on, without an end.

    Cost: 8 ms for the first call on each
    rung of the ladder, which makes the client.
    """
    with _lock:
        level = _level(client)
        if level == _MOST:
            raise _too_deep()
        if level == len(_ladder):
            _ladder.append(_jax.make_host_client())
        return _ladder[level].local_devices()[0]


def _too_deep() -> HostcallError:
    return HostcallError(
        f"hostcall: programs and their host functions are nested {_MOST} deep: a host"
        " function runs a program that calls a host function, and so on. It probably"
        " runs the program that called it. If it should compute the same thing, call"
        " the Python function that the program was made of, with NumPy arrays; a"
        " recursion belongs inside one host function, or in jax.lax.while_loop",
        code="hc-recursion",
    )


def above_here() -> Any:
    """The host device for a call that the calling thread makes eagerly."""
    default = _jax.default_device.value
    return above(getattr(default, "client", None))
