"""Chunks of rows: what is sent to an executor, and what a worker does with it."""

from __future__ import annotations

import contextvars
import functools
import io
import itertools
import os
import pickle
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import numpy as np

from hostcall import _jax, _native
from hostcall._runtime import pools, waits, workers
from hostcall._runtime.bound import Row

# The runs of this process. A chunk carries its run's number, which can be pickled.
under_way: dict[int, Any] = {}
numbers = itertools.count()

# Token and process id together name this process: another machine may have a process
# with the same id, and a forked child has the same token.
_TOKEN = os.urandom(8).hex()


def process() -> tuple[str, int]:
    return _TOKEN, os.getpid()


def run_chunk(
    where: tuple[tuple[str, int], int, _jax.Traced | None, int, str | None],
    fn: Callable[..., Any],
    rows: Sequence[Any],
    *shared: Any,
) -> list[Any]:
    """Runs a chunk; called by the executor, in this or another process or machine.

    The exception of a row that fails gets the row's index in the chunk as an attribute.

    Args:
        where: the run's process and number, the settings of JAX that its trace had of
            its own, the number of the first row, and the leash.
        fn: the function.
        rows: (args, kwargs) of each row, or bytes if they were sent.
        *shared: arrays that all rows share, as `Workers.share` made them.
    """
    of, run_number, traced, start, leash = where
    if of != process():
        if leash is not None:
            pools.begin(leash, start)

        def go_on(i: int) -> None:
            if leash is not None and not os.path.exists(leash):
                raise _dropped()

        before = None if traced is None else traced.enter()
        try:
            return _run_each(fn, rows, shared, go_on)
        finally:
            if traced is not None and before is not None:
                traced.leave(before)
    run = under_way.get(run_number)
    if run is None:
        raise _dropped()

    def begin(i: int) -> None:
        if start + i >= min(run.until, run.failing):
            raise _dropped()
        workers.stand_in_by(functools.partial(run.current, start + i))

    started = _native.ticks()
    try:
        with workers.as_host_code(run.settings):
            # A copy, since no two threads may be in one context.
            context: contextvars.Context = run.context.copy()
            return context.run(_run_each, fn, rows, shared, begin)
    except BaseException:
        # At once: the waiting thread may take a while to notice.
        run.failing = min(run.failing, start)
        raise
    finally:
        _native.note_event(waits.ROW, run.place, started, start, len(rows))


def _dropped() -> Exception:
    return futures.CancelledError(
        "hostcall: this row did not begin: another row failed, or the call is late"
    )


def _run_each(
    fn: Callable[..., Any],
    rows: Sequence[Any],
    shared: Sequence[Any],
    begin: Callable[[int], None],
) -> list[Any]:
    values = []
    for i, row in enumerate(rows):
        try:
            begin(i)
            if isinstance(row, bytes):
                row = _Unpickler(row, shared).load()
            args, kwargs = row
            values.append(fn(*args, **kwargs))
        except BaseException as error:
            # Through `__dict__`, since some exceptions refuse to have attributes set.
            error.__dict__["hostcall_row"] = i
            raise
    return values


class _Unpickler(pickle.Unpickler):
    def __init__(self, row: bytes, shared: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(row))
        self._shared = shared

    def persistent_load(self, number: Any) -> Any:
        return pools.fresh(self._shared[number])


def bytes_of(rows: Sequence[Row], shared: list[np.ndarray], pickler: Any) -> list[Any]:
    """Pickles each row, with a number in place of each array that all rows share."""
    numbers = {id(array): number for number, array in enumerate(shared)}

    class Pickler(pickler):  # type: ignore[misc]
        def persistent_id(self, thing: Any) -> int | None:
            return numbers.get(id(thing))

    pickled = []
    for row in rows:
        file = io.BytesIO()
        Pickler(file, pickle.HIGHEST_PROTOCOL).dump(row)
        pickled.append(file.getvalue())
    return pickled
