"""`hc.Recorder`: what a compiled program computes, written to a folder as it runs.

    device --tap--> worker of taps --queue--> writer --+--> run/columns/*.arrows
                    appends to a list                  +--> run/arrays/*/*.arrows
                                                       +--> queue of each sink

Threads. The worker of taps only appends to a list (`_recorder/worker.py` states what it
guarantees). The writer, one thread, is the only one that touches the files
(`_recorder/store.py`). Each sink has a thread, which gets the paths of new batches and
reads them from the files. So a sink that is slow costs no memory and delays nobody, and
loses nothing: the disk is its queue. Batches are never changed once they are written.
Errors of these threads are raised by the next barrier or by `close`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
from jax.typing import ArrayLike

import hostcall as hc
from hostcall._core.host_code import text_of
from hostcall._core.process import PerProcess, living
from hostcall._core.suggestions import suggests
from hostcall.errors import HostcallError, PackageError, SpecError
from hostcall.tools._recorder import arrow
from hostcall.tools._recorder.store import RunFolder
from hostcall.tools._recorder.tapped import (
    Events,
    Field,
    Tapped,
    fields_of,
    unrecordable,
)
from hostcall.tools._recorder.worker import Worker
from hostcall.tools._values import need, refuse_misspelt
from hostcall.tools.reading import Run, read

if TYPE_CHECKING:
    import pandas
    import pyarrow

Sink = Callable[[dict[str, np.ndarray]], object]

# A delivery has up to so many events, and about up to so many bytes.
_MOST_EVENTS = 4096
_MOST_BYTES = 4 << 20


class Recorder:
    """Writes what a program computes to a folder, while the program runs.

        rec = hc.Recorder("run")

        def body(w, i):
            ...
            rec(step=i, loss=loss, grads=norms)       # anywhere in a compiled program

        rec.close()
        hc.tools.read("run").dataframe()

    Scalars and arrays of up to 16 elements become columns of a table. Larger ones
    become files that grow by an entry a call, so a trajectory of any length needs no
    stacked `ys`. The program does not wait for the disk, unless 256 MB wait to be
    written. If the process is killed, at most the last `flush` seconds are lost.

    Args:
        folder: where the run is written. If it has a run already, this one is appended.
        sinks: functions that get the columns too, as `sink(columns)` with a dict of
            NumPy arrays of shape `(rows, *shape)`, in batches: those of
            `hostcall.tools.sinks`, or any callable. Each runs on a thread of its own. A
            slow one delays nothing; one that fails gets nothing more, and the next
            `hc.barrier()`, or `close`, raises its error. A method `close()` is called
            at the end, on the same thread.
        flush: values are on disk at most so many seconds after they were delivered.

    Raises:
        PackageError: pyarrow is not installed.
        HostcallError: another recorder uses the folder.

    `close`, or the end of a `with` block, waits for the programs and writes the rest.
    If the process ends without it, the rest is written too.
    """

    @suggests("hc.Recorder")
    def __init__(
        self,
        folder: str | os.PathLike[str],
        sinks: Sequence[Sink] = (),
        flush: float = 1.0,
    ) -> None:
        instead = "hand the values to a function of yours with hc.tap"
        PackageError.needed("pyarrow", "hc.Recorder", "hostcall[record]", instead)
        need(0 <= flush < 2**31, "flush= of a recorder should be seconds", flush)
        for sink in sinks:
            need(callable(sink), "a sink of a recorder should be a function", sink)
        # Absolute, since the program may change its directory while the writer works.
        self._store = RunFolder(Path(folder).absolute())
        # The tapped function of each set of fields: JAX's caches hit if a program that
        # is traced again taps the same object.
        self._tapped: dict[tuple[Field, ...], Tapped] = {}
        self._sinks = [self._start_sink(sink) for sink in sinks]
        self._writer = Worker(
            name="hostcall-recorder",
            owner=f"the recorder of {self._store.folder}",
            work=self._write,
            errors=self._store.errors,
            patience=flush,
        )
        _open.recorders.append(self)

    def __call__(
        self,
        *,
        step: ArrayLike | None = None,
        where: ArrayLike | None = None,
        every: int | float | None = None,
        sample: float | None = None,
        on: Literal["once", "shards"] | jax.Device = "once",
        **values: Any,
    ) -> None:
        """Records values, in a compiled program or outside of one.

        Args:
            step: an integer scalar. By default the calls are counted, on each device.
            where: as in `hc.tap`. Under vmap only the rows where it is True are
                recorded. With it each call is delivered alone, which costs the worker
                microseconds more.
            every: as in `hc.tap`: one in so many calls, or one in so many seconds.
            sample: as in `hc.tap`: the share of calls that are recorded.
            on: as in `hc.tap`. "once": one process records the whole values. "shards":
                in a jitted program over several devices, each writes its blocks of the
                values, without communication. `Run.array` puts the parts together, of
                small arrays too: only scalars are columns.
            **values: numbers, arrays, and pytrees of them: `grads={"w": x}` has the
                name "grads.w". The names "time", "process", "device" and "row" are
                taken.

        Raises:
            SpecError: a value can't be recorded, or the run has its name with another
                dtype or shape. The error names the column.

        Under transformations:
            vmap: a row of the table for each index, with the columns `row`, or `row0`,
                `row1` for nested vmaps, the outermost first. Of an array an axis,
                behind that of the steps; for arrays, `where` may not differ between
                rows.
            shard_map: each shard records its own values, with the column `device`. In
                an array each axis of the mesh is an axis; a shard that did not record
                has NaN, or 0.
            grad, remat, scan, while_loop, cond: as for `hc.tap`.

        Cost: that of `hc.tap` on the device. The host stacks up to 4096 calls.
        """
        if self._store.closed:
            raise HostcallError(
                f"hostcall: the recorder of {self._store.folder} is closed, and takes"
                " no more values. Close it after the last program that records in it;"
                " or open another one: hc.Recorder of the same folder appends to its"
                " run",
                code="hc-closed",
            )
        refuse_misspelt(Recorder.__call__, "a recorder", values)
        in_parts = on == "shards"
        # Each device draws and looks at the clock by itself, but an entry needs the
        # blocks of all devices.
        if in_parts and (sample is not None or isinstance(every, float)):
            raise SpecError(
                f"hostcall: with on={on!r} a recorder takes no sample= and no every="
                " in seconds: devices would choose different steps. Use an int for"
                " every=",
                code="hc-conflict",
            )
        if step is not None:
            values = {"step": step, **values}
        fields = fields_of(values, in_parts)
        if not fields:
            raise unrecordable("a recorder was called without a value")
        options = {"where": where, "every": every, "sample": sample, "on": on}
        for values_of_tap in _in_parts(fields) if in_parts else [fields]:
            self._tap(values_of_tap, options)

    def _tap(
        self, values: Mapping[Field, jax.Array], options: Mapping[str, Any]
    ) -> None:
        fields = tuple(values)
        self._store.check(fields)
        code = self._tapped.get(fields)
        if code is None:
            code = Tapped(self._writer, fields, self._store.shapes)
            # Several threads may trace: one of them adds it, and all get the same.
            code = self._tapped.setdefault(fields, code)
        if options["where"] is not None:
            # With batch=, a mask may not differ between the rows of a vmap.
            hc.tap(code.event, *values.values(), **options)
            return
        size = sum(array.nbytes for array in values.values())
        batch = min(_MOST_EVENTS, max(1, _MOST_BYTES // size))
        hc.tap(code.events, *values.values(), batch=batch, **options)

    def table(self) -> pyarrow.Table:
        """Everything recorded so far, as a pyarrow.Table (`Run.table`). Flushes."""
        return self._run().table()

    def dataframe(self) -> pandas.DataFrame:
        """Everything recorded so far, as a pandas.DataFrame. Flushes."""
        return self._run().dataframe()

    def flush(self) -> None:
        """Waits for programs and taps (`hc.barrier`), and until all is on disk."""
        hc.barrier()
        self._writer.flush()

    def close(self) -> None:
        """Waits for programs and taps, writes the rest, and waits for all sinks.

        Raises:
            BaseException: an error of `hc.barrier`, of the writer, or of a sink, if no
                barrier raised it; an ExceptionGroup if there are several.
        """
        if self._store.closed:
            return
        try:
            hc.barrier()
        except Exception as error:
            # It is raised at the end, in front of those of threads: what was recorded
            # is written all the same.
            self._store.errors.appendleft(error)
        self._writer.close()  # before the sinks, to which it hands its last batches
        for sink in self._sinks:
            sink.close()
        self._store.close()  # here, so that Ctrl-C leaves a recorder to be closed
        with contextlib.suppress(ValueError):  # two threads may close it
            _open.recorders.remove(self)
        _raise_errors([self._store], f"closing the recorder of {self._store.folder}")

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> Run:
        if not self._store.closed:
            self.flush()
        return read(self._store.folder)

    def _write(self, batches: Iterator[list[Events]]) -> None:
        """The writer's thread."""
        for deliveries in batches:
            for written in self._store.write(deliveries):
                for sink in self._sinks:
                    sink.put(written)

    def _start_sink(self, sink: Sink) -> Worker[Path]:
        """A thread that gives a sink the next batch of each stream that it gets.

        It gets the path of a stream once for each batch that was written there. So the
        next batch is in the file, and a sink that is slow finds it there later.
        """
        name = text_of(sink, "__name__") or type(sink).__name__
        owner = f"the sink {name}"

        def run(written: Iterator[list[Path]]) -> None:
            batches_of: dict[Path, Iterator[pyarrow.RecordBatch]] = {}
            try:
                with contextlib.ExitStack() as stack:
                    close = getattr(sink, "close", None)
                    if close is not None:  # on the thread of the calls, for SQLite
                        stack.callback(close)
                    for path in itertools.chain.from_iterable(written):
                        if path not in batches_of:
                            _, batches_of[path] = arrow.read(path)
                        sink(_columns_of(next(batches_of[path])))
            except BaseException as error:
                error.add_note(
                    f"hostcall: {owner} raised this, and got nothing more."
                    " The run's folder has all rows"
                )
                raise

        return Worker(f"hostcall-sink-{name}", owner, run, self._store.errors)


