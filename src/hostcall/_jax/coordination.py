"""The coordination service of a job: a store of texts that all its processes share.

JAX's own process 0 runs the service (`jax.distributed.initialize`). A set takes 0.4 ms,
and a look 0.3 ms. There is no blocking get here: each one that finds nothing leaves 15
KB in the service and 20 KB in the client for ever. All functions release the GIL while
they wait. What the service can't do raises `jax.errors.JaxRuntimeError`.
"""

from __future__ import annotations

import time
from typing import Any

import jax
from jax._src import distributed as _distributed

from hostcall import _native

_SLICE = 0.05  # seconds between two looks


def job_size() -> int:
    """The number of processes; 1 without `jax.distributed.initialize`.

    Unlike `jax.process_count`, this starts no back end.
    """
    state = _distributed.global_state
    return 1 if state.client is None else int(state.num_processes)


def job_outlives_processes() -> bool:
    """Whether the job goes on when one of its processes has ended, or comes again."""
    return bool(_distributed._ENABLE_RECOVERABILITY.value)


def job_rank() -> int:
    return int(_distributed.global_state.process_id)


def job_host() -> str:
    """The host on which the service runs."""
    address = _distributed.global_state.coordinator_address or ""
    return address.rsplit(":", 1)[0].strip("[]")


def job_put(key: str, text: str, overwrite: bool = False) -> bool:
    """Stores `text`; False if the key has a text already (without `overwrite`)."""
    try:
        _client().key_value_set(key, text, overwrite)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" in str(error):
            return False
        raise
    return True


def job_get(key: str, seconds: float = 0.0) -> str | None:
    """The text of `key`; None if it has none, also after `seconds`."""
    until = time.monotonic() + seconds
    while True:
        try:
            return str(_client().key_value_try_get(key))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
        left = until - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(left, _SLICE))


def job_texts(folder: str) -> list[str]:
    """The texts of all keys under `folder`, which ends with a slash."""
    return [str(text) for _, text in _client().key_value_dir_get(folder)]


def job_count(key: str) -> int:
    """Counts a number up that all processes share, and returns it."""
    return int(_client().key_value_increment(key, 1))


def job_meet(name: str, seconds: float) -> None:
    """Waits until all processes have come here; raises after `seconds`."""
    _client().wait_at_barrier(name, max(1, int(seconds * 1000)))


def leave_job() -> None:
    """Makes this process end without waiting for the others.

    JAX meets all processes at its exit; if one does not come, it waits 100 s and
    aborts. The objects are kept for ever, since their destructors would meet the others
    too.
    """
    state = _distributed.global_state
    for name in ("preemption_sync_manager", "client", "service"):
        thing = getattr(state, name)
        if thing is not None:
            _native.keep_for_ever(thing)
            setattr(state, name, None)


def _client() -> Any:
    client = _distributed.global_state.client
    if client is None:
        raise jax.errors.JaxRuntimeError("FAILED_PRECONDITION: the job was shut down")
    return client
