"""A run's folder, as its one writer in this process sees it.

    run/.lock            locked while a recorder is open, also against other processes
    run/columns/0.arrows Arrow IPC streams (stream.py)
    run/arrays/loss/     Zarr arrays, one group a name (arrays.py)

The processes of one job share the folder: process 1 has `.lock.1` and `arrays.1`.

A name has one type in all streams, so that they can be read as one table. Types are
checked where a program is traced (`check`), and the writer's thread does the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hostcall.errors import HostcallError, SpecError
from hostcall.tools._recorder import errors
from hostcall.tools._recorder import stream as streams
from hostcall.tools._recorder.arrays import ArrayFile, Recorded
from hostcall.tools._recorder.delivery import Columns, Delivery
from hostcall.tools._recorder.fields import Field, text_of
from hostcall.tools._recorder.files import lock, only_files

_Key = tuple[tuple[str, str], ...]  # columns with their types


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Asking for the index starts the devices, after which no job can be joined.
        job = jax.distributed.is_initialized() and jax.process_count() > 1
        self._process = jax.process_index() if job else None
        tail = f".{self._process}" if self._process else ""
        self._arrays_folder = folder / f"arrays{tail}"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = lock(folder / f".lock{tail}")
        except BlockingIOError as error:
            raise HostcallError(
                f"hostcall: another recorder, of this or another process, writes to"
                f" {folder}. Close it, or use another folder",
                code="hc-record",
            ) from error
        # What each name is, as text: "float32[3]". Written by threads that trace, under
        # the recorder's lock; the writer does not look at it.
        self._known: dict[str, str] = {}
        # The shape of an entry of each array, for the worker of taps (delivery.py).
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._streams: dict[_Key, streams.Stream] = {}
        self._arrays: dict[str, Recorded] = {}
        self._next_step: dict[Any, int] = {}
        self._first_step = 0
        try:
            with errors.reading(folder):
                self._resume()
        except BaseException:  # Ctrl-C, too
            self._lock.close()
            raise

    def _resume(self) -> None:
        only_files(self.folder, "columns")
        only_files(self.folder, self._arrays_folder.name)
        for path in streams.paths(self.folder):
            schema, batches = streams.read(path)
            for batch in batches:
                if batch.num_rows:
                    top = streams.column(batch, "step").max()
                    self._first_step = max(self._first_step, int(top) + 1)
            for column in schema or ():
                self._known[column.name] = text_of(*streams.type_of(column.type))
        for path in self._arrays_folder.glob("*/have/zarr.json"):
            group = path.parent.parent
            value = ArrayFile.open(group / "value")
            own = zip(value.shape, value.names[1:], strict=True)
            shape = [size for size, axis in own if axis is None]
            self._known[group.name] = f"an array of {text_of(value.dtype, shape)}"
            self.shapes[group.name] = value.shape
            self._first_step = max(self._first_step, value.length)

    def check(self, fields: Iterable[Field]) -> None:
        """Refuses a field whose type differs from what the run has under its name."""
        new = {name: text for f in fields for name, text in f.types().items()}
        for name, text in new.items():
            known = self._known.get(name, text)
            if known != text:
                raise SpecError(
                    f"hostcall: the column {name!r} of {self.folder} has the type"
                    f" {known}, and is now recorded as {text}. Convert the value, or"
                    " use another name or folder",
                    code="hc-record",
                )
        self._known.update(new)

    def write(self, deliveries: list[Delivery]) -> list[tuple[streams.Stream, int]]:
        """Writes what came. Returns each new batch: its stream, and where it begins."""
        parts: dict[_Key, list[Columns]] = {}
        for delivery in deliveries:
            steps = self._steps(delivery)
            if delivery.place.has_arrays:
                self._write_arrays(delivery, steps)
            if delivery.place.has_columns:
                columns = delivery.columns(steps, self._process)
                key = tuple((n, f"{c.dtype}{c.shape[1:]}") for n, c in columns.items())
                parts.setdefault(key, []).append(columns)
        for array in self._arrays.values():
            array.flush()
        written = []
        for key, batches in parts.items():
            whole = {n: np.concatenate([b[n] for b in batches]) for n, _ in key}
            if key not in self._streams:
                self._streams[key] = streams.Stream(self.folder)
            stream = self._streams[key]
            written.append((stream, stream.append(whole)))
        return written

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._lock.close()

    def _steps(self, delivery: Delivery) -> np.ndarray:
        """The step of each row; of each event, if the program gives none.

        Then they are a count for each device. A call's columns and arrays have the same
        numbers, since each is counted alone.
        """
        if "step" in delivery.place.names:
            return delivery.rows_of(delivery.place.names.index("step"))
        key = (delivery.place, delivery.here.device)
        begin = self._next_step.get(key, self._first_step)
        self._next_step[key] = begin + delivery.events
        return np.arange(begin, begin + delivery.events)

    def _write_arrays(self, delivery: Delivery, steps: np.ndarray) -> None:
        steps = steps[:: len(steps) // delivery.events]  # rows of an event have one
        for number, field in enumerate(delivery.place.fields):
            if field.kind != "array":
                continue
            if field.name not in self._arrays:
                folder = self._arrays_folder / field.name
                self._arrays[field.name] = Recorded(folder)
            block = delivery.block(number)
            values = delivery.values[number].astype(field.dtype, copy=False)
            self._arrays[field.name].write(
                steps,
                values.reshape(len(values), *block.shape),
                block,
                # In shard_map `where` may pick some shards, so others may never come.
                at_once=delivery.here.index is None,
            )
