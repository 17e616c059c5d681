"""Keeps a process out of later collectives, once a program over several has failed.

The danger, which plain JAX has too:

  1. Step 1 fails in this process before it reaches a collective (psum, all_gather).
  2. The other processes wait in that collective.
  3. This process goes on to step 2, and reaches step 2's collective.
  4. The two collectives meet, and mix the values of two steps without an error.

So after such a failure this process refuses every program over several processes, for
the rest of its life. Programs over its own devices still run. A process that learns
that another one failed refuses them too: they could only hang.

A failure that reaches all processes by the program's own reduction is not announced to
the others. They will raise it by themselves, and one that has not even started the
program must not refuse it: the failed process waits for it in the reduction.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax

from hostcall import _jax
from hostcall._core import failures
from hostcall._core.errors import HostcallError

logger = logging.getLogger("hostcall")

_LONGEST = 10_000  # characters of a text of another process


class Failures:
    """The first failures that this process knows of: here, and in other processes."""

    def __init__(self, send: Callable[[str], object]) -> None:
        """`send(text)` sends the other processes the text of a failure here."""
        # The first text that is "announced" to all, the first one of a failure "here",
        # and the first one that another process announced: "there".
        # `setdefault` is one step, with the GIL and without, so one thread finds its
        # own text there: no lock.
        self._first: dict[str, str] = {}
        self._send = send

    @property
    def announced(self) -> str | None:
        """The first one that all processes hear of, with its process; or None."""
        return self._first.get("announced")

    @property
    def by_program(self) -> bool:
        """Whether a program brings all processes the first failure here."""
        return "by program" in self._first

    def failed(self, text: str, *, announces: bool = True) -> None:
        """Notes that a call of a program over several processes failed here.

        `announces`: the others do not learn it from the program itself.
        """
        if not self._is_first("here", text):
            return  # only the first says what went wrong; others follow from it
        _jax.refuse_programs_across(self._refusal)
        if announces:
            self.announce(text)
        else:
            self._is_first("by program", text)

    def announce(self, text: str) -> None:
        """Lets the other processes know of a failure here."""
        text = failures.without_number(text)
        self._send(text)
        # Now, since this failure may follow from another's, which is learned there.
        self._is_first("announced", f"process {_jax.job_rank()} failed: {text}")

    def failed_there(self, process: int, text: str) -> None:
        """Notes that another process failed, and logs the first one that did."""
        failure = f"process {process} failed: {_shown(text)}"
        self._is_first("there", failure)
        if self._is_first("announced", failure):
            _jax.refuse_programs_across(self._refusal)
            logger.error(
                "%s. This process may run no further program over several processes",
                self.announced,
            )

    def explain(self, error: BaseException) -> None:
        """Adds the failure of another process to an error that follows from it: that
        of a collective, which says that a connection was closed.
        """
        failure = self._first.get("there")
        if failure is None or "here" in self._first:
            return  # a failure here has a text of its own
        if failure in failures.summary(error):  # a refusal says it already
            return
        failures.add_note(
            error,
            f"hostcall: before this error, {failure}. Collectives that wait for that"
            " process raise in all others",
        )

    def _is_first(self, which: str, text: str) -> bool:
        """Notes the text as the first of its kind, if it is that."""
        first = self._first
        # Of two threads that come at once, `setdefault` gives both the text of one.
        return which not in first and first.setdefault(which, text) is text

    @staticmethod
    def keep_text(text: str) -> None:
        """Puts the text of a failure here where the other processes find it."""
        try:
            _jax.job_put(_key(_jax.job_rank()), failures.without_number(text), True)
        except jax.errors.JaxRuntimeError as error:
            logger.error("the others can't be told what failed here: %s", error)

    @staticmethod
    def text_of(process: int) -> str:
        """The text of a failure of another process; empty if it can't be had."""
        try:
            # It was put there before the failure could be known.
            return _shown(_jax.job_get(_key(process)) or "")
        except jax.errors.JaxRuntimeError:  # the service is gone, and the text with it
            return ""

    def until_failure(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the function of a call, to refuse it after a failure.

        The guard on dispatch is not enough: the program may already have been
        dispatched. Only failures here count: a program that another process's failure
        has not reached yet fails by its own reduction, with that failure's text.
        """

        @functools.wraps(function, updated=())
        def checked(*args: Any, **kwargs: Any) -> Any:
            # A call that finds nothing here began before the failure was noted, as if
            # it had been made earlier.
            if "here" in self._first:
                raise self._refusal()
            return function(*args, **kwargs)

        return checked

    def _refusal(self) -> Exception:
        if "here" in self._first:
            why = (
                "a program over several processes failed in this process, which"
                " therefore refuses further ones. Other processes may still be waiting"
                " inside the failed program, and the values of the two programs would"
                " mix"
            )
        else:
            why = (
                "another process of the job has failed, so this one refuses further"
                " programs over several processes: they would wait for it for ever"
            )
        return HostcallError(
            f"hostcall: {why}. End all processes of the job, and restart them from the"
            " last checkpoint. Programs over this process's own devices still run. The"
            f" first failure was: {self._first.get('here', self.announced)}",
            code="hc-process",
        )


def _key(process: int) -> str:
    return f"hostcall/text/{process}"


def _shown(text: str) -> str:
    """A text that anyone may have written, cut and without control characters."""
    characters = []
    for character in text[:_LONGEST]:
        may_be_shown = character.isprintable() or character in "\n\t"
        characters.append(character if may_be_shown else "?")
    return "".join(characters)
