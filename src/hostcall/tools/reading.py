"""`read`: a folder that a recorder wrote, while it is written, after it, or killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hostcall.errors import HostcallError, PackageError
from hostcall.tools._recorder import arrays, arrow

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
            names, below = self.arrays, self.folder / "arrays" / name
            found = arrays.read(below) if name in names else None
            if found is None:
                raise HostcallError(
                    f"hostcall: {self.folder} has no array {name!r}. It has: "
                    + (", ".join(names) or "none"),
                    code="hc-record",
                )
            return found
