"""`coalesce=`: one call of the function for calls of several devices and programs.

Each call puts its arrays into a batch. The function gets all entries of a batch,
stacked along a new axis in front, and returns results with that axis, which go back to
the entries.

Calls of one place, by any device, thread or program, meet in a `_Batch`. The thread
that opens a batch is its leader. It waits for others, at most `wait` seconds, and then
calls the function with all entries; the others wait for the outcome.

Guarantees
  * A batch has at most `size` entries. A call with more rows (a vmap) fills several.
  * A batch that is full is called at once; no call joins a batch that has been closed.
  * A batch is open only while its leader waits for others, not while the leader makes
    another call. So a function may run programs that call itself.
  * An error goes to every thread that has entries in the batch.
  * A thread that is interrupted (Ctrl-C) leaves; its entries are still computed. If the
    leader is interrupted, the others are too, since nobody is left to make the call.

Memory and threads: a place's lock protects its open batch, and entries are added under
it. It is held for these few steps only. Once closed, a batch belongs to its leader,
which writes the outcome before it sets `done`; the others read it after that.

One merged call of a function at a time. A function may write its results into a buffer
that it keeps, and return that:

  1. One thread's merged call returns the buffer.
  2. Before the results are copied out of it, another thread's batch, also one of other
     shapes, runs the function, which writes into the buffer.
  3. The first thread copies the second one's results.

So a function's runs, each with the copy of its results, take turns by a lock. They
would not get faster in parallel: the next batch fills meanwhile. A call in the function
itself must not wait for its own turn. It runs on a host client of a higher rung
(_runtime/host_device.py), and each rung has a lock of its own, so nothing waits in a
circle. Only a thread that the function starts and waits for, and that calls it again,
would wait for ever; that is said in the log. Coroutine functions have no turns: their
merged calls wait together.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hostcall._core.wait import SLOW, wait
from hostcall._policies.layer import Choices, Flat, Inner, Leaves, Site, shared
from hostcall._policies.on_loop import free_loop


class _Batch:
    def __init__(self) -> None:
        self.entries: list[Leaves] = []
        self.full = threading.Event()
        self.done = threading.Event()
        self.values: Sequence[Flat] = ()
        self.error: BaseException | None = None


class _Meeting:
    """Where the calls of one place meet. The lock protects the open batch, and its
    entries.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open: _Batch | None = None


Parts = list[tuple[_Batch, range]]  # batches, and where a call's entries are in each


class _Turn:
    """Held by the thread that runs a function for a batch, until it has its results."""

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()

    def __enter__(self) -> None:
        wait(lambda seconds: self._lock.acquire(timeout=seconds), slow=self._slow)

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _slow(self) -> str:
        return (
            f"hostcall: a merged call of `{self._name}` (coalesce=) has waited"
            f" {SLOW:g} s for another one to end. Merged calls of one function run one"
            " at a time. If the function waits for a thread that calls it too, it waits"
            " for ever: leave out coalesce=, or make that call on the function's own"
            " thread"
        )


class Merged:
    """Makes rows of several calls one call of the layer inside.

    Whichever thread makes that call, it uses its own plan's: equal functions
    and shapes meet. The call is no row of anybody's batch, so it has no index.

    Args:
        inner: makes the call.
        choices: of the plan.
        size: how many entries a batch has at most.
        seconds: how long a call waits for others.
    """

    def __init__(
        self, inner: Inner, choices: Choices, size: int, seconds: float
    ) -> None:
        self._inner, self._results, self._avals = inner, choices.results, choices.avals
        self._size, self._seconds = size, seconds
        self._callback = callback = choices.callback
        # With what the function gets and returns, so that entries can be stacked; not
        # with where and how a place calls it.
        shapes = tuple((shape, str(dtype)) for shape, dtype in choices.shapes)
        trees = callback.template, callback.results, callback.fills
        how = callback.policy, callback.traced, callback.options.arrays
        who = callback.fn, callback.counted_as, trees, how, shapes
        self._meeting: _Meeting = shared.one(who, _Meeting)
        self._turn: Any = contextlib.nullcontext()
        if not callback.seen.awaits:
            name, rung = choices.results.name, choices.device
            self._turn = shared.one((callback.fn, rung), lambda: _Turn(name))

    def rows(self, rows: Sequence[Leaves], site: Site) -> list[Flat]:
        if self._callback.seen.awaits:  # another thread may need the loop for the call
            free_loop(self._callback.function)
        parts: Parts = []
        leads: list[_Batch] = []
        try:
            # One batch after the other: a batch is open only while its leader waits.
            while rows:
                rows = self._join(rows, parts, leads)
                if leads and not leads[-1].done.is_set():
                    wait(leads[-1].full.wait, self._seconds)
                    self._finish(leads[-1], self._together)
        finally:
            if leads and not leads[-1].done.is_set():  # this thread was interrupted
                self._finish(leads[-1], _interrupted)
        values, error = _gathered(parts)
        if error is None:
            return values
        try:
            raise error
        finally:  # breaks the cycle error -> traceback -> this frame -> error
            del error, leads, parts

    def _join(
        self, entries: Sequence[Leaves], parts: Parts, leads: list[_Batch]
    ) -> Sequence[Leaves]:
        """Puts entries into the open batch. Returns those that it has no room for.

        Args:
            entries: what is left of the call's.
            parts: gets the batch, and where the entries are in it.
            leads: gets the batch if this thread leads it, before others can join it: an
                interrupt may come at any time.
        """
        meeting = self._meeting
        with meeting.lock:
            batch = meeting.open
            if batch is None:
                batch = _Batch()
                leads.append(batch)
                meeting.open = batch
            start = len(batch.entries)
            taken = entries[: self._size - start]
            batch.entries += taken
            parts.append((batch, range(start, len(batch.entries))))
            if len(batch.entries) == self._size:
                meeting.open = None
                batch.full.set()
        return entries[len(taken) :]

    def _finish(
        self, batch: _Batch, together: Callable[[list[Leaves]], list[Flat]]
    ) -> None:
        """Closes a batch, and makes its call."""
        with self._meeting.lock:
            if self._meeting.open is batch:
                self._meeting.open = None
        try:
            batch.values = together(batch.entries)
        except BaseException as error:
            batch.error = error
        finally:
            batch.entries = []
            batch.done.set()
            del batch  # the error's traceback holds this frame

    def _together(self, entries: list[Leaves]) -> list[Flat]:
        n = len(entries)
        leaves = [np.stack(each) for each in zip(*entries, strict=True)]
        words = f", called for {n} with coalesce=,"
        with self._turn:
            (values,) = self._inner.rows([leaves], Site())
            # Copies: the function may write its buffer before all entries are read.
            outs = [
                self._results.shaped(i, value, (n, *aval.shape), words).copy()
                for i, (value, aval) in enumerate(zip(values, self._avals, strict=True))
            ]
        return list(zip(*outs, strict=True))


def _gathered(parts: Parts) -> tuple[list[Flat], BaseException | None]:
    """Waits for the batches; the results of these entries, or the first error."""
    values: list[Flat] = []
    for batch, mine in parts:
        wait(batch.done.wait)
        if batch.error is not None:
            return [], batch.error
        values += batch.values[mine.start : mine.stop]
    return values, None


def _interrupted(entries: list[Leaves]) -> list[Flat]:
    raise KeyboardInterrupt
