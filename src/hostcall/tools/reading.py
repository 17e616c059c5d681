"""`read`: a folder that a recorder wrote, while it is written, after it, or killed."""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from hostcall.errors import HostcallError, PackageError
from hostcall.tools._recorder import errors, stream
from hostcall.tools._recorder.arrays import PARTS, ArrayFile, blocks_of
from hostcall.tools._recorder.files import only_files


def read(folder: str | os.PathLike[str]) -> Run:
    """Opens a recorded run that is over, is running, or was killed.

    The run may come from somebody else: nothing in it is executed or unpickled, no link
    is followed, and a file that no recorder writes is an error.

    Raises:
        HostcallError: the folder has no run.
    """
    path = Path(folder)
    if not (path / ".lock").exists():
        raise HostcallError(
            f"hostcall: {path} has no run that a recorder wrote."
            f" hc.Recorder({str(path)!r}) makes one",
            code="hc-record",
        )
    return Run(path.absolute())


class Run:
    """A recorded run. Each method reads what is in the folder at that moment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def table(self) -> Any:
        """The columns as a pyarrow.Table, in the order in which they were delivered.

        Calls with different names are rows of their own, with nulls for the names that
        they lack. If the process was killed, a batch that it wrote in part is left out.
        """
        pa = PackageError.needed("pyarrow", "hc.tools.read", "hostcall[record]")
        with errors.reading(self.folder):
            only_files(self.folder, "columns")
            tables = []
            for path in stream.paths(self.folder):
                schema, batches = stream.read(path)
                if schema is not None:
                    table = pa.Table.from_batches(batches, schema)
                    _ = table.column_names  # a damaged file has names that are no text
                    tables.append(table)
            if not tables:
                return pa.table({})
            if len(tables) == 1:
                return tables[0]
            # The sort is stable: rows of one delivery, of one time, stay together.
            whole = pa.concat_tables(tables, promote_options="default")
            return whole.sort_by("time")

    def dataframe(self) -> Any:
        """The columns as a pandas.DataFrame. Small vectors are objects of NumPy."""
        PackageError.needed("pandas", "dataframe()", "hostcall[record]", "use table()")
        return self.table().to_pandas()

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Writes the columns to a Parquet file."""
        PackageError.needed(
            "pyarrow.parquet", "to_parquet()", "hostcall[record]"
        ).write_table(self.table(), path)

    @property
    def arrays(self) -> list[str]:
        """The names of the arrays in Zarr."""
        found = self.folder.glob("arrays*/*/have/zarr.json")
        return sorted({path.parent.parent.name for path in found})

    def zarr(self, name: str, process: int = 0) -> tuple[Any, Any]:
        """The zarr.Arrays (steps, values) of a name, which read what is asked for.

        They have the last entries even where these are not whole. If the run is of a
        job of several processes, they have the blocks of one.
        """
        zarr = PackageError.needed("zarr", "zarr()", "hostcall[record]", "use array()")
        with errors.reading(self.folder):
            group = self._groups(name).get(process)
            if group is None:
                raise HostcallError(
                    f"hostcall: process {process} has no array {name!r} in"
                    f" {self.folder}",
                    code="hc-record",
                )
            # zarr looks at no metadata in the folder, but gets what has been checked:
            # it would find other formats there, and run the codecs that they name.
            store = zarr.storage.LocalStore(group, read_only=True)
            steps, values = (
                zarr.Array.from_dict(
                    zarr.storage.StorePath(store, part),
                    ArrayFile.open(group / part).meta,
                )
                for part in ("step", "value")
            )
            return steps, values

    def array(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The steps and values of a name in memory, without unfinished entries.

        The blocks that the processes of a job wrote are put together by their steps.
        """
        with errors.reading(self.folder):
            return self._array(name)

    def _array(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        parts = [_Part(group) for group in self._groups(name).values()]
        if len(parts) == 1:
            (part,) = parts
            whole = part.have >= part.size
            return part.steps[whole], part.values[whole]
        places: dict[tuple[int, int], int] = {}
        for part in parts:
            for key in part.entries():
                places.setdefault(key, len(places))
        first = parts[0]
        out = np.full(
            (len(places), *first.values.shape[1:]), first.fill, first.values.dtype
        )
        have = np.zeros(len(places), np.int64)
        for part in parts:
            at = np.array([places[key] for key in part.entries()], int)
            have[at] += part.have
            for block in part.blocks:
                out[at, *block] = part.values[:, *block]
        whole = have >= parts[0].size
        steps = np.array([step for step, _ in places], np.int64)
        return steps[whole], out[whole]

    def _groups(self, name: str) -> dict[int, Path]:
        """The folder of each process that has a name."""
        found = {
            int(path.name.partition(".")[2] or 0): path / name
            for path in self.folder.glob("arrays*")
            if (path / name / "have" / "zarr.json").exists()
        }
        if not found:
            raise HostcallError(
                f"hostcall: {self.folder} has no array {name!r}. It has: "
                + (", ".join(self.arrays) or "none"),
                code="hc-record",
            )
        for group in found.values():
            only_files(self.folder, group.parent.name, name)
        return dict(sorted(found.items()))


class _Part:
    """What one process recorded of an array."""

    def __init__(self, group: Path) -> None:
        value, step, have = (ArrayFile.open(group / part) for part in PARTS)
        if step.shape or have.shape:
            raise ValueError(f"no recorder wrote {group}")
        steps, counts = step.read(), have.read()
        count = min(len(steps), len(counts), value.length)
        self.steps, self.have = steps[:count], counts[:count]
        self.values, self.fill = value.read(count), value.fill
        self.size = math.prod(value.shape)
        self.blocks: list[Any] = [
            tuple(slice(*corners) for corners in block) for block in blocks_of(group)
        ]

    def entries(self) -> list[tuple[int, int]]:
        """Names of the entries that all processes agree on: the nth of a step."""
        seen: Counter[int] = Counter()
        found = []
        for step in self.steps.tolist():
            found.append((step, seen[step]))
            seen[step] += 1
        return found
