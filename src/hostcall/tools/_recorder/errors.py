"""Errors of a recorder's threads, each logged at once and raised once.

The next barrier raises an error, or `close` if the recorder's last barrier is over.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import hostcall as hc

_logger = logging.getLogger("hostcall")
# Protects `_untold`. Its parties are the threads of recorders, and those of the user at
# a barrier or in `close`.
_lock = threading.Lock()
_untold: list[tuple[object, BaseException]] = []


def tell(owner: object, who: str, error: BaseException) -> None:
    """Called by a thread that ends with an error."""
    with _lock:
        _untold.append((owner, error))
    # Last: who reads this expects the next barrier to raise.
    _logger.error("hostcall: %s failed: %s: %s", who, type(error).__name__, error)


def take(owner: object | None = None) -> list[BaseException]:
    """The errors of one recorder, or of all, that nothing has raised."""
    with _lock:
        mine = [pair for pair in _untold if owner in (None, pair[0])]
        _untold[:] = [pair for pair in _untold if pair not in mine]
    return [error for _, error in mine]


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Says which run it was if its files can't be read. Arrow, Zarr and JSON raise
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
