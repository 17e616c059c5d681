"""The coordination service of a job: a store that all its processes share.

JAX's own process 0 runs the service (`jax.distributed.initialize`). A set takes 0.4 ms,
and a look 0.3 ms. There is no blocking get here: each one that finds nothing leaves 15
KB in the service and 20 KB in the client for ever. The store works while programs run,
fail or hang, since no device takes part. All functions release the GIL while they wait.
What the service can't do raises `jax.errors.JaxRuntimeError`.
"""

from __future__ import annotations

from typing import Any

import jax

from hostcall import _native
from hostcall._jax.door import distributed as _distributed


def place_in_job() -> tuple[int, int]:
    """(number of this process, number of processes). Cost: 0.2 us.

    Without `jax.distributed.initialize` these are 0 and 1. Unlike `jax.process_index`
    and `jax.process_count`, this starts no back end.
    """
    state = _distributed.global_state
    if state.client is None:
        return 0, 1
    return int(state.process_id), int(state.num_processes or 1)


def job_size() -> int:
    """The number of processes; 1 without `jax.distributed.initialize`."""
    _, size = place_in_job()
    return size


def job_outlives_processes() -> bool:
    """Whether the job goes on when one of its processes has ended, or comes again."""
    return bool(_distributed._ENABLE_RECOVERABILITY.value)


def job_rank() -> int:
    return int(_distributed.global_state.process_id)


def job_put(key: str, text: str, overwrite: bool = False) -> bool:
    """Stores `text`; False if the key has a text already (without `overwrite`)."""
    try:
        _client().key_value_set(key, text, overwrite)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" in str(error):
            return False
        raise
    return True


def job_get(key: str) -> str | None:
    """The text of `key`; None if it has none."""
    try:
        return _text(_client().key_value_try_get_bytes(key))
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def job_folder(name: str) -> dict[str, str]:
    """All texts whose keys begin with `name`, which ends with a slash, by the rest of
    their keys.
    """
    entries = _client().key_value_dir_get_bytes(name)
    return {key.removeprefix(name): _text(value) for key, value in entries}


def job_folder_bytes(name: str) -> list[bytes]:
    """The values of a folder that others than hostcall write, and not as text."""
    return [bytes(value) for _, value in _client().key_value_dir_get_bytes(name)]


def _text(value: bytes) -> str:
    """Anyone who reaches the service may have written other bytes."""
    return value.decode(errors="replace")


def job_delete(key: str) -> None:
    """Removes a key; one that ends in "/" with all keys that begin with it."""
    _client().key_value_delete(key)


def job_count(key: str) -> int:
    """Counts a number up that all processes share, and returns it."""
    return int(_client().key_value_increment(key, 1))


def leave_job() -> None:
    """Makes this process end without waiting for the others.

    JAX meets all processes at its exit; if one does not come, it waits 100 s and
    aborts. The objects are kept for ever, since their destructors would meet the others
    too.
    """
    state = _distributed.global_state
    for client_part in (state.preemption_sync_manager, state.client, state.service):
        if client_part is not None:
            _native.keep_for_ever(client_part)
    state.preemption_sync_manager = None
    state.client = None
    state.service = None


def _client() -> Any:
    client = _distributed.global_state.client
    if client is None:
        raise jax.errors.JaxRuntimeError("FAILED_PRECONDITION: the job was shut down")
    return client
