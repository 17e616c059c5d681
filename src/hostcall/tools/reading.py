"""`read`: a folder that a recorder wrote, while it is written, after it, or killed.

Arrays grow by an entry a call. A row of an array's stream is a block with its step, its
time, and its corner in the entry (`at`). A block is a whole entry, or the part of it
that a device or a process holds. A stream has the blocks of one shape from one recorder
in one process, and is only appended to; so nothing has to be known of blocks that come
late, or never. They are put together here: the nth block of a step at a corner belongs
to the nth entry of the step.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hostcall.errors import PackageError
from hostcall.tools._recorder import arrow
from hostcall.tools._values import failed

if TYPE_CHECKING:
    import pandas
    import pyarrow


def read(folder: str | os.PathLike[str]) -> Run:
    """Opens a recorded run that is over, is running, or was killed.

    The run may come from somebody else: nothing in it is executed or unpickled, no link
    is followed, and a file that no recorder writes is an error.

    Raises:
        HostcallError: the folder has no run.
    """
    path = Path(folder)
    if not (path / ".lock").exists():
        raise failed(
            f"{path} has no run that a recorder wrote."
            f" hc.Recorder({str(path)!r}) makes one"
        )
    return Run(path.absolute())


class Run:
    """A recorded run. Each method reads what is in the folder at that moment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def table(self) -> pyarrow.Table:
        """The columns as a pyarrow.Table, in the order in which they were delivered.

        Calls with different names are rows of their own, with nulls for the names that
        they lack. If the process was killed, a batch that it wrote in part is left out.
        """
        pa = PackageError.needed("pyarrow", "hc.tools.read", "hostcall[record]")
        with arrow.reading(self.folder):
            arrow.only_files(self.folder / "columns")
            tables = []
            for path in arrow.paths(self.folder / "columns"):
                schema, batches = arrow.read(path)
                if schema is not None:
                    tables.append(pa.Table.from_batches(batches, schema))
            if not tables:
                return pa.table({})
            whole = pa.concat_tables(tables, promote_options="default")
            _ = whole.column_names  # a damaged file has names that are no text
            # The sort is stable: rows of one delivery, of one time, stay together.
            return whole.sort_by("time") if len(tables) > 1 else whole

    def dataframe(self) -> pandas.DataFrame:
        """The columns as a pandas.DataFrame. Small vectors are objects of NumPy."""
        PackageError.needed("pandas", "dataframe()", "hostcall[record]", "use table()")
        return self.table().to_pandas()

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Writes the columns to a Parquet file."""
        pq = PackageError.needed("pyarrow.parquet", "to_parquet()", "hostcall[record]")
        pq.write_table(self.table(), path)

    @property
    def arrays(self) -> list[str]:
        """The names of the arrays."""
        with arrow.reading(self.folder):
            arrow.only_files(self.folder / "arrays")
            found = self.folder.glob("arrays/*/*.arrows")
            return sorted({path.parent.name for path in found if path.stat().st_size})

    def array(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The steps and values of a name in memory, without unfinished entries.

        Blocks that devices and processes wrote are put together by their steps.
        pyarrow can map the file of one that does not fit into memory (the page
        "Recording a program" shows it).
        """
        with arrow.reading(self.folder):
            names = self.arrays
            below = self.folder / "arrays" / name
            paths = arrow.paths(below) if name in names else []
            parts = [part for path in paths if (part := _blocks(path))]
            if paths and not parts:
                raise failed(f"{below} was cut off before its first whole entry")
            if not parts:
                raise failed(
                    f"{self.folder} has no array {name!r}. It has: "
                    + (", ".join(names) or "none")
                )
            if len(parts) == 1 and parts[0].shape == parts[0].about.whole:
                return parts[0].steps, parts[0].values
            return _joined(parts)


# --- Arrays ---------------------------------------------------------------------------

# How many blocks an entry may have that somebody else wrote: each is that of a device.
_MOST_BLOCKS = 1 << 16


@dataclass
class _Blocks:
    """What is in a stream: what its schema says, and an element for each block."""

    about: arrow.About
    steps: np.ndarray
    times: np.ndarray
    corners: np.ndarray
    values: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape[1:]


