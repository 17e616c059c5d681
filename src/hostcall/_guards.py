"""What a callback may not start: programs that wait for the callback itself.

A guard stands, while a callback runs, in the place of the value of a setting whose
truth JAX asks for before it executes a program (`_jax.ExecutionGuard`).
"""

from __future__ import annotations

import logging
from typing import Any

from hostcall import _context, _host_device, _jax
from hostcall._errors import DeadlockError

logger = logging.getLogger("hostcall")

# --- Of programs over several devices ------------------------------------------------

_of_several: dict[frozenset[Any], _jax.ExecutionGuard] = {}


def of_several(devices: frozenset[Any]) -> _jax.ExecutionGuard:
    """The guard for callbacks of programs over these devices: one, since JAX's caches
    have it in their keys.
    """
    if devices not in _of_several:
        _of_several[devices] = _jax.ExecutionGuard(devices, _would_wait)
    return _of_several[devices]


def _would_wait() -> Exception:
    return DeadlockError(
        "hostcall: a callback of a program over several devices started another"
        " program over some of them. It would wait for ever: those devices are busy"
        " until the callback returns. Compute with NumPy, or on one device (JAX inside"
        " a callback has one of its own by default: jnp.asarray(np.asarray(x))), or do"
        " that part in the program that calls"
    )


# --- Of callbacks that get jax.Arrays which are not committed -------------------------

_told: set[tuple[str, Any]] = set()


def _tell(device: Any) -> None:
    """Arrays that are not committed mix with the user's, and may so end up computing on
    the client that waits for the callback.
    """
    here = _context.current()
    if here is None or _host_device.is_host(device.client):
        return
    if (here.name, here.place) in _told:
        return
    _told.add((here.name, here.place))
    logger.warning(
        "the callback `%s` (called at %s) computes on %s, whose client runs the"
        " programs that wait for it: one of its arrays is committed there. A dozen such"
        " programs in flight can wait for each other for ever. Give it NumPy arrays"
        " (np.asarray(weights)), or wait for each run (jax.block_until_ready), or begin"
        ' with jax.config.update("jax_cpu_enable_async_dispatch", False)',
        here.name,
        here.place,
        device,
    )


WITNESS = _jax.ExecutionWitness(_tell)
