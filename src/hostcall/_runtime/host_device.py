"""The CPU device that JAX code inside a callback finds as its default.

A callback may use JAX. If it used the client that waits for it, it could hang: a CPU
client admits 32 programs at a time on a device, and each of them may be waiting for
a callback. So callbacks of a program find a device of another client, made for host
code, which runs a program on the thread that asks for it and admits any number.

A callback inside a callback is one of a program on such a client, and finds the next
one: clients form a ladder, and a program waits only for clients above its own.
"""

from __future__ import annotations

import threading
from typing import Any

from hostcall import _jax

_ladder: list[Any] = []  # host clients, first rung first; never shrinks
_lock = threading.Lock()


def _level(client: Any | None) -> int:
    for level, host in enumerate(_ladder):
        if host is client:
            return level + 1
    return 0


def clients() -> list[Any]:
    """Those made for host code so far."""
    return list(_ladder)


def is_host(client: Any | None) -> bool:
    """Whether this is a client made for host code."""
    with _lock:
        return _level(client) > 0


def above(client: Any | None) -> Any:
    """The host device for callbacks of programs that run on `client`.

    None stands for the process's own clients. Cost: 8 ms the first time on each rung.
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
