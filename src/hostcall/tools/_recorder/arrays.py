"""Zarr v3 arrays that grow along their first axis, a group for each recorded name.

    arrays/<name>/value    (entries, *axes of vmaps or of a mesh, *shape)
    arrays/<name>/step     the step of each entry
    arrays/<name>/have     how many elements of each entry have come

They are written here, not by the package `zarr`: its thread pool refuses work when the
interpreter ends, where a recorder that nobody closed writes its rest, and each write
costs it milliseconds. Chunks are not compressed, so an array is a `zarr.json` and plain
files that are written in place.

What a killed process leaves: an entry's values are written before its step, that before
its number of elements, and the lengths of the arrays after all of them. A reader takes
as many entries as all three have, and leaves out those that lack elements.

Each process of a job writes groups of its own, with the blocks of its devices. Their
attribute "blocks" says which these are, so that a reader can put them together.

A run may come from somebody else. So a `zarr.json` is taken only if it is, word for
word, what this module writes for an array of that shape, dtype and chunk: no other
format of Zarr's, codec or dtype is ever looked at, and none can run code.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hostcall.tools._recorder.delivery import Block
from hostcall.tools._recorder.files import replace_file, write_into

# A chunk has so many entries that it takes about so many bytes.
CHUNK_BYTES = 1 << 20
MOST_ENTRIES = 4096
MOST_CHUNKS = 1 << 16  # of an entry: each is the block of a device
# In shard_map, steps that wait for blocks of other shards, and entries of one step that
# do. Older ones are taken to get none: where= may leave out a shard.
MOST_OPEN = 1 << 16
MOST_OF_A_STEP = 256

PARTS = ("value", "step", "have")
NUMBER = Block((), (), (), ())
# The dtypes that fields.py stores, and the fill values that `Recorded` gives them.
_NAMES = ("bool", "float16", "float32", "float64", "complex64", "complex128")
_DTYPES = {*_NAMES, *(f"{kind}{8 << n}" for kind in ("int", "uint") for n in range(4))}
_FILLS: dict[str, Any] = {
    **dict.fromkeys(("false", "0", "0.0", "[0.0, 0.0]"), 0),
    '"NaN"': math.nan,
    '["NaN", "NaN"]': complex(math.nan, math.nan),
}
Slices = tuple[slice, ...]


class ArrayFile:
    """One Zarr array in a folder."""

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        self._folder = folder
        self.meta = meta
        self.length: int = meta["shape"][0]
        self.shape = tuple(meta["shape"][1:])
        self.names = tuple(meta["dimension_names"])
        grid = meta["chunk_grid"]["configuration"]
        self._chunk: tuple[int, ...] = tuple(grid["chunk_shape"])
        self.dtype = np.dtype(meta["data_type"])
        self.fill = _FILLS[json.dumps(meta["fill_value"])]

    @classmethod
    def open(cls, folder: Path) -> ArrayFile:
        """Opens an array that a recorder wrote.

        Raises:
            ValueError: something else wrote it.
        """
        meta = json.loads((folder / "zarr.json").read_text())
        chunk = meta["chunk_grid"]["configuration"]["chunk_shape"]
        given = (meta["shape"], meta["data_type"], chunk, meta["fill_value"])
        names = meta["dimension_names"]
        own = zip(given[0][1:], chunk[1:], strict=True)  # looked at if lengths agree
        fits = (
            all(type(n) is int and n >= 0 for n in given[0])
            and all(type(n) is int and n > 0 for n in chunk)
            and len(given[0]) == len(chunk) == len(names) > 0
            and given[1] in _DTYPES
            and json.dumps(given[3]) in _FILLS
            and all(name is None or type(name) is str for name in names)
            and math.prod(-(-n // of) for n, of in own) <= MOST_CHUNKS
        )
        # Compared as text, since 1 == 1.0 == True.
        if not fits or json.dumps(meta) != json.dumps(_meta(*given, names)):
            raise ValueError(f"no recorder wrote {folder / 'zarr.json'}")
        return cls(folder, meta)

    @classmethod
    def create(
        cls,
        folder: Path,
        dtype: np.dtype[Any],
        fill: Any,
        block: Block,
    ) -> ArrayFile:
        """Creates an array of length 0, whose entries have such blocks."""
        entries = CHUNK_BYTES // (math.prod(block.shape) * dtype.itemsize)
        chunk = [min(max(entries, 1), MOST_ENTRIES), *block.shape]
        names = ["step", *block.names]
        found = cls(folder, _meta([0, *block.whole], dtype.name, chunk, fill, names))
        found.flush()
        return found

    def read(self, most: int | None = None) -> np.ndarray:
        """The first `most` entries in memory. Where no block came, they have the fill
        value.
        """
        top, chunk = self._folder / "c", self._chunk
        size = math.prod(chunk) * self.dtype.itemsize
        # The files that there are, not those that the shape promises: a forged length
        # must not make this look for 10^12 of them.
        found = {
            tuple(map(int, path.relative_to(top).parts)): path
            for path in top.rglob("[0-9]*")
            if not path.is_dir()
        }
        length = self.length if most is None else min(most, self.length)
        if not self.shape:  # a number for each entry, and each was written
            length = min(length, len(found) * chunk[0])
        out = np.zeros((length, *self.shape), self.dtype)  # takes no memory yet
        if self.fill:
            out[...] = self.fill
        for key, path in found.items():
            if path.stat().st_size != size:
                raise ValueError(f"{path} should have {size} bytes")
            begin = [slice(k * n, k * n + n) for k, n in zip(key, chunk, strict=True)]
            into = out[tuple(begin)]
            if into.size:
                data = np.fromfile(path, self.dtype.newbyteorder("<")).reshape(chunk)
                into[...] = data[tuple(slice(n) for n in into.shape)]
        return out

    def write(self, at: int, part: Slices, values: np.ndarray) -> None:
        """Writes a part of the entries from `at` on, one for each of `values`."""
        self.length = max(self.length, at + len(values))
        whole = (slice(at, at + len(values)), *part)
        values = values.astype(self.dtype.newbyteorder("<"), copy=False)
        for key, inside, outside in _overlaps(whole, self._chunk):
            path = self._folder.joinpath("c", *map(str, key))
            data, begin = values[outside], inside[0].start
            if data.shape == self._chunk:
                replace_file(path, np.ascontiguousarray(data))
                continue
            if not path.exists():
                replace_file(path, np.full(self._chunk, self.fill, data.dtype))
            if data.shape[1:] != self._chunk[1:]:  # a block of another sharding
                old = np.fromfile(path, data.dtype).reshape(self._chunk)
                old[inside] = data
                data, begin = old, 0
            size = math.prod(self._chunk[1:]) * self.dtype.itemsize
            write_into(path, begin * size, np.ascontiguousarray(data))

    def flush(self) -> None:
        """Tells readers the length."""
        new = [self.length, *self.shape]
        if self.meta["shape"] != new or not self.length:
            self.meta["shape"] = new
            path = self._folder / "zarr.json"
            replace_file(path, json.dumps(self.meta, indent=1).encode())

    def cut(self, length: int) -> None:
        """Forgets what lies behind an entry: another process was killed there."""
        for path in (self._folder / "c").rglob("*"):
            if path.is_file():
                first = int(path.relative_to(self._folder / "c").parts[0])
                left = length - first * self._chunk[0]
                if left <= 0:
                    path.unlink()
                elif left < self._chunk[0]:
                    found = np.fromfile(path, self.dtype.newbyteorder("<"))
                    found.reshape(self._chunk)[left:] = self.fill
                    replace_file(path, found)
        self.length = length


def _meta(
    shape: list[int], dtype: str, chunk: list[int], fill: Any, names: list[Any]
) -> dict[str, Any]:
    """The `zarr.json` of an array."""
    single = np.dtype(dtype).itemsize == 1
    order = {} if single else {"configuration": {"endian": "little"}}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": fill,
        "codecs": [{"name": "bytes", **order}],
        "attributes": {},
        "dimension_names": names,
    }


def blocks_of(folder: Path) -> list[list[list[int]]]:
    """The blocks that a process wrote of each entry, by their corners."""
    told = json.loads((folder / "zarr.json").read_text())
    blocks: list[list[list[int]]] = told["attributes"]["blocks"]
    for begin, end in (corners for block in blocks for corners in block):
        if not (type(begin) is type(end) is int and 0 <= begin <= end):
            raise ValueError(f"no recorder wrote {folder / 'zarr.json'}")
    return blocks


class Recorded:
    """The arrays of one name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[ArrayFile] = []  # value, step, have
        self._blocks: list[list[list[int]]] = []
        # For each step the entries that lack blocks: (entry, first corners of blocks
        # that came, elements that came).
        self._open: dict[int, list[tuple[int, set[Any], list[int]]]] = {}
        self._next = 0
        if (folder / "have" / "zarr.json").exists():
            self._files = [ArrayFile.open(folder / part) for part in PARTS]
            self._blocks = blocks_of(folder)
            self._next = min(file.length for file in self._files)
            for file in self._files:
                file.cut(self._next)

    def write(
        self, steps: np.ndarray, values: np.ndarray, block: Block, *, at_once: bool
    ) -> None:
        """Appends entries, or blocks of them.

        Args:
            steps: their numbers.
            values: the block's values in each of them.
            block: where they lie in the entry.
            at_once: an entry is there when its first block is, since others may not
                come.
        """
        corners = [[part.start, part.stop] for part in block.at]
        if not self._files:
            self._create(values.dtype, block)
        if corners not in self._blocks:
            self._blocks.append(corners)
            self._write_group()
        size, whole = math.prod(block.shape), math.prod(block.whole)
        if size == whole:
            entries = [(self._next + n, whole) for n in range(len(steps))]
            self._next += len(steps)
        else:
            corner = tuple(begin for begin, _ in corners)
            entries = [
                self._entry(int(step), corner, size, whole, at_once) for step in steps
            ]
        have = np.array([count for _, count in entries], np.int64)
        begin = 0
        for end in range(1, len(entries) + 1):  # each run of entries is one write
            if end == len(entries) or entries[end][0] != entries[end - 1][0] + 1:
                at, run = entries[begin][0], slice(begin, end)
                value_file, step_file, have_file = self._files
                value_file.write(at, block.at, values[run])
                step_file.write(at, (), steps[run])
                have_file.write(at, (), have[run])
                begin = end

    def flush(self) -> None:
        for file in self._files:
            file.flush()

    def _create(self, dtype: np.dtype[Any], block: Block) -> None:
        """Makes the arrays. A chunk has one block, so no two devices share a file."""
        fill: Any = [0.0, 0.0] if dtype.kind == "c" else dtype.type(0).item()
        if block.shape != block.whole and dtype.kind in "fc":
            fill = ["NaN", "NaN"] if dtype.kind == "c" else "NaN"
        self._write_group()
        value, step, have = (self._folder / part for part in PARTS)
        self._files = [
            ArrayFile.create(value, dtype, fill, block),
            ArrayFile.create(step, np.dtype(np.int64), 0, NUMBER),
            ArrayFile.create(have, np.dtype(np.int64), 0, NUMBER),
        ]

    def _write_group(self) -> None:
        group = {
            "zarr_format": 3,
            "node_type": "group",
            "attributes": {"blocks": self._blocks},
        }
        replace_file(self._folder / "zarr.json", json.dumps(group).encode())

    def _entry(
        self, step: int, corner: Any, size: int, whole: int, at_once: bool
    ) -> tuple[int, int]:
        """The entry that a block belongs to, and how many elements it then has.

        A step may come twice. A block belongs to the first entry of its step that does
        not have it: blocks of one device come in order.
        """
        entries = self._open.setdefault(step, [])
        found = next((e for e in entries if corner not in e[1]), None)
        if found is None:
            found = (self._next, set(), [0])
            entries.append(found)
            self._next += 1
        at, seen, count = found
        seen.add(corner)
        count[0] += size
        if count[0] >= whole:
            entries.remove(found)
        elif at_once and len(entries) > MOST_OF_A_STEP:
            del entries[0]
        if not entries:
            del self._open[step]
        elif at_once and len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]
        return at, whole if at_once else count[0]


def _overlaps(
    whole: Slices, chunk: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], Slices, Slices]]:
    """Each chunk that a block overlaps: its key, the place in it, and in the block."""
    ranges = [
        range(part.start // size, (part.stop - 1) // size + 1)
        for part, size in zip(whole, chunk, strict=True)
    ]
    for key in itertools.product(*ranges):
        inside, outside = [], []
        for number, part, size in zip(key, whole, chunk, strict=True):
            begin = max(part.start, number * size)
            end = min(part.stop, (number + 1) * size)
            inside.append(slice(begin - number * size, end - number * size))
            outside.append(slice(begin - part.start, end - part.start))
        yield key, tuple(inside), tuple(outside)
