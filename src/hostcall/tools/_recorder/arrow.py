"""Arrow IPC streams in files: a schema, then batches of columns.

    run/columns/0.arrows       rows of the table
    run/arrays/<name>/0.arrows blocks of an array (reading.py)

Each stream has a file of its own, which nobody appends to later: a recorder that
resumes a run begins new files, and so does each process of a job. A process that is
killed leaves whole messages, and perhaps a part of one at the end, which readers leave
out. The columns of a batch are arrays of shape (rows, *shape) here.

Somebody else may have made the folder. A link in it could lead a recorder, or a reader,
to any file of the user's, and a named pipe would never end. A recorder makes neither,
so neither is opened: a folder is looked through before its files are read, and a
recorder writes only to files that it has made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hostcall.errors import HostcallError, PackageError
from hostcall.tools._values import failed

if TYPE_CHECKING:
    import pyarrow

Columns = dict[str, np.ndarray]

_BEGIN = b"\xff" * 4  # of each message


@dataclasses.dataclass(frozen=True)
class About:
    """What the schema of a stream says beside the columns.

    Attributes:
        process: which one of a job wrote it.
        type: of an array whose blocks it has (reading.py), as in `Field.types`.
        whole: the shape of an entry of that array.
        sparse: whether blocks of an entry may never come.
    """

    process: int
    type: str = ""
    whole: tuple[int, ...] = ()
    sparse: bool = False


def about(schema: pyarrow.Schema) -> About:
    """Raises an error of some kind if no recorder wrote the schema."""
    as_json = json.loads(schema.metadata[b"hostcall"])
    about_file = About(**{**as_json, "whole": tuple(as_json["whole"])})
    numbers = (about_file.process, *about_file.whole)
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"no recorder wrote {as_json}")
    return about_file


def paths(folder: Path) -> list[Path]:
    """The streams in a folder, in the order in which they were begun."""
    return sorted(folder.glob("*.arrows"), key=lambda p: int(p.stem))


def read(
    path: Path, mapped: bool = False
) -> tuple[pyarrow.Schema | None, Iterator[pyarrow.RecordBatch]]:
    """The schema of a stream and its whole batches; no schema if it was cut there.

    Args:
        path: the file.
        mapped: whether to read only what is used of the batches. Then the file must be
            one that nobody writes: this process would end if it were cut meanwhile.

    Raises:
        ValueError: the columns have types that a recorder does not write.
    """
    pa = PackageError.needed("pyarrow", "hc.Recorder", "hostcall[record]")
    with open(path, "rb") as file:
        mark = file.read(4)
        size = int.from_bytes(file.read(4), "little")
        head = file.read(min(size, os.fstat(file.fileno()).st_size))
    # Looked for before Arrow reads it: Arrow hands an extension type to the class that
    # some package has registered, and there are classes that unpickle what they get.
    if mark not in (_BEGIN, _BEGIN[: len(mark)]) or b"ARROW:extension" in head:
        raise ValueError(f"no recorder wrote {path}")
    if not mark:
        return None, iter(())
    try:
        # Arrow's own map asks the system to read all of it.
        source = np.memmap(path, np.uint8, "r") if mapped else pa.OSFile(str(path))
        reader = pa.ipc.open_stream(source)
    except (OSError, pa.ArrowInvalid):
        return None, iter(())
    for column in reader.schema:
        type_of(column.type)

    def batches() -> Iterator[pyarrow.RecordBatch]:
        while True:
            # A message that is cut off is an ArrowInvalid in its head, and an OSError
            # in its body.
            try:
                batch = reader.read_next_batch()
            except (StopIteration, OSError, pa.ArrowInvalid):
                return
            batch.validate(full=True)  # a damaged file can have wrong offsets
            yield batch

    return reader.schema, batches()


class ArrowFile:
    """A new stream, which its one writer writes.

    Its file is opened for each batch: a run with many names would need too many.
    """

    def __init__(self, folder: Path, about: About) -> None:
        self.path = _new(folder)
        self._about = about
        self._is_new = True

    def append(self, columns: Columns) -> None:
        """Writes a batch."""
        pa = PackageError.needed("pyarrow", "hc.Recorder", "hostcall[record]")
        batch = pa.record_batch([_arrow(c) for c in columns.values()], list(columns))
        with open(self.path, "ab") as file:
            if self._is_new:
                metadata = {"hostcall": json.dumps(dataclasses.asdict(self._about))}
                file.write(batch.schema.with_metadata(metadata).serialize())
            file.write(batch.serialize())
        self._is_new = False


def _new(folder: Path) -> Path:
    """Makes a file with the next number. Another process may take a number first."""
    folder.mkdir(parents=True, exist_ok=True)
    number = len(paths(folder))
    while True:
        path = folder / f"{number}.arrows"
        with contextlib.suppress(FileExistsError):
            open(path, "xb").close()
            return path
        number += 1


# Arrays are made from their memory, and read from it: pyarrow.array and to_numpy import
# pandas, which takes a second and fails when the interpreter ends.


def _arrow(values: np.ndarray) -> pyarrow.Array:
    pa = PackageError.needed("pyarrow", "hc.Recorder", "hostcall[record]")
    flat = np.ascontiguousarray(values).reshape(-1)
    kind = pa.from_numpy_dtype(flat.dtype)
    bits = np.packbits(flat, bitorder="little") if flat.dtype.kind == "b" else flat
    out = pa.Array.from_buffers(kind, len(flat), [None, pa.py_buffer(bits)])
    for size in reversed(values.shape[1:]):
        out = pa.FixedSizeListArray.from_arrays(out, size)
    return out


def type_of(arrow: pyarrow.DataType) -> tuple[np.dtype, list[int]]:
    """The dtype and the shape of a row of a column, from its Arrow type."""
    pa = PackageError.needed("pyarrow", "hc.Recorder", "hostcall[record]")
    shape = []
    while pa.types.is_fixed_size_list(arrow):
        shape.append(arrow.list_size)
        arrow = arrow.value_type
    dtype = np.dtype(arrow.to_pandas_dtype())
    if dtype.kind not in "biuf":
        raise ValueError(f"a recorder writes no column of the type {arrow}")
    return dtype, shape


def column(batch: pyarrow.RecordBatch, name: str) -> np.ndarray:
    """A column of a batch of a stream as an array of shape (rows, *shape)."""
    column = batch.column(name)
    dtype, of_row = type_of(column.type)
    shape = [len(column), *of_row]
    for _ in of_row:
        column = column.flatten()
    bits = column.buffers()[1]
    if dtype.kind == "b":
        packed = np.frombuffer(bits, np.uint8)
        flat = np.unpackbits(packed, count=len(column), bitorder="little")
        return flat.astype(bool).reshape(shape)
    return np.frombuffer(bits, dtype, len(column)).reshape(shape)


# --- Files of somebody else's ---------------------------------------------------------


def only_files(folder: Path) -> None:
    """Refuses a folder of a run if it, or what is in it, is a link, pipe or device."""
    if folder.is_symlink():
        raise foreign(folder)
    if not folder.exists():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
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
        raise failed(
            f"the run in {folder} can't be read ({type(error).__name__}:"
            f" {error}). {why}"
        ) from error


def foreign(path: Path) -> HostcallError:
    return failed(
        f"{path} is a link, or no plain file. A recorder makes no such thing,"
        " and it may lead to any file of yours, so it is not opened. Copy the run"
        " without its links (rsync -r --no-links), or delete this one"
    )
