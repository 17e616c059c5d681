"""The failures of taps: lines in the log, and exceptions for the next barrier.

A tap that fails does not stop its program, and so may fail a million times. The first
three failures of each tap are logged in full. After that, one line a second says how
many more there were, with the newest one; the end of each wait for taps logs such a
line too. The next barrier raises a few of the exceptions, one of those that are equal,
and says how many there were.

The worker adds failures while other threads log counts or take the exceptions. Logging
is done outside the lock.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from hostcall._core import codes, config, failures
from hostcall._core.counted import counted
from hostcall._core.process import Owned

logger = logging.getLogger("hostcall")

IN_FULL = 3
SECONDS = 1.0  # between two lines for one tap

clock = time.monotonic  # tests replace it


@dataclass
class _Count:
    """The failures of one tap since the last barrier that raised.

    Attributes:
        name, place: the tap's.
        count: how many there were.
        logged: how many of them the log mentions.
        until: the earliest time of the next line in the log.
        newest: the newest failure, as a text.
        kept: the texts of those that are kept for the barrier.
    """

    name: str
    place: Any
    count: int = 0
    logged: int = 0
    until: float = 0.0
    newest: str = ""
    kept: set[str] = field(default_factory=set)

    def log(self) -> None:
        """Logs how many there were since the last line."""
        with _state.lock:
            count, more = self.count, self.count - self.logged
            self.logged, self.until = count, clock() + SECONDS
        if more:
            logger.error(
                "tap `%s`, written at %s, failed %s (%d in all). Last error: %s",
                self.name,
                self.place,
                counted(more, "more time"),
                count,
                self.newest,
            )


class _TapFailures(Owned):
    """
    Attributes:
        lock: protects the others.
        tallies: by the names of the tap's function and its place, not by its tag: no
            more than lines that tap.
        failures: the exceptions that are kept.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tallies: dict[tuple[str, Any], _Count] = {}
        self.failures: list[BaseException] = []
        super().__init__()


_state = _TapFailures()


def failed(name: str, place: Any, error: BaseException, row: tuple[int, ...]) -> None:
    """Logs the exception of a tap, and keeps it for the next barrier."""
    failures.keep(error)
    said = codes.without(failures.summary(error))[:500]
    with _state.lock:
        tally = _state.tallies.setdefault((name, place), _Count(name, place))
        tally.count += 1
        if _is_kept(tally, error, said):
            _state.failures.append(error)
            tally.kept.add(said)
        count, tally.newest = tally.count, said
        if count <= IN_FULL:
            tally.logged, tally.until = count, clock() + SECONDS
    if count <= IN_FULL:
        logger.error(
            "tap `%s`%s, written at %s, failed; the program goes on%s",
            name,
            f", row {row[0] if len(row) == 1 else row}" if row else "",
            place,
            " (its further failures are only counted here)" if count == IN_FULL else "",
            exc_info=error,
        )
    elif clock() >= tally.until:
        tally.log()


def _is_kept(tally: _Count, error: BaseException, said: str) -> bool:
    if said in tally.kept:
        return False
    if len(_state.failures) < config.KEPT_TAP_ERRORS:
        return True
    # The first failure of a tap, or a KeyboardInterrupt, is kept even if other taps
    # have filled the list.
    few = len(_state.failures) < 4 * config.KEPT_TAP_ERRORS
    return few and (tally.count == 1 or not isinstance(error, Exception))


def tell_counts() -> None:
    """Logs the failures that have only been counted so far."""
    for tally in list(_state.tallies.values()):
        tally.log()


def take() -> tuple[list[BaseException], int]:
    """Some exceptions that taps have raised since the last call, and how many more
    there were.
    """
    with _state.lock:
        taken = list(_state.failures)
        more = sum(t.count for t in _state.tallies.values()) - len(taken)
        _state.failures.clear()
        _state.tallies.clear()
    for error in taken:
        failures.hand_over(error)
    return taken, more


def take_as_one() -> BaseException | None:
    """As `take`, but as one exception: the object itself, or a group."""
    errors, more = take()
    if len(errors) + more < 2:
        return errors[0] if errors else None
    text = f"{counted(len(errors) + more, 'tap')} failed"
    if more:
        here = f"the errors here are different ones ({len(errors)})"
        text += f"; {here}, and the log counts the rest"
    return BaseExceptionGroup(text, errors)
