"""How a process of a job ends: after meeting the others, or without those that failed.

JAX meets all processes when one of them ends. If one does not come, it waits until that
one's heartbeats have been missing for 100 s, and aborts. So before JAX's own end
(lifecycle.py calls this; JAX's runs later, since it was registered earlier):

  1. An exception that ends the script is told to the others.
  2. If no failure is known, the process waits for the others as JAX would, but a
     failure ends this wait at once. When the last one has come, all go on to JAX's end.
     One that waits for more than a second, and whose devices do not compute, tells the
     others so: if they are in a collective with it, nobody will ever come there. (A
     process that does not use hostcall goes to JAX's end at once; then all do.)
  3. If a failure is known, JAX's meeting is left out, since it can only fail. Process 0
     stays until the others have ended, at most `fail_grace` + `_STAYS`: it has the
     coordination service, and jaxlib aborts processes whose service ends.

All waits return to Python every `_SLICE`, so that Ctrl-C ends them.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from typing import Any

import jax

from hostcall import _jax
from hostcall._core import config, failures
from hostcall._runtime import peers, stuck

logger = logging.getLogger("hostcall")

_STAYS = 5.0  # seconds, besides the grace, that process 0 stays for the others
_COMPLAINS = 1.0  # seconds that the first process at its end waits silently
_JAXS_END = 300.0  # seconds that JAX's own end waits for the others
_SLICE = 0.25

_ended_by: BaseException | None = None  # the exception that ended the script


def begin() -> None:
    """Starts to watch the other processes, if there are any."""
    peers.start()
    if peers.started():
        sys.excepthook = functools.partial(_note, sys.excepthook)


def _note(before: Any, kind: Any, error: BaseException, trace: Any) -> None:
    """Notes an exception that Python reports; in an interactive session it only ends a
    statement.
    """
    global _ended_by
    if not hasattr(sys, "ps1"):
        _ended_by = error
    before(kind, error, trace)


def script_ended() -> None:
    """Tells the others of an exception that ended the script."""
    peers.wait_if_ending()
    if peers.started() and peers.known() is None and _ended_by is not None:
        peers.tell(failures.summary(_ended_by))


def interrupted() -> None:
    """Tells the others that this process ends by Ctrl-C, before it does so at once."""
    if peers.started() and _jax.job_size() > 1:
        peers.tell("KeyboardInterrupt at its end")


def leave() -> None:
    """Meets the other processes, or leaves a job that failed."""
    if not peers.started():
        return
    peers.pause(True)  # the waits here are in jaxlib, like those in a collective
    if _jax.job_size() == 1:  # the program has called jax.distributed.shutdown()
        peers.stop()
        return
    if peers.known() is None:
        _meet()
    if peers.known() is None:
        peers.stop()
        return
    peers.take_leave(config.fail_grace() + _STAYS)
    peers.stop()
    _jax.leave_job()


def _meet() -> None:
    until = time.monotonic() + _JAXS_END
    complains: float | None = time.monotonic() + _COMPLAINS
    place = "hostcall/end"
    try:
        arrived = _jax.job_count(f"{place}/count")
        if arrived == _jax.job_size() or not peers.all_started():
            _jax.job_put(f"{place}/all", "go on")
        while peers.known() is None and time.monotonic() < until:
            if _jax.job_get(f"{place}/all", _SLICE) is not None:
                return
            if complains and time.monotonic() >= complains and not stuck.computes():
                peers.send(peers.new("waits"), peers.others())
                complains = None
    except jax.errors.JaxRuntimeError as error:
        logger.error("the end of the job's other processes can't be awaited: %s", error)
