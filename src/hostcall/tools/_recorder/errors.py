"""A recorder's threads, and their errors: each logged at once and raised once.

The next barrier raises an error, or `close` if the recorder's last barrier is over.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import hostcall as hc

_logger = logging.getLogger("hostcall")
# Protects `_untold`. Its parties are the threads of recorders, and those of the user at
# a barrier or in `close`.
_lock = threading.Lock()
_untold: list[tuple[object, BaseException]] = []


class Worker:
    """A thread that works for a recorder, from now on.

    Args:
        owner: the recorder that raises its error.
        name: what threads of this kind are called.
        who: what it is in the log.
        work: what it does.
    """

    def __init__(
        self, owner: object, name: str, who: str, work: Callable[[], None]
    ) -> None:
        # An event, not Thread.join: after Ctrl-C in a join, Python before 3.13 believes
        # that the thread has ended.
        self._ended = threading.Event()
        args = owner, who, work  # the thread lets them go when it ends
        thread = threading.Thread(target=self._run, args=args, name=name, daemon=True)
        # It may inherit context variables, but not from whoever made the recorder.
        contextvars.Context().run(thread.start)

    def join(self) -> None:
        """Waits in slices: Python misses a Ctrl-C that comes just before a wait."""
        while not self._ended.wait(0.1):
            pass

    def _run(self, owner: object, who: str, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with _lock:
                _untold.append((owner, error))
            # Last: who reads this expects the next barrier to raise.
            kind = type(error).__name__
            _logger.error("hostcall: %s failed: %s: %s", who, kind, error)
        finally:
            self._ended.set()


def take(owner: object | None = None) -> list[BaseException]:
    """The errors of one recorder, or of all, that nothing has raised."""
    with _lock:
        mine = [pair for pair in _untold if owner in (None, pair[0])]
        _untold[:] = [pair for pair in _untold if pair not in mine]
    return [error for _, error in mine]


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Says which run it was if its files can't be read. Arrow, NumPy and JSON raise
    many kinds of exceptions for damaged files.
    """
    try:
        yield
    except (hc.errors.HostcallError, PermissionError):
        raise
    except Exception as error:
        why = "A file of it was damaged, or something else wrote it"
        if isinstance(error, MemoryError):  # a damaged file may promise any size
            why = "It does not fit into memory, or a file of it was damaged"
        raise hc.errors.HostcallError(
            f"hostcall: the run in {folder} can't be read ({type(error).__name__}:"
            f" {error}). {why}",
            code="hc-record",
        ) from error


def raise_all(errors: list[BaseException], what: str) -> None:
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise BaseExceptionGroup(what, errors)


def _raise_untold(ending: bool) -> None:
    del ending
    raise_all(take(), "threads of recorders failed")


hc.monitor.at_barrier(_raise_untold)
