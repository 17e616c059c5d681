"""The coordination service of a job: a store of texts that all its processes share.

JAX's own process 0 runs the service (`jax.distributed.initialize`). A set takes 0.4 ms,
and a blocking get wakes 1 ms after the set. All functions release the GIL while they
wait. What the service can't do raises `jax.errors.JaxRuntimeError`.
"""

from __future__ import annotations

from typing import Any

import jax
from jax._src import distributed as _distributed

from hostcall import _native


def job_size() -> int:
    """The number of processes; 1 without `jax.distributed.initialize`.

    Unlike `jax.process_count`, this starts no back end.
    """
    state = _distributed.global_state
    return 1 if state.client is None else int(state.num_processes)


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


def job_get(key: str, seconds: float) -> str | None:
    """Waits for the text of `key`; None if it has none after `seconds`."""
    try:
        text = _client().blocking_key_value_get(key, max(1, int(seconds * 1000)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise
    return str(text)


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
