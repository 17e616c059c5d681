"""The files that one run of rows shares with workers in other processes.

The leash. A chunk of rows that is queued in another process can't always be cancelled.
So each run on processes has a file, its leash:

  1. Before a worker begins a chunk, it appends the chunk's first row and its own
     process id to the file.
  2. Before each row, it checks that the file still exists, and stops if it does not.
  3. This process deletes the file when no more rows may begin.
  4. If a worker dies, the file says which chunk it had.

Arrays that all rows share. Each goes into a file once, in memory if there is room, and
workers map it. The mapping is private, so a row that writes to the array gets its own
copy of the pages that it writes.
"""

from __future__ import annotations

import contextlib
import os
import tempfile

import numpy as np


class SharedFiles:
    """The files of one run, in the process of its call."""

    def __init__(self) -> None:
        self._paths: list[str] = []

    def new_leash(self) -> str:
        """The path of a new leash."""
        handle, path = self._open(0)
        os.close(handle)
        return path

    def put(self, array: np.ndarray) -> ArrayInFile:
        """What to send in place of an array."""
        handle, path = self._open(array.nbytes)
        with os.fdopen(handle, "wb") as file:
            array.tofile(file)
        return ArrayInFile(path, array)

    def _open(self, size: int) -> tuple[int, str]:
        handle, path = tempfile.mkstemp(".hostcall", dir=_memory_for(size))
        self._paths.append(path)
        return handle, path

    def delete(self) -> None:
        for path in self._paths:
            with contextlib.suppress(OSError):
                os.unlink(path)


class ArrayInFile:
    """An array that workers map into their memory."""

    def __init__(self, path: str, array: np.ndarray) -> None:
        self.path = path
        self.dtype = array.dtype
        self.shape = array.shape

    def get(self) -> np.ndarray:
        pages = np.memmap(self.path, self.dtype, "c", shape=self.shape)
        return pages.view(np.ndarray)


def begin_chunk(leash: str, start: int) -> None:
    """In a worker: writes into the leash that this process begins the chunk at `start`.

    Does nothing if the leash is gone: no row may begin then, and each row checks that.
    """
    with contextlib.suppress(FileNotFoundError):
        file = os.open(leash, os.O_WRONLY | os.O_APPEND)
        try:
            # One short append is atomic, so lines of several workers don't mix.
            os.write(file, b"%d %d\n" % (start, os.getpid()))
        finally:
            os.close(file)


def chunks_begun(leash: str) -> dict[int, int]:
    """The process id of each chunk's worker, by the chunk's first row.

    Raises FileNotFoundError if the leash is gone.
    """
    begun = {}
    with open(leash) as file:
        for line in file:
            start, pid = line.split()
            begun[int(start)] = int(pid)
    return begun


def _memory_for(size: int) -> str | None:
    """The folder of files in memory; None if there is none or it lacks room."""
    try:
        status = os.statvfs("/dev/shm")
    except (OSError, AttributeError):
        return None
    # Half of the room is left to others.
    has_room = status.f_bavail * status.f_frsize > 2 * size
    return "/dev/shm" if has_room and os.access("/dev/shm", os.W_OK) else None
