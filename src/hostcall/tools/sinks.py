"""Sinks of a recorder: each gets batches of columns, `sink(columns)`.

A batch is a dict of NumPy arrays of shape `(rows, *shape)`. Any callable is a sink;
these write files, and `live` draws. A small vector becomes a column for each element,
`norms.0`, `norms.1`. Batches differ in their columns if the recorder is called with
different names.
"""

from __future__ import annotations

import csv as csv_writer
import io
import json
import math
import os
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import numpy as np

from hostcall.errors import PackageError
from hostcall.tools._recorder.arrow import Columns


def flat(columns: Columns) -> Columns:
    """Columns of scalars: a column for each element of a vector."""
    scalars = {}
    for name, values in columns.items():
        for index in np.ndindex(values.shape[1:]):  # (), once, for a scalar
            column_name = ".".join([name, *map(str, index)])
            scalars[column_name] = values[(slice(None), *index)]
    return scalars


def _rows(columns: Columns) -> Iterator[tuple[object, ...]]:
    # `tolist` gives Python's numbers, which csv, json and sqlite3 know.
    values = [column.tolist() for column in columns.values()]
    return zip(*values, strict=True)


class csv:
    """Writes CSV. Each set of columns has a file: `path`, then `path` with .1, .2."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()
        self._files: dict[tuple[str, ...], TextIO] = {}

    def __call__(self, columns: Columns) -> None:
        columns = flat(columns)
        names = tuple(columns)
        if names not in self._files:
            self._files[names] = self._open(names)
        file = self._files[names]
        csv_writer.writer(file).writerows(_rows(columns))
        file.flush()

    def _open(self, names: tuple[str, ...]) -> TextIO:
        """The first file that has these columns, or none yet.

        A run that is resumed finds its own files again, whichever columns come first.
        """
        number = 0
        path = self._path
        while True:
            # Appends, and reads the header first.
            file = open(path, "a+", newline="")  # noqa: SIM115 (closed by close)
            file.seek(0)
            header = next(csv_writer.reader(file), None)
            if header is None:
                csv_writer.writer(file).writerow(names)
            if header is None or tuple(header) == names:
                return file
            file.close()
            number += 1
            path = self._path.with_name(
                f"{self._path.stem}.{number}{self._path.suffix}"
            )

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class jsonl:
    """Writes a line of JSON for each row. NaN is written as NaN, as Python reads it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open(path, "a")  # noqa: SIM115 (closed by close)

    def __call__(self, columns: Columns) -> None:
        for row in _rows(columns):
            values_by_name = dict(zip(columns, row, strict=True))
            self._file.write(json.dumps(values_by_name) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class sqlite:
    """Writes rows to a table of an SQLite database. Each batch is a transaction."""

    def __init__(self, path: str | os.PathLike[str], table: str = "records") -> None:
        self._table = _quoted(table)
        # Only the sink's thread uses it, but this one makes it.
        self._connection = sqlite3.connect(path, check_same_thread=False)
        self._names: set[str] = set()

    def __call__(self, columns: Columns) -> None:
        columns = flat(columns)
        names = ", ".join(map(_quoted, columns))
        marks = ", ".join("?" * len(columns))
        with self._connection as transaction:
            if not columns.keys() <= self._names:
                self._add_columns(names, columns)
            insert = f"INSERT INTO {self._table} ({names}) VALUES ({marks})"
            transaction.executemany(insert, _rows(columns))

    def _add_columns(self, names: str, columns: Columns) -> None:
        """Makes the table, or adds columns to one that an earlier run has made."""
        run = self._connection.execute
        run(f"CREATE TABLE IF NOT EXISTS {self._table} ({names})")
        rows = run(f"PRAGMA table_info({self._table})")
        self._names = {name for _, name, *_ in rows}
        for name in columns.keys() - self._names:
            run(f"ALTER TABLE {self._table} ADD COLUMN {_quoted(name)}")
        self._names |= columns.keys()

    def close(self) -> None:
        self._connection.close()


class tensorboard:
    """Writes scalars for TensorBoard, with the package tensorboardX.

    The tag is the column's name; behind it `/row0`, `/row1` of a vmap, the device, ...
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        who = "the sink tensorboard"
        module = PackageError.needed("tensorboardX", who, "tensorboardX")
        self._writer = module.SummaryWriter(str(folder))

    def __call__(self, columns: Columns) -> None:
        columns = flat(columns)
        places = _places(columns)
        for row in _rows(columns):
            values = dict(zip(columns, row, strict=True))
            step = values.pop("step")
            seconds = values.pop("time")
            place = "".join(f"/{name}{values.pop(name)}" for name in places)
            for name, value in values.items():
                self._writer.add_scalar(name + place, value, step, seconds)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class live:
    """Draws the columns while they come: in a notebook's cell, and to a PNG elsewhere.

    It needs matplotlib. A name has a plot, with a line for each of the first 16 rows or
    devices. A line that gets long is thinned.

    Args:
        path: the PNG. By default a notebook has none, and others write "live.png".
        names: what is drawn (default: the first nine names).
        every: seconds between two drawings, at least. The last values are drawn when
            the recorder is closed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        names: Sequence[str] | None = None,
        every: float = 1.0,
    ) -> None:
        # Figures that are made without pyplot may be drawn on any thread.
        module = PackageError.needed("matplotlib.figure", "the sink live", "matplotlib")
        self._figure = module.Figure
        self._names = names
        self._every = every
        self._last = -math.inf  # when it was drawn last
        self._curves: dict[str, dict[str, _Curve]] = {}  # by name, then by label
        self._cell = None
        # Whoever runs in a notebook has imported IPython; it is not imported for this.
        ipython = sys.modules.get("IPython")
        shell = None if ipython is None else ipython.get_ipython()
        if getattr(shell, "kernel", None) is not None:
            display = PackageError.needed("IPython.display", "the sink live", "ipython")
            self._image = display.Image
            # On the thread of the cell, so that it is this cell that shows the plot.
            self._cell = display.display(self._image(self._png()), display_id=True)
        elif path is None:
            path = "live.png"
        self._path = None if path is None else Path(path).absolute()

    def __call__(self, columns: Columns) -> None:
        columns = flat(columns)
        places = _places(columns)
        names = columns.keys() - {"time", "step", *places}
        if self._names:
            names &= {*self._names}
        steps = columns["step"]
        for label, rows in _rows_by_place(columns, places):
            for name in names:
                curve = self._curves.setdefault(name, {}).setdefault(label, _Curve())
                curve.add(steps[rows], columns[name][rows])
        if time.monotonic() - self._last >= self._every:
            self._draw()

    def close(self) -> None:
        self._draw()

    def _draw(self) -> None:
        data = self._png()
        if self._cell is not None:
            self._cell.update(self._image(data))
        if self._path is not None:
            # Replaced as a whole, since a viewer may read it at any moment.
            new = self._path.with_name(f".{self._path.name}.new")
            new.unlink(missing_ok=True)  # a process that was killed may have left it
            with open(new, "xb") as file:  # "x" follows no link
                file.write(data)
            os.replace(new, self._path)
        self._last = time.monotonic()

    def _png(self) -> bytes:
        names = sorted(self._curves)[:9] if self._names is None else self._names
        count = max(len(names), 1)  # one empty plot before anything has come
        size = (7, 0.6 + 1.8 * count)
        figure = self._figure(figsize=size, layout="constrained")
        plots = figure.subplots(count, sharex=True, squeeze=False)[:, 0]
        for plot, name in zip(plots, names, strict=False):
            plot.set_ylabel(name)
            curves = self._curves.get(name, {})
            for label, curve in sorted(curves.items()):
                steps, values = curve.points
                plot.plot(steps, values, label=label or None)
            if 1 < len(curves) <= 8:  # a longer legend would hide the curves
                plot.legend(fontsize="small")
        plots[-1].set_xlabel("step")
        png = io.BytesIO()
        figure.savefig(png, format="png")
        return png.getvalue()


