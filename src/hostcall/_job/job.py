"""The part of this process in a job of several, from its first program over several on.

JAX meets all processes when one of them ends. If one does not come, it waits until that
one's heartbeats have been missing (for 100 s, unless the program says otherwise), and
aborts. Meanwhile the process keeps its connections, so that others wait for it in their
collectives. So before JAX's own end (_runtime/lifecycle.py calls this; JAX's runs
later, since it was registered earlier):

  1. An exception that ends the script is told to the others.
  2. If no failure is known, the process waits for the others as JAX would, but a
     failure ends this wait at once. When the last one has come, all go on to JAX's end.
     (A process that has run nothing of hostcall's over several processes goes to JAX's
     end at once; then all do.)
  3. If a failure is known, or that wait takes too long, JAX's meeting is left out: it
     can only fail. The process ends, Gloo closes its connections, and the collectives
     of the others raise. Process 0 stays until the others have left, or for `stays`:
     it has the coordination service, and jaxlib aborts processes whose service ends.

Ctrl-C ends all these waits.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from typing import Any

import jax

from hostcall import _jax, _native
from hostcall._core import failures
from hostcall._core.process import Owned, once, refusal
from hostcall._core.wait import seen, wait
from hostcall._job import answers
from hostcall._job.after_failure import Failures
from hostcall._job.mailbox import BOARD, Mailbox
from hostcall._runtime import lifecycle
from hostcall._runtime.running import ProcessStatus, doing

logger = logging.getLogger("hostcall")

_HERE = "hostcall/here/"  # a key for each process that has come here,
_LEFT = "hostcall/left/"  # and for each one that ends after a failure
_END = "hostcall/end/"


class Job(lifecycle.JobEnd, Owned):
    """One process's part in the job.

    Attributes:
        failures: what has failed.
        watched: whether the thread was started. Not if the job's processes may come
            and go: those jobs are left to JAX. Not in a forked child either.
        patience: seconds for which it waits at its end for the others, as JAX would.
        stays: seconds that process 0 stays for the others after a failure,
        ending: and until the last one's interpreter has ended.
    """

    patience, stays, ending = 300.0, 5.0, 1.0

    def __init__(self) -> None:
        self.failures = Failures(self._tell)
        self._mailbox = Mailbox(self.failures.failed_there, answers.answer)
        self._ended_by: BaseException | None = None  # what ended the script
        self.watched = not _jax.job_outlives_processes()
        if self.watched:
            self._mailbox.start()
            self._mailbox.post(f"{_HERE}{_jax.job_rank()}")
            sys.excepthook = functools.partial(self._note, sys.excepthook)
        super().__init__()

    def _tell(self, text: str) -> None:
        if self.watched:
            self._mailbox.send(f"{BOARD}failed/{_jax.job_rank()}", text)

    def _note(self, before: Any, kind: Any, error: BaseException, trace: Any) -> None:
        """Notes an exception that Python reports; in an interactive session it only
        ends a statement.
        """
        if not hasattr(sys, "ps1"):
            self._ended_by = error
        before(kind, error, trace)

    # --- The end of the process ------------------------------------------------------

    def script_ended(self) -> None:
        """Tells the others of an exception that ended the script."""
        if self.watched and self._ended_by is not None:
            # It may follow from another's failure, which is to be told then.
            self._mailbox.send("")
            if self.failures.told is None:
                self.failures.tell(failures.summary(self._ended_by))

    def interrupted(self) -> None:
        """Tells the others that Ctrl-C ends this process's end."""
        if self.watched and _jax.job_size() > 1:
            self.failures.tell("KeyboardInterrupt at its end")

    def leave(self) -> None:
        """Meets the other processes, or leaves a job that failed."""
        if not self.watched:
            return
        if _jax.job_size() > 1:  # not shut down yet
            if self.failures.told is None:
                self._meet()
            if self.failures.told is not None:
                self._part()
        self._mailbox.stop()

    def renew(self) -> None:
        """The thread does not exist in a forked child, nor do those of JAX's client."""
        self.watched = False

    def _meet(self) -> None:
        def met() -> str | None:
            return self.failures.told or _jax.job_get(f"{_END}all")

        try:
            arrived, size = _jax.job_count(f"{_END}count"), _jax.job_size()
            if arrived == size or len(_jax.job_folder(_HERE)) < size:
                _jax.job_put(f"{_END}all", "go on")
            if not wait(seen(met, self._mailbox.pause / 2), self.patience):
                text = f"it waited {self.patience:g} s at its end for the others"
                self.failures.tell(text)
        except jax.errors.JaxRuntimeError as error:
            logger.error("the job's other processes can't be awaited: %s", error)

    def _part(self) -> None:
        """Tells process 0 that this one ends now. Process 0 waits for all others."""
        here, size = _jax.place_in_job()
        if here:
            self._mailbox.send(f"{_LEFT}{here}")
        else:
            wait(seen(lambda: len(_jax.job_folder(_LEFT)) == size - 1), self.stays)
            # Even in the last moment before its own end, jaxlib aborts a process whose
            # service ends.
            time.sleep(self.ending)
        _jax.leave_job()


@once
def job() -> Job:
    """The part of this process, in a job of several; begins at the first call."""
    made = Job()
    lifecycle.leave_by(made)
    return made


def ask(seconds: float) -> list[ProcessStatus]:
    """Asks all processes what they are doing, and answers the others from now on."""
    if _jax.job_size() == 1:
        return [doing(_jax.job_rank())]
    if _native.forked():
        raise refusal("hc.monitor.status(processes='all') is called")
    job()
    return answers.ask(seconds)