def _blocks(path: Path) -> _Blocks | None:
    """What is in a stream; None if no row of it was written."""
    schema, batches = arrow.read(path)
    if schema is None:
        return None
    columns = _room_for(schema, path.stat().st_size)
    count = 0
    for batch in batches:
        begin = count
        count = count + len(batch)
        if count > len(columns["step"]):  # written meanwhile
            count = begin
            break
        for name in schema.names:
            columns[name][begin:count] = arrow.column(batch, name)
    if not count:
        return None
    about = arrow.about(schema)
    steps, times, corners, values = (
        columns[name][:count] for name in ("step", "time", "at", "value")
    )
    block = values.shape[1:]
    fits = (
        steps.dtype.kind == corners.dtype.kind == "i"
        and steps.ndim == times.ndim == 1
        and corners.shape[1:] == (len(about.whole),) == (len(block),)
        and math.prod(about.whole) <= _MOST_BLOCKS * math.prod(block)
        and (corners >= 0).all()
        and (corners <= np.subtract(about.whole, block)).all()
    )
    if not fits:
        raise ValueError(f"no recorder wrote {path}")
    return _Blocks(about, steps, times, corners, values)


def _room_for(schema: pyarrow.Schema, size: int) -> arrow.Columns:
    """Arrays for the columns, with as many rows as so many bytes can have. What is not
    filled takes no memory. Those of complex numbers are parts of "value".
    """
    types = {column.name: arrow.type_of(column.type) for column in schema}
    bits_of_row = 0
    for dtype, shape in types.values():
        bits = 1 if dtype.kind == "b" else 8 * dtype.itemsize  # Arrow packs bools
        bits_of_row += bits * math.prod(shape)
    rows = 8 * size // max(bits_of_row, 1)
    columns: arrow.Columns = {}
    for name, (dtype, shape) in types.items():
        columns[name] = np.empty((rows, *shape), dtype)
    if "value.real" in columns:
        kind = np.result_type(columns["value.real"], 1j)
        value = np.empty(columns["value.real"].shape, kind)
        columns |= {"value": value, "value.real": value.real, "value.imag": value.imag}
    return columns


def _joined(parts: list[_Blocks]) -> tuple[np.ndarray, np.ndarray]:
    """The steps and values of the entries that these blocks are parts of, in time.

    Left out are entries of which a block has not come so far. Where blocks may never
    come (`sparse`), what is missing is NaN or 0.
    """
    entries_of_parts, steps = _entries(parts)
    about = parts[0].about
    size = math.prod(about.whole)
    elements = np.zeros(len(steps), np.int64)  # that each entry has so far
    times = np.full(len(steps), np.inf)  # of its first block
    for part, entries in zip(parts, entries_of_parts, strict=True):
        n = size if part.about.sparse else math.prod(part.shape)
        # `at`: several blocks of a part may be of one entry.
        np.add.at(elements, entries, n)
        np.minimum.at(times, entries, part.times)
    is_complete = elements >= size
    row_of_entry = np.cumsum(is_complete) - 1  # of a complete one, among these
    dtype = parts[0].values.dtype
    fill = np.nan if dtype.kind in "fc" else 0
    values = np.full((is_complete.sum(), *about.whole), fill, dtype)
    for part, entries in zip(parts, entries_of_parts, strict=True):
        for corner in np.unique(part.corners, axis=0):
            is_there = (part.corners == corner).all(axis=1)
            chosen = is_there & is_complete[entries]
            rows = row_of_entry[entries[chosen]]
            box = map(slice, corner, corner + part.shape)
            values[rows, *box] = part.values[chosen]
    order = np.argsort(times[is_complete], kind="stable")
    return steps[is_complete][order], values[order]


def _entries(parts: list[_Blocks]) -> tuple[list[np.ndarray], np.ndarray]:
    """The number of the entry of each block of each stream, and the entries' steps.

    What the processes of a job agree on is "the nth entry of this step". So an entry is
    found by its step and its rank among the entries of the step in one process:

        a stream's blocks (step, corner)     (5, 0)  (5, 4)  (5, 0)  (5, 4)
        how often it has come in the stream       1       1       2       2
        entry (step, rank)                   (5, 1)  (5, 1)  (5, 2)  (5, 2)
    """
    entries: dict[tuple[int, int], int] = {}
    ranks: Counter[tuple[int, int]] = Counter()  # by process and step
    numbers = []
    for part in parts:
        turns: Counter[tuple[int, ...]] = Counter()  # by step and corner
        entry_of_turn: dict[tuple[int, int], int] = {}
        of_blocks = []
        for step, *corner in np.c_[part.steps, part.corners].tolist():
            turns[step, *corner] += 1
            turn = (step, turns[step, *corner])
            if turn not in entry_of_turn:
                ranks[part.about.process, step] += 1
                entry = (step, ranks[part.about.process, step])
                entry_of_turn[turn] = entries.setdefault(entry, len(entries))
            of_blocks.append(entry_of_turn[turn])
        numbers.append(np.array(of_blocks, np.int64))
    return numbers, np.array([step for step, _ in entries], np.int64)