def _columns_of(batch: pyarrow.RecordBatch) -> arrow.Columns:
    """What a sink gets. Copies: it may write to them, and Arrow's memory is shared."""
    return {name: arrow.column(batch, name).copy() for name in batch.schema.names}


def _raise_errors(runs: Sequence[RunFolder], message: str) -> None:
    """Raises what ended threads of the recorders of these runs."""
    errors = []
    for run in runs:
        with contextlib.suppress(IndexError):  # another thread may take them too
            while True:
                errors.append(run.errors.popleft())
    if len(errors) > 1:
        raise BaseExceptionGroup(message, errors)
    if errors:
        raise errors[0]


class _Open(PerProcess):
    """
    Attributes:
        recorders: those that the end of the process closes. A forked child leaves its
            parent's alone.
    """

    def __init__(self) -> None:
        self.recorders: list[Recorder] = []
        super().__init__()


_open = _Open()


def _at_barrier(ending: bool) -> None:
    if ending:
        with contextlib.ExitStack() as stack:  # the error of one stops no other
            for recorder in _open.recorders.copy():
                stack.callback(recorder.close)
    _raise_errors(living(RunFolder), "threads of recorders failed")


hc.monitor.at_barrier(_at_barrier)


def _in_parts(fields: Mapping[Field, jax.Array]) -> Iterator[dict[Field, jax.Array]]:
    """What each tap gets with on="shards".

    A tap for all scalars and one for each other value. Among devices that hold the same
    blocks of all values of a tap, only the first taps, and each entry of an array must
    get each block once.
    """
    scalars = {field: array for field, array in fields.items() if not field.is_array}
    step = {field: array for field, array in scalars.items() if field.name == "step"}
    # The number of the step alone is no row: it goes along with each array.
    if len(scalars) > len(step):
        yield scalars
    for field, array in fields.items():
        if field.is_array:
            yield {**step, field: array}
