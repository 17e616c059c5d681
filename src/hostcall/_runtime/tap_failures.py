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
_TALLIES_AT_MOST = 1024

clock = time.monotonic  # tests replace it


@dataclass
class _Count:
    """The failures of one tap since the last barrier that raised.

    Attributes:
        count: how many there were.
        logged: how many of them the log mentions.
        until: the earliest time of the next line in the log.
        newest: the newest failure, as a text.
        kept: the texts of those that are kept for the barrier.
    """

    count: int = 0
    logged: int = 0
    until: float = 0.0
    newest: str = ""
    kept: set[str] = field(default_factory=set)


class _TapFailures(Owned):
    """
    Attributes:
        lock: protects the others.
        tallies: by the tap's name and place.
        failures: the exceptions that are kept.
        forgotten: how many are not.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tallies: dict[tuple[str, Any], _Count] = {}
        self.failures: list[BaseException] = []
        self.forgotten = 0
        super().__init__()


_state = _TapFailures()


def failed(name: str, place: Any, error: BaseException, row: tuple[int, ...]) -> None:
    """Logs the exception of a tap, and keeps it for the next barrier."""
    failures.keep(error)
    said = codes.without(failures.summary(error))[:500]
    if len(_state.tallies) >= _TALLIES_AT_MOST:
        tell_counts()
    with _state.lock:
        if len(_state.tallies) >= _TALLIES_AT_MOST:
            _state.tallies.clear()
        tally = _state.tallies.setdefault((name, place), _Count())
        tally.count += 1
        if _is_kept(tally, error, said):
            _state.failures.append(error)
            tally.kept.add(said)
        else:
            _state.forgotten += 1
        count = tally.count
        if count <= IN_FULL:
            tally.logged, tally.until = count, clock() + SECONDS
    if count <= IN_FULL:
        _tell_in_full(name, place, error, row, count)
    else:
        tally.newest = said
        if clock() >= tally.until:
            _tell_count(name, place, tally)


def _is_kept(tally: _Count, error: BaseException, said: str) -> bool:
    if said in tally.kept:
        return False
    if len(_state.failures) < config.KEPT_TAP_ERRORS:
        return True
    # The first failure of a tap, or a KeyboardInterrupt, is kept even if other taps
    # have filled the list.
    few = len(_state.failures) < 4 * config.KEPT_TAP_ERRORS
    return few and (tally.count == 1 or not isinstance(error, Exception))


def _tell_in_full(
    name: str, place: Any, error: BaseException, row: tuple[int, ...], count: int
) -> None:
    logger.error(
        "tap `%s`%s, written at %s, failed; the program goes on%s",
        name,
        f", row {row[0] if len(row) == 1 else row}" if row else "",
        place,
        " (its further failures are only counted here)" if count == IN_FULL else "",
        exc_info=error,
    )


def _tell_count(name: str, place: Any, tally: _Count) -> None:
    with _state.lock:
        count, more = tally.count, tally.count - tally.logged
        tally.logged, tally.until = count, clock() + SECONDS
    if more:
        logger.error(
            "tap `%s`, written at %s, failed %s (%d in all). Last error: %s",
            name,
            place,
            counted(more, "more time"),
            count,
            tally.newest,
        )


def tell_counts() -> None:
    """Logs the failures that have only been counted so far."""
    for (name, place), tally in list(_state.tallies.items()):
        _tell_count(name, place, tally)


def take() -> tuple[list[BaseException], int]:
    """Some exceptions that taps have raised since the last call, and how many more
    there were.
    """
    with _state.lock:
        taken, more = list(_state.failures), _state.forgotten
        _state.failures.clear()
        _state.tallies.clear()
        _state.forgotten = 0
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
