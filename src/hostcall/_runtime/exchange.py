"""Bytes that all processes of a job give to each other, or the first gives to all.

The bytes go through the store that the processes share (_jax/job_store.py), not through
devices: no program runs, so none that hangs or has failed is in the way.

  1. Each process puts its bytes under a key of its own.
  2. Each fetches the others', looking 50 times a second, so that Ctrl-C ends the wait.
  3. All meet at a barrier; then nobody needs the keys, and each deletes its own.

All processes have to come here in the same order. The keys hold the number and the
purpose of the exchange, so bytes of two exchanges are never mixed up: a process that is
elsewhere is missing, and the others say so.
"""

from __future__ import annotations

import itertools
import time

import jax

from hostcall import _jax
from hostcall._core.errors import HostcallError

_FETCH = 0.02  # seconds between two looks for the others' bytes

_numbers = itertools.count()


def of_all(what: str, own: bytes, seconds: float) -> list[bytes]:
    """The bytes of each process, by its number.

    Args:
        what: the purpose, for messages: "save() of `env`".
        own: this process's bytes.
        seconds: how long to wait for the others.

    Raises:
        HostcallError: a process did not come in time.
    """
    store = _jax.job_store()
    if store is None:
        return [own]
    return _exchange(store, what, own, range(store.processes), seconds)


def of_first(what: str, own: bytes | None, seconds: float) -> bytes:
    """The bytes of process 0, which is the only one that has to give any."""
    store = _jax.job_store()
    if store is None:
        assert own is not None
        return own
    mine = own if store.process == 0 else None
    (found,) = _exchange(store, what, mine, range(1), seconds)
    return found


def _exchange(
    store: _jax.JobStore,
    what: str,
    own: bytes | None,
    givers: range,
    seconds: float,
) -> list[bytes]:
    name = f"hostcall/exchange/{next(_numbers)}/{what}"
    end = time.monotonic() + seconds
    if own is not None:
        store.put_bytes(f"{name}/{store.process}", own)
    found: dict[int, bytes | None] = dict.fromkeys(givers)
    if own is not None:
        found[store.process] = own
    while True:
        for giver in [g for g in givers if found[g] is None]:
            found[giver] = store.get_bytes(f"{name}/{giver}")
        missing = [giver for giver in givers if found[giver] is None]
        if not missing:
            break
        if time.monotonic() >= end:
            raise _absent(what, f"processes {missing} have", seconds)
        time.sleep(_FETCH)
    try:
        store.meet(name, max(end - time.monotonic(), 1.0))
    except jax.errors.JaxRuntimeError as error:
        raise _absent(what, "a process has", seconds) from error
    if own is not None:
        store.delete(f"{name}/{store.process}")
    return [value for value in found.values() if value is not None]


def _absent(what: str, who: str, seconds: float) -> Exception:
    return HostcallError(
        f"hostcall: {what} waited {seconds:g} s for all processes of the job, and {who}"
        " not come. Each process has to call it, in the same order as the others, also"
        " those that have no object. hc.monitor.status(processes='all') shows where"
        " they are. Then restart the job: the next such call would wait for this one"
    )
