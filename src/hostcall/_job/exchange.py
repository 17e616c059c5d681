"""Texts that all processes of a job give to each other, or the first gives to all.

They go through the store that the processes share (_jax/coordination.py), not
through devices: no program runs, so none that hangs or has failed is in the way.

  1. Each process puts its text under a key of its own.
  2. Each fetches the others', looking 20 times a second, so that Ctrl-C ends the wait.
  3. All meet at a barrier; then nobody needs the keys, and each deletes its own.

A process that has left the job after a failure (job.py) gives no text any more, and
ends the wait. One that failed and lives on may still come: no program is in the way.

All processes have to come here in the same order. The keys hold the number and the
purpose of the exchange, so texts of two exchanges are never mixed up: a process that is
elsewhere is missing, and the others say so.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Collection

import jax

from hostcall import _jax
from hostcall._core.errors import HostcallError
from hostcall._core.wait import seen, wait
from hostcall._job.mailbox import LEFT

_numbers = itertools.count()


def exchange(
    what: str, own: str | None, seconds: float, *, first: bool = False
) -> list[str]:
    """The text of each process, by its number.

    Args:
        what: the purpose, for messages: "save() of `env`".
        own: this process's text.
        seconds: how long to wait for the others.
        first: only process 0 gives a text; those of the others are not needed.

    Raises:
        HostcallError: a process did not come in time, or has left the job.
    """
    here, processes = _jax.place_in_job()
    givers = range(1 if first else processes)
    if here not in givers:
        own = None
    elif processes == 1 and own is not None:
        return [own]
    name = f"hostcall/exchange/{next(_numbers)}/{what}"
    end = time.monotonic() + seconds
    if own is not None:
        _jax.job_put(f"{name}/{here}", own, overwrite=True)
    try:
        others = [giver for giver in givers if giver != here]
        found = fetch(name, others, seconds, lambda giver: _left(what, giver))
        if own is not None:
            found[here] = own
        if missing := [giver for giver in givers if giver not in found]:
            raise _absent(what, f"processes {missing} have", seconds)
        try:
            _jax.job_meet(name, max(end - time.monotonic(), 1.0))
        except jax.errors.JaxRuntimeError as error:
            raise _absent(what, "a process has", seconds) from error
        return [found[giver] for giver in givers]
    finally:
        # After a failure too: who has not fetched them by now fails as well.
        if own is not None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service is gone
                _jax.job_delete(f"{name}/{here}")


def fetch(
    name: str,
    givers: Collection[int],
    seconds: float,
    left: Callable[[int], Exception] | None = None,
) -> dict[int, str]:
    """The texts in `name`/<giver>, of those who have put one there in time.

    Raises `left(giver)` if one has left the job without; without `left` it is only
    missing.
    """
    found: dict[int, str] = {}

    def look() -> bool:
        # Looked at before the texts: whoever has left by now gives none later.
        gone = _jax.job_folder(LEFT) if left is not None else {}
        for giver in givers:
            text = None if giver in found else _jax.job_get(f"{name}/{giver}")
            if text is not None:  # it may be empty
                found[giver] = text
            elif left is not None and giver not in found and str(giver) in gone:
                raise left(giver)
        return all(giver in found for giver in givers)

    wait(seen(look), seconds)
    return found


def _left(what: str, giver: int) -> Exception:
    return HostcallError(
        f"hostcall: {what} needs all processes of the job, and process {giver} has left"
        " the job after a failure, which the log of this process names. End all"
        " processes, and restart them from the last checkpoint",
        code="hc-process",
    )


def _absent(what: str, who: str, seconds: float) -> Exception:
    return HostcallError(
        f"hostcall: {what} waited {seconds:g} s for all processes of the job, and {who}"
        " not come. Each process has to call it, in the same order as the others, also"
        " those that have no object. hc.monitor.status(processes='all') shows where"
        " they are. Then restart the job: the next such call would wait for this one",
        code="hc-process",
    )
