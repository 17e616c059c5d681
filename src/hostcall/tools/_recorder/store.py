"""A run's folder, as its one writer in this process sees it.

    run/.lock            locked while a recorder is open, also against other processes
    run/columns/0.arrows Arrow IPC streams (stream.py)
    run/arrays/loss/     arrays, a folder for each name (arrays.py)

The processes of one job share the folder; process 1 locks `.lock.1`.

A name has one type in all files, so that they can be read as one table. Types are
checked where a program is traced (`check`), and the writer's thread does the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np

from hostcall.errors import HostcallError
from hostcall.tools._recorder import stream as streams
from hostcall.tools._recorder.arrays import Blocks
from hostcall.tools._recorder.delivery import Columns, Events, Tapped
from hostcall.tools._recorder.fields import Field, text_of, wrong
from hostcall.tools._recorder.files import lock, only_files, reading

# The name of an array, or none for the table; and the columns with their types.
_Key = tuple[str, streams.About, tuple[tuple[str, str], ...]]


class RunFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Asking for the index starts the devices, after which no job can be joined.
        job = jax.distributed.is_initialized() and jax.process_count() > 1
        self._process = jax.process_index() if job else None
        tail = f".{self._process}" if self._process else ""
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = lock(folder / f".lock{tail}")
        except BlockingIOError as error:
            raise HostcallError(
                f"hostcall: another recorder, of this or another process, writes to"
                f" {folder}. Close it, or use another folder",
                code="hc-record",
            ) from error
        # What each name is, as text: "float32[3]". Threads that trace add single names,
        # which needs no lock; the writer does not look at it.
        self._known: dict[str, str] = {}
        # The shape of an entry of each array, for the worker of taps (delivery.py).
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._streams: dict[_Key, streams.ArrowFile] = {}
        self._next_step: dict[tuple[Tapped, jax.Device | None], int] = {}
        self._first_step = 0
        try:
            with reading(folder):
                self._resume()
        except BaseException:  # Ctrl-C, too
            self._lock.close()
            raise

    def _resume(self) -> None:
        only_files(self.folder / "columns")
        only_files(self.folder / "arrays")
        folders = [self.folder / "columns", *self.folder.glob("arrays/*")]
        for path in itertools.chain(*map(streams.paths, folders)):
            schema, batches = streams.read(path)
            if schema is None:
                continue
            about = streams.about(schema)
            if about.type:
                self._known[path.parent.name] = about.type
                self.shapes[path.parent.name] = about.whole
            else:
                for column in schema:
                    self._known[column.name] = text_of(*streams.type_of(column.type))
            # Others of a job may record already. Each goes on behind its own steps.
            for batch in batches if about.process == (self._process or 0) else ():
                top = streams.column(batch, "step").max(initial=-1)
                self._first_step = max(self._first_step, int(top) + 1)

    def check(self, fields: Iterable[Field]) -> None:
        """Refuses a field whose type differs from what the run has under its name."""
        new = {name: text for f in fields for name, text in f.types().items()}
        # Looked at first, so that a call that is refused adds no name.
        for known_as in (self._known.get, self._known.setdefault):
            for name, text in new.items():
                if (known := known_as(name, text)) != text:
                    raise wrong(
                        f"the column {name!r} of {self.folder} has the type {known},"
                        f" and is now recorded as {text}. Convert the value, or use"
                        " another name or folder"
                    )

    def write(self, deliveries: list[Events]) -> list[tuple[streams.ArrowFile, int]]:
        """Writes what came. Returns each new batch of the table: its stream, and where
        it begins.
        """
        parts: dict[_Key, list[Columns]] = {}
        for delivery in deliveries:
            steps = self._steps(delivery)
            for name, about, columns in delivery.tables(steps, self._process):
                types = [(n, f"{c.dtype}{c.shape[1:]}") for n, c in columns.items()]
                parts.setdefault((name, about, tuple(types)), []).append(columns)
        written = []
        for key, batches in parts.items():
            name, about, _ = key
            whole = {n: np.concatenate([b[n] for b in batches]) for n in batches[0]}
            if key not in self._streams:
                made = Blocks if name else streams.ArrowFile
                below = f"arrays/{name}" if name else "columns"
                self._streams[key] = made(self.folder / below, about)
            begin = self._streams[key].append(whole)
            if not name:
                written.append((self._streams[key], begin))
        return written

    def close(self) -> None:
        self._lock.close()

    def _steps(self, delivery: Events) -> np.ndarray:
        """The step of each row; of each event, if the program gives none.

        Then they are a count for each device. A call's columns and arrays have the same
        numbers, since each is counted alone.
        """
        if delivery.code.step is not None:
            return delivery.rows_of(delivery.code.step)
        key = (delivery.code, delivery.here.device)
        begin = self._next_step.get(key, self._first_step)
        self._next_step[key] = begin + delivery.events
        return np.arange(begin, begin + delivery.events)
