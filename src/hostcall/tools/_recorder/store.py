"""A run's folder, as its one writer in this process sees it.

    run/.lock            locked while a recorder is open, also against other processes
    run/columns/0.arrows Arrow IPC streams (arrow.py)
    run/arrays/loss/     those of arrays, a folder for each name (reading.py)

The processes of one job share the folder; process 1 locks `.lock.1`.

A name has one type in all files, so that they can be read as one table. Types are
checked where a program is traced (`check`), and the writer's thread does the rest.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import jax
import numpy as np

from hostcall._core.process import PerProcess
from hostcall.tools._recorder import arrow
from hostcall.tools._recorder.tapped import Events, Field, Tapped, text_of, unrecordable
from hostcall.tools._recorder.worker import Errors
from hostcall.tools._values import failed

# What the batches of one stream have in common: the folder, what the schema says, and
# the columns with their types.
_Key = tuple[Path, arrow.About, tuple[object, ...]]


class RunFolder(PerProcess):
    """
    Attributes:
        folder: its path.
        closed: whether nothing more is recorded in it.
        errors: what ended threads of the recorder, and nothing has raised.
        shapes: the shape of an entry of each array, for the worker of taps.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.closed = False
        self.errors = Errors()
        # Asking for the index starts the devices, after which no job can be joined.
        job = jax.distributed.is_initialized() and jax.process_count() > 1
        self._process = jax.process_index() if job else None
        # What each name is, as text: "float32[3]". Threads that trace add single names,
        # which needs no lock; the writer does not look at it.
        self._known: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._streams: dict[_Key, arrow.ArrowFile] = {}
        # The number of the next event, where the program gives none; it goes on behind
        # the steps that the run has from before.
        self._next_step: dict[tuple[Tapped, jax.Device | None], int] = {}
        self._first_step = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(folder, f".{self._process}" if self._process else "")
        try:
            with arrow.reading(folder):
                self._resume()
        except BaseException:  # Ctrl-C, too
            self._lock.close()
            raise
        super().__init__()

    def after_fork(self) -> None:
        """In a forked child, which has none of the threads: the run is the parent's."""
        self.closed = True

    def _resume(self) -> None:
        """Takes over the names, types and steps that the run has from before."""
        columns = self.folder / "columns"
        arrays = self.folder / "arrays"
        arrow.only_files(columns)
        arrow.only_files(arrays)
        for folder in (columns, *arrays.glob("*")):
            for path in arrow.paths(folder):
                self._resume_stream(path)

    def _resume_stream(self, path: Path) -> None:
        # Of the values of arrays nothing is read. Batches are those of this process
        # alone, and nobody else writes to these.
        schema, batches = arrow.read(path, mapped=True)
        if schema is None:
            return
        about = arrow.about(schema)
        if about.type:
            name = path.parent.name
            self._known[name] = about.type
            self.shapes[name] = about.whole
        else:
            for column in schema:
                dtype, shape = arrow.type_of(column.type)
                self._known[column.name] = text_of(dtype, shape)
        # Others of a job may record already. Each goes on behind its own steps.
        if about.process != (self._process or 0):
            return
        for batch in batches:
            newest = arrow.column(batch, "step").max(initial=-1)
            self._first_step = max(self._first_step, int(newest) + 1)

    def check(self, fields: Iterable[Field]) -> None:
        """Refuses a field whose type differs from what the run has under its name."""
        types: dict[str, str] = {}
        for field in fields:
            types |= field.types()
        # Looked at first, so that a call that is refused adds no name. What is added is
        # compared too: another thread may have added it meanwhile.
        for known_as in (self._known.get, self._known.setdefault):
            for name, text in types.items():
                known = known_as(name, text)
                if known != text:
                    raise unrecordable(
                        f"the column {name!r} of {self.folder} has the type {known},"
                        f" and is now recorded as {text}. Convert the value, or use"
                        " another name or folder"
                    )

    def write(self, deliveries: list[Events]) -> list[Path]:
        """Writes what came, one batch for each stream. Returns the stream of each new
        batch of the table.
        """
        batches: dict[_Key, list[arrow.Columns]] = {}
        for delivery in deliveries:
            steps = self._steps(delivery)
            for name, about, columns in delivery.tables(steps, self._process):
                folder = self.folder / (f"arrays/{name}" if name else "columns")
                types = tuple(
                    (column_name, column.dtype, column.shape[1:])
                    for column_name, column in columns.items()
                )
                batches.setdefault((folder, about, types), []).append(columns)
        written = []
        for key, parts in batches.items():
            folder, about, _ = key
            if key not in self._streams:
                self._streams[key] = arrow.ArrowFile(folder, about)
            stream = self._streams[key]
            stream.append(_joined(parts))
            if not about.type:
                written.append(stream.path)
        return written

    def close(self) -> None:
        self.closed = True
        self._lock.close()

    def _steps(self, delivery: Events) -> np.ndarray:
        """The step of each row; of each event, if the program gives none.

        Then they are a count for each device. A call's columns and arrays have the same
        numbers, since each is counted alone.
        """
        if delivery.code.step is not None:
            return delivery.rows_of(delivery.code.step)
        key = (delivery.code, delivery.current.device)
        begin = self._next_step.get(key, self._first_step)
        self._next_step[key] = begin + len(delivery)
        return np.arange(begin, begin + len(delivery))


def _joined(parts: list[arrow.Columns]) -> arrow.Columns:
    """The rows of all parts, which have the same columns."""
    if len(parts) == 1:  # as mostly: nothing is copied
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _locked(folder: Path, tail: str) -> BinaryIO:
    """The file that is locked as long as it is open. It is never written."""
    path = folder / f".lock{tail}"
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise arrow.foreign(path)
    file = open(path, "ab")  # noqa: SIM115 (kept open)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise failed(
            f"another recorder, of this or another process, writes to"
            f" {folder}. Close it, or use another folder"
        ) from error
    return file
