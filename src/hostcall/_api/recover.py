"""`hc.recover`: go on after a program over several processes failed in all of them."""

from __future__ import annotations

import logging

from hostcall._core.errors import SpecError
from hostcall._runtime import recovery

logger = logging.getLogger("hostcall")


def recover(timeout: float = 60.0) -> list[str]:
    """Allows programs over several processes again, after one has failed.

    After such a failure a process refuses further programs over several processes,
    since their collectives could meet those of the failed one. All processes of the job
    must call this, each after it has raised the failure: they meet, forget the failed
    programs (the tokens of their ordered calls too), and run a small program that shows
    that their collectives are in step. What the failed programs would have returned is
    lost: go on from values of before, which all processes must choose alike.

    Args:
        timeout: how long to wait, in seconds, for this process's programs and for the
            other processes.

    Returns:
        The texts of the failures that are now forgotten, those of this process first;
        empty if there were none.

    Raises:
        SpecError: the timeout is not a number above 0.
        HostcallError: a process has ended, or has not come in time; a program still
            waits in a collective; or the check found values of before. Programs over
            several processes are still refused then: end all processes of the job.

    Under transformations: not for use in programs.

    Cost: a meeting of all processes (some ms) and a program over all devices, which is
    compiled at the first use. Programs from before the failure are not compiled again.
    In a job of one process it only waits for programs with effects.
    """
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not number or not 0 < timeout < float("inf"):
        raise SpecError(
            "hostcall: timeout of recover() should be a number of seconds above 0, got"
            f" {timeout!r}",
            code="hc-option",
        )
    lost = recovery.recover(float(timeout))
    for text in lost:
        logger.warning("recover() goes on after a failure %s", text)
    return lost
