"""The key-value store that the processes of a job share.

`jax.distributed.initialize` connects all processes to a service in the first one. Its
store has texts and bytes under keys, and works while programs run, fail or hang, since
no device takes part. A request takes some 0.3 ms on one machine.
"""

from __future__ import annotations

import json
from typing import Any

import jax
from jax._src import distributed as _distributed


class JobStore:
    """The store, as this process is connected to it.

    Attributes:
        process: the number of this process.
        processes: how many the job has.
    """

    def __init__(self, client: Any, process: int, processes: int) -> None:
        self._client = client
        self.process = process
        self.processes = processes

    def put(self, key: str, value: Any) -> None:
        """Stores a value that JSON can write, under a new key."""
        self._client.key_value_set(key, json.dumps(value))

    def get(self, key: str) -> Any | None:
        """The value under a key, or None if there is none yet."""
        try:
            return json.loads(self._client.key_value_try_get(key))
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("NOT_FOUND"):
                raise
            return None

    def folder(self, name: str) -> dict[str, Any]:
        """All values whose keys begin with `name`, by the rest of their keys."""
        found = self._client.key_value_dir_get(name)
        return {key.removeprefix(name): json.loads(text) for key, text in found}

    def put_bytes(self, key: str, value: bytes) -> None:
        self._client.key_value_set_bytes(key, value)

    def get_bytes(self, key: str) -> bytes | None:
        """The bytes under a key, or None if there are none yet."""
        try:
            found: bytes = self._client.key_value_try_get_bytes(key)
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("NOT_FOUND"):
                raise
            return None
        return found

    def meet(self, name: str, seconds: float) -> None:
        """Waits until all processes have come to the barrier of this name, once."""
        self._client.wait_at_barrier(name, int(seconds * 1000))

    def delete(self, key: str) -> None:
        """Removes a key; one that ends in "/" with all keys that begin with it."""
        self._client.key_value_delete(key)


def job_store() -> JobStore | None:
    """The store; None if this process has joined no job, or one without others.

    Starts no back end, so a job can still be joined afterwards.
    """
    state = _distributed.global_state
    if state.client is None or (state.num_processes or 1) < 2:
        return None
    return JobStore(state.client, int(state.process_id), int(state.num_processes))


def place_in_job() -> tuple[int, int]:
    """(number of this process, number of processes). Starts no back end. Cost: 0.2 us.

    Without `jax.distributed` these are 0 and 1.
    """
    state = _distributed.global_state
    if state.client is None:
        return 0, 1
    return int(state.process_id), int(state.num_processes or 1)
