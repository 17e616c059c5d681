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
    """What the schema says. Raises an error of some kind if no recorder wrote it."""
    fields = json.loads(schema.metadata[b"hostcall"])
    whole = tuple(fields["whole"])  # JSON has lists only
    about_stream = About(**{**fields, "whole": whole})
    for number in (about_stream.process, *whole):
        # A file may say anything, and these become sizes of arrays.
        if type(number) is not int or number < 0:
            raise ValueError(f"no recorder wrote {fields}")
    return about_stream


def paths(folder: Path) -> list[Path]:
    """The streams in a folder, in the order in which they were begun."""
    return sorted(folder.glob("*.arrows"), key=lambda path: int(path.stem))


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
    # The first message is the schema: a mark, the size of what follows, and that.
    with open(path, "rb") as file:
        mark = file.read(4)
        size = int.from_bytes(file.read(4), "little")
        # A damaged file may promise any size.
        schema = file.read(min(size, os.fstat(file.fileno()).st_size))
    # Looked for before Arrow reads it: Arrow hands an extension type to the class that
    # some package has registered, and there are classes that unpickle what they get.
    begins_right = _BEGIN.startswith(mark)  # or is cut off there
    if not begins_right or b"ARROW:extension" in schema:
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
        type_of(column.type)  # raises for types that a recorder does not write

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
        arrays = [_arrow(values) for values in columns.values()]
        batch = pa.record_batch(arrays, list(columns))
        # One `write` for each message, so that a process that is killed leaves all of
        # it, or a part at the end of the file.
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
    """A column from an array of shape (rows, *shape): of lists of lists of numbers."""
    pa = PackageError.needed("pyarrow", "hc.Recorder", "hostcall[record]")
    flat = np.ascontiguousarray(values).reshape(-1)
    kind = pa.from_numpy_dtype(flat.dtype)
    memory = flat
    if flat.dtype.kind == "b":  # Arrow has a bit for each bool, NumPy a byte
        memory = np.packbits(flat, bitorder="little")
    validity = None  # no value is missing
    column = pa.Array.from_buffers(kind, len(flat), [validity, pa.py_buffer(memory)])
    # From the innermost axis outwards.
    for size in reversed(values.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


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
    dtype, row_shape = type_of(column.type)
    shape = [len(column), *row_shape]
    for _ in row_shape:  # an axis of lists each
        column = column.flatten()
    _, memory = column.buffers()
    if dtype.kind == "b":
        packed = np.frombuffer(memory, np.uint8)
        flat = np.unpackbits(packed, count=len(column), bitorder="little")
        return flat.astype(bool).reshape(shape)
    return np.frombuffer(memory, dtype, len(column)).reshape(shape)


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
            elif entry.is_file(follow_symlinks=False):
                continue
            # A file of that name may have been replaced meanwhile, and be gone.
            elif os.path.lexists(entry):
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
