"""The files of a run, in a folder that somebody else may have made.

A link in it could lead a recorder, or a reader, to any file of the user's, and a named
pipe would never end. A recorder makes neither, so neither is opened: a folder is looked
through before its files are read, and a recorder writes only to files that it has made.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from hostcall.errors import HostcallError


def only_files(folder: Path) -> None:
    """Refuses a folder of a run if it, or what is in it, is a link, pipe or device."""
    if folder.is_symlink():
        raise foreign(folder)
    if not folder.exists():
        return
    with os.scandir(folder) as found:
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                only_files(Path(entry.path))
            # A file of that name may have been replaced meanwhile, and be gone.
            elif not entry.is_file(follow_symlinks=False) and os.path.lexists(entry):
                raise foreign(Path(entry.path))


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Says which run it was if its files can't be read. Arrow, NumPy and JSON raise
    many kinds of exceptions for damaged files.
    """
    try:
        yield
    except (HostcallError, PermissionError):
        raise
    except Exception as error:
        why = "A file of it was damaged, or something else wrote it"
        if isinstance(error, MemoryError):  # a damaged file may promise any size
            why = "It does not fit into memory, or a file of it was damaged"
        raise HostcallError(
            f"hostcall: the run in {folder} can't be read ({type(error).__name__}:"
            f" {error}). {why}",
            code="hc-record",
        ) from error


def foreign(path: Path) -> HostcallError:
    return HostcallError(
        f"hostcall: {path} is a link, or no plain file. A recorder makes no such thing,"
        " and it may lead to any file of yours, so it is not opened. Copy the run"
        " without its links (rsync -r --no-links), or delete this one",
        code="hc-record",
    )