def _rows_by_place(
    columns: Columns, places: Sequence[str]
) -> Iterator[tuple[str, np.ndarray]]:
    """(label, which rows of the batch are there), of the first 16 rows of a vmap or
    devices: ("process 0, row 3", a mask).
    """
    steps = columns["step"]
    # The column of zeros is for runs without places, all of whose rows are alike.
    keys = np.stack([steps * 0, *(columns[name] for name in places)], axis=1)
    groups, group_of_row = np.unique(keys, axis=0, return_inverse=True)
    for number, (_, *indices) in enumerate(groups[:16]):
        words = [f"{name} {i}" for name, i in zip(places, indices, strict=True)]
        # Some NumPys give the inverse the shape of the keys.
        yield ", ".join(words), group_of_row.reshape(-1) == number


class _Curve:
    """The points of a line: each nth, with n so large that there are at most MOST."""

    MOST = 4096

    def __init__(self) -> None:
        self.points = np.empty((2, 0))  # steps and values
        self._stride = 1
        self._count = 0  # of all points that came

    def add(self, steps: np.ndarray, values: np.ndarray) -> None:
        # The points 0, n, 2n ... of all that came: this batch begins at number
        # `_count`, and the next multiple of n is so many points behind that.
        first = -self._count % self._stride
        kept = np.stack([steps, values])[:, first :: self._stride]
        self.points = np.concatenate([self.points, kept], axis=1)
        self._count += len(steps)
        while self.points.shape[1] > self.MOST:
            self.points = self.points[:, ::2]
            self._stride *= 2


def _places(columns: Columns) -> list[str]:
    """The columns that say where a row comes from."""
    kinds = ("process", "device", "row")  # nested vmaps have "row0", "row1"
    return [name for name in columns if name.rstrip("0123456789") in kinds]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
