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
     can only fail. The process ends.

**Those that wait in a collective.** Its end alone would reach only its neighbours in
the collective, and the others one by one, as each of these ends. So from `grace`
seconds after a failure is known, each process closes its own connections for
collectives (_jax/connections.py), from the mailbox's thread: the main thread waits in
XLA. The collective raises there, and the error gets a note with the failure.

**Process 0 leaves last.** It has the coordination service, and jaxlib aborts processes
whose service ends. So it stays as long as any other process is connected with the
service. That ends when the process has ended, by whatever: no word of it is needed, so
one that was killed is not waited for. Processes that go on are given up in two steps:

  * If none has left for `stays` seconds, process 0 says that it is about to end. The
    others interrupt their calls, and raise HostcallError in their main threads.
  * If then none has left for `lasts` seconds, it ends. Those that are left wait in C or
    C++, and jaxlib aborts them.

Ctrl-C ends all these waits.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import threading
import time
from typing import Any

import jax

from hostcall import _jax, _native
from hostcall._core import failures
from hostcall._core.errors import HostcallError
from hostcall._core.process import PerProcess, once, refusal
from hostcall._core.wait import until_true, wait
from hostcall._job import answers
from hostcall._job.after_failure import Failures
from hostcall._job.mailbox import BOARD, LEFT, Mailbox
from hostcall._runtime import lifecycle
from hostcall._runtime.lifecycle import Phase
from hostcall._runtime.running import ProcessStatus, doing

logger = logging.getLogger("hostcall")

_HERE = "hostcall/here/"  # a key for each process that has come here
_END = "hostcall/end/"


