"""Arrays that grow by an entry a call: pairs of files, in a folder for each name.

    arrays/<name>/0.npy      (blocks, *shape of a block), in the order they came in
    arrays/<name>/0.arrows   of each block: its step, time, and corner in the entry

A block is a whole entry, or the part of it that a device or a process holds. A pair has
the blocks of one shape from one recorder in one process, and is only appended to; so
nothing has to be known of blocks that come late, or never. They are put together where
they are read: the nth block of a step at a corner belongs to the nth entry of the step.

What a killed process leaves: blocks are written before their number in the head of the
.npy, and that before their rows in the stream. So each file is whole for other readers,
and there are at least as many blocks as rows.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hostcall.tools._recorder import stream as streams

# How many blocks an entry may have that somebody else wrote: each is that of a device.
MOST_BLOCKS = 1 << 16


class Blocks(streams.ArrowFile):
    """A stream of blocks, the column "value", which has a file of its own."""

    def __init__(self, folder: Path, about: streams.About) -> None:
        super().__init__(folder, about)
        self._blocks = self.path.with_suffix(".npy")
        open(self._blocks, "xb").close()
        self._count = 0

    def append(self, columns: dict[str, np.ndarray]) -> int:
        values = np.ascontiguousarray(columns.pop("value"))
        head = _head(values, self._count)
        with open(self._blocks, "r+b") as file:
            file.seek(len(head) + self._count * values[0].nbytes)
            file.write(values)
            self._count += len(values)
            file.seek(0)
            file.write(_head(values, self._count))
        return super().append(columns)


def _head(values: np.ndarray, count: int) -> bytes:
    """The head of an .npy with so many blocks. NumPy leaves room for the count."""
    out = io.BytesIO()
    about = np.lib.format.header_data_from_array_1_0(values)
    about["shape"] = (count, *values.shape[1:])
    np.lib.format.write_array_header_1_0(out, about)
    return out.getvalue()


@dataclass
class _Read:
    """What is in a pair of files.

    Attributes:
        about: what the stream's schema says.
        steps, times, corners, values: one for each block.
    """

    about: streams.About
    steps: np.ndarray
    times: np.ndarray
    corners: np.ndarray
    values: np.ndarray

    @property
    def block(self) -> tuple[int, ...]:
        return self.values.shape[1:]


def read(folder: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """The steps and values of an array, without entries that lack blocks; None if
    there is none.

    Raises:
        ValueError: no recorder wrote it.
    """
    pairs = [pair for path in streams.paths(folder) if (pair := _pair(path))]
    if not pairs:
        return None
    if len(pairs) == 1 and pairs[0].block == pairs[0].about.whole:
        return pairs[0].steps, pairs[0].values
    times, steps, values = _joined(pairs)
    order = np.argsort(times, kind="stable")
    return steps[order], values[order]


def _pair(path: Path) -> _Read | None:
    """What is in a pair of files; None if no row of it was written."""
    schema, found = streams.read(path)
    batches = list(found)
    if not batches:
        return None
    about = streams.about(schema)
    steps, times, corners = (
        np.concatenate([streams.column(batch, name) for batch in batches])
        for name in ("step", "time", "at")
    )
    with open(path.with_suffix(".npy"), "rb") as file:
        values = np.lib.format.read_array(file, allow_pickle=False)
    block = values.shape[1:]
    fits = (
        values.dtype.kind in "biufc"
        and steps.dtype.kind == corners.dtype.kind == "i"
        and steps.ndim == times.ndim == 1
        and corners.shape[1:] == (len(about.whole),) == (len(block),)
        and math.prod(about.whole) <= MOST_BLOCKS * math.prod(block)
        and (corners >= 0).all()
        and (corners <= np.subtract(about.whole, block)).all()
    )
    if not fits:
        raise ValueError(f"no recorder wrote {path}")
    count = min(len(steps), len(values))
    return _Read(about, *(all[:count] for all in (steps, times, corners, values)))


def _joined(pairs: list[_Read]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The times, steps and values of the entries that these blocks are parts of."""
    numbers, steps = _entries(pairs)
    size = math.prod(pairs[0].about.whole)
    have, times = np.zeros(len(steps), np.int64), np.full(len(steps), np.inf)
    for pair, at in zip(pairs, numbers, strict=True):
        np.add.at(have, at, size if pair.about.sparse else math.prod(pair.block))
        np.minimum.at(times, at, pair.times)
    whole = have >= size
    place = np.cumsum(whole) - 1
    dtype = pairs[0].values.dtype
    fill = np.nan if dtype.kind in "fc" else 0
    values = np.full((whole.sum(), *pairs[0].about.whole), fill, dtype)
    for pair, at in zip(pairs, numbers, strict=True):
        for corner in np.unique(pair.corners, axis=0):
            mine = (pair.corners == corner).all(axis=1) & whole[at]
            inside = map(slice, corner, corner + pair.block)
            values[place[at[mine]], *inside] = pair.values[mine]
    return times[whole], steps[whole], values


def _entries(pairs: list[_Read]) -> tuple[list[np.ndarray], np.ndarray]:
    """The number of the entry of each block, for each pair, and the entries' steps."""
    # What the processes of a job agree on is "the nth entry of this step".
    entries: dict[tuple[int, int], int] = {}
    ranks: Counter[tuple[int, int]] = Counter()
    numbers = []
    for pair in pairs:
        seen: Counter[tuple[int, ...]] = Counter()
        mine: dict[tuple[int, int], int] = {}
        at = []
        for step, *corner in np.c_[pair.steps, pair.corners].tolist():
            seen[step, *corner] += 1
            nth = (step, seen[step, *corner])
            if nth not in mine:
                ranks[pair.about.process, step] += 1
                key = (step, ranks[pair.about.process, step])
                mine[nth] = entries.setdefault(key, len(entries))
            at.append(mine[nth])
        numbers.append(np.array(at, np.int64))
    return numbers, np.array([step for step, _ in entries], np.int64)
