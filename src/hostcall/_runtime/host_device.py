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

    None stands for the process's own clients. Cost: 8 ms for the first call on each
    rung of the ladder, which makes the client.
    """
    with _lock:
        level = _level(client)
        if level == len(_ladder):
            _ladder.append(_jax.make_host_client())
        return _ladder[level].local_devices()[0]


def above_here() -> Any:
    """The host device for a call that the calling thread makes eagerly."""
    default = _jax.default_device.value
    return above(getattr(default, "client", None))