class Job(PerProcess):
    """One process's part in the job.

    Attributes:
        failures: what has failed.
        watched: whether the thread was started. Not if the job's processes may come
            and go: those jobs are left to JAX. Not in a forked child either.
        patience: seconds for which it waits at its end for the others, as JAX would.
        grace: seconds after a failure is known, in which programs that do not need the
            process that failed can still end.
        stays: seconds that process 0 stays after a failure while no other one leaves,
        lasts: and after it has said that it is about to end. Processes that wait for
            their first meeting in a collective raise by themselves after 30 s.
        ending: seconds that it gives the last one to end, where the system does not
            say who is connected.
    """

    patience = 300.0
    grace = 1.0
    stays = 5.0
    lasts = 35.0
    ending = 1.0

    def __init__(self) -> None:
        self.failures = Failures(self._send_failure)
        self._mailbox = Mailbox(self)
        self._ended_by: BaseException | None = None  # what ended the script
        self._script_ended = False
        self._closes_next = math.inf  # when collectives are ended; the thread's own
        self._closes_after = self.grace
        self.watched = not _jax.job_outlives_processes()
        # All are connected now: `jax.distributed.initialize` meets them. If this does
        # not see as many (there is a proxy between them), it can't see them go.
        expected = _jax.job_size() - 1
        self._sees_others = self.watched and _jax.processes_at_service() == expected
        if self.watched:
            self._mailbox.start()
            self._mailbox.post(f"{_HERE}{_jax.job_rank()}")
            sys.excepthook = functools.partial(self._note, sys.excepthook)
        super().__init__()

    def _send_failure(self, text: str) -> None:
        if self.watched:
            self._mailbox.send(f"{BOARD}failed/{_jax.job_rank()}", text)

    def _note(self, hook: Any, kind: Any, error: BaseException, trace: Any) -> None:
        """Notes an exception that Python reports; in an interactive session it only
        ends a statement.
        """
        if not hasattr(sys, "ps1"):
            self._ended_by = error
            self.explain(error)
        hook(kind, error, trace)  # the one that was set before

    def explain(self, error: BaseException) -> None:
        """Adds to an error the failure of another process that it may follow from."""
        if self.watched and _jax.job_size() > 1:
            # The failure was told before its process closed a connection, but this
            # process may not have looked since then.
            self._mailbox.send("")
            self.failures.explain(error)

    # --- What others say, on the mailbox's thread ------------------------------------

    def failed_there(self, process: int, text: str) -> None:
        self.failures.failed_there(process, text)

    def asked(self, question: str) -> None:
        answers.answer(question)

    def looked(self) -> None:
        """Ends the collectives of this process, some time after a failure; and again,
        ever less often, for a program that was about to begin one.
        """
        if self.failures.announced is None:
            return
        now = time.monotonic()
        if self._closes_next == math.inf:  # the failure is new: `grace` begins
            self._closes_next = now + self._closes_after
        elif now >= self._closes_next:
            self._closes_after *= 2
            self._closes_next = now + self._closes_after
            _jax.close_collectives()

    def service_ends(self) -> None:
        """Raises in the main thread, which has gone on after a failure."""
        # Nobody else has to hear of it: this process is ending, or no failure is known,
        # and somebody else than process 0 has written this.
        if self._script_ended or self.failures.announced is None:
            return
        why = (
            "process 0 of the job, which has the coordination service, ends now. jaxlib"
            " aborts this process then, which has gone on after a failure:"
            f" {self.failures.announced}"
        )
        logger.error("%s", why)
        main = threading.main_thread().ident
        assert main is not None, "the interpreter ends after this thread"
        _native.raise_in_thread(main, _error_class(f"hostcall: {why}"))
        # It may wait in XLA for a program that waits for a call.
        _native.interrupt_calls(taps=True)

    # --- The end of the process ------------------------------------------------------

    def script_ended(self) -> None:
        """Tells the others of an exception that ended the script."""
        self._script_ended = True
        if self.watched and self._ended_by is not None:
            # It may follow from another's failure, which is to be told then.
            self._mailbox.send("")
            if self.failures.announced is None:
                self.failures.announce(failures.summary(self._ended_by))

    def interrupted(self) -> None:
        """Tells the others that Ctrl-C ends this process's end."""
        if self.watched and _jax.job_size() > 1:
            self.failures.announce("KeyboardInterrupt at its end")

    def leave(self) -> None:
        """Meets the other processes, or leaves a job that failed."""
        if not self.watched:
            return
        if _jax.job_size() > 1:  # not shut down yet
            if self.failures.announced is None:
                self._meet()
            # Also if another one failed while this one waited for it.
            if self.failures.announced is not None:
                self._part()
        self._mailbox.stop()

    def after_fork(self) -> None:
        # Neither the mailbox's thread exists here, nor do those of JAX's client.
        self.watched = False

    def _meet(self) -> None:
        """Waits for the others at the end, until one of them fails."""

        def have_met() -> str | None:
            return self.failures.announced or _jax.job_get(f"{_END}all")

        try:
            arrived = _jax.job_count(f"{_END}count")
            size = _jax.job_size()
            # Whoever comes last lets all go on. So does each, if some process has run
            # nothing of hostcall's over several: that one does not come here.
            if arrived == size or len(_jax.job_folder(_HERE)) < size:
                _jax.job_put(f"{_END}all", "go on")
            if not wait(until_true(have_met, self._mailbox.pause / 2), self.patience):
                text = f"it waited {self.patience:g} s at its end for the others"
                self.failures.announce(text)
        except jax.errors.JaxRuntimeError as error:
            logger.error("the job's other processes can't be awaited: %s", error)

    def _part(self) -> None:
        """Leaves a job that failed. Process 0 waits for all others."""
        rank = _jax.job_rank()
        # Some may still be in the reduction that tells them of a failure: they get a
        # moment, until the end of this process, or `looked`, closes the connections.
        if not self.failures.by_program:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service is gone
                _jax.close_collectives()
        self._mailbox.send(f"{LEFT}{rank}")
        if rank == 0 and not self._left_by_all():
            logger.warning(
                "process 0 ends, and with it the job's coordination service. jaxlib"
                " aborts the other processes that have gone on after the failure, of"
                " which none has ended for %g s. Their number: %d",
                self.stays + self.lasts,
                self._others(),
            )
        _jax.leave_job()

    def _left_by_all(self) -> bool:
        """Waits until the other processes have ended; False if some go on."""
        if self._none_stays(self.stays):
            return True
        self._mailbox.send(f"{BOARD}ends/0")
        return self._none_stays(self.lasts)

    def _none_stays(self, seconds: float) -> bool:
        """Whether all others end, with less than `seconds` between two of them."""
        fewest = self._others()
        until = time.monotonic() + seconds

        def all_end_or_none_does() -> bool:
            nonlocal fewest, until
            now = time.monotonic()
            running = self._others()
            if running < fewest:
                fewest = running
                until = now + seconds  # the next one gets as long again
            return running == 0 or now >= until

        wait(until_true(all_end_or_none_does))
        if fewest == 0 and not self._sees_others:
            # They have said that they end, and are about to. Even in the last moment
            # before its own end, jaxlib aborts a process whose service ends.
            time.sleep(self.ending)
        return fewest == 0

    def _others(self) -> int:
        """How many other processes have not ended yet, as far as process 0 knows."""
        all_others = _jax.job_size() - 1
        if self._sees_others:
            connected = _jax.processes_at_service()
            return all_others if connected is None else connected
        try:
            have_left = _jax.job_folder(LEFT).keys() - {"0"}
        except jax.errors.JaxRuntimeError:  # the service does not answer
            return all_others
        return all_others - len(have_left)


def _error_class(text: str) -> type[HostcallError]:
    """A HostcallError with this text, for `raise_in_thread`.

    Python raises a class in another thread, not an object, and calls it without
    arguments there. So the class holds the text; it looks like HostcallError.
    """

    class ServiceEnds(HostcallError):
        def __init__(self) -> None:
            super().__init__(text, code="hc-process")

    ServiceEnds.__name__ = HostcallError.__name__
    ServiceEnds.__qualname__ = HostcallError.__qualname__
    ServiceEnds.__module__ = HostcallError.__module__
    return ServiceEnds


@once
def job() -> Job:
    """The part of this process, in a job of several; begins at the first call."""
    new = Job()
    lifecycle.at_end(Phase.SCRIPT, new.script_ended)
    lifecycle.at_end(Phase.JOB, new.leave)
    lifecycle.at_ctrl_c(new.interrupted)
    failures.explained_by(new.explain)
    return new


def ask(seconds: float) -> list[ProcessStatus]:
    """Asks all processes what they are doing, and answers the others from now on."""
    if _jax.job_size() == 1:
        return [doing(_jax.job_rank())]
    if _native.forked():
        raise refusal("hc.monitor.status(processes='all') is called")
    job()
    return answers.ask(seconds)
