"""One bar: what its devices delivered last, and what it shows of that."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeAlias

import jax
import numpy as np

import hostcall as hc
from hostcall.tools._progress import drawing
from hostcall.tools._values import with_all_axes

if TYPE_CHECKING:
    from hostcall.typing import Current

# A line of the user's, with its options.
Key: TypeAlias = tuple[drawing.BarSpec, object]
Total: TypeAlias = np.ndarray | int | None
Metrics: TypeAlias = dict[str, np.ndarray | str]
ROWS = 16  # the most bars of one loop
EAGER = -1  # the run of a tap outside of programs

clock = time.monotonic  # tests replace it


class DeviceSteps:
    """What one device has delivered, with an element for each row of the batch.

    Attributes:
        done: the number of steps done.
        total: the number of all steps, or None.
        metrics: name -> text, or an array.
        place: the steps done by the slowest row that still runs; without a total, by
            the fastest. A row that has ended stays at its last step, or just beyond.
        is_beyond: whether all rows have passed their last step before.
    """

    done: np.ndarray
    total: np.ndarray | None

    def __init__(
        self, here: Current, step: np.ndarray, total: Total, metrics: Metrics
    ) -> None:
        leaves, tree = jax.tree.flatten((step, total, metrics))
        arrays = [x for x in leaves if not isinstance(x, (str, int))]
        spread = np.broadcast_arrays(*with_all_axes(arrays, here.transforms))
        rows = (array.ravel() for array in spread)
        leaves = [x if isinstance(x, (str, int)) else next(rows) for x in leaves]
        step, total, self.metrics = tree.unflatten(leaves)
        self.done = step.astype(np.int64) + 1
        self.place, self.is_beyond, self.total = int(np.max(self.done)), False, None
        if total is not None:
            self.is_beyond = bool((self.done > total).all())
            # A row that ended before the others may be beyond its last step.
            self.done = np.minimum(self.done, total)
            self.total = np.broadcast_to(total, self.done.shape)
            running = self.done[self.done < self.total]
            self.place = int(running.min() if running.size else self.done.max())


class Bar:
    """The bar of one loop run, or a bar for each of its rows.

    Attributes:
        key: the line that calls `hc.progress`, with its options.
        runs: the newest runs of programs whose steps the bar has shown.
        spans_runs: whether a Python loop drives it, run by run.
        place: the smallest `DeviceSteps.place` of its devices.
        is_done: whether all rows of all devices have reached the total.
        encloses: whether inner loops start after a step of this loop is shown, so that
            they still run after its last.
        before: the lines of inner loops that end before a step is shown.
        moves: how often the place has changed, the first time included.
        moved: when it changed last.
        drawn: what is on the screen.
    """

    def __init__(self, key: Key, run: int, before: set[Key]) -> None:
        self.key, self.loop, self.before = key, key[0], before
        self.runs = deque([run], maxlen=16)
        self.spans_runs = run == EAGER
        self.place: int = self.loop.initial
        self.is_done = self.encloses = False
        self.moves, self.moved, self.longest_pause = 0, clock(), 0.0
        self._devices: dict[jax.Device | None, DeviceSteps] = {}
        self.drawn: list[drawing.Drawn] = []

    def show(self, here: Current, new: DeviceSteps) -> None:
        now, before, old = clock(), self.place, self._devices.get(here.device)
        self._devices[here.device] = new
        order = sorted(self._devices, key=lambda device: device.id if device else -1)
        parts = [self._devices[device] for device in order]
        self.place = min(part.place for part in parts)
        # A device that delivers for the first time may be behind the others.
        restarted = old and new.place < old.place and self.place < before
        if self.place != before or not self.moves:
            if self.moves:
                self.longest_pause = max(self.longest_pause, now - self.moved)
            self.moves, self.moved = self.moves + 1, now
        # Each device of a shard_map delivers, to its own process.
        devices = math.prod(here.mesh_shape.values()) // here.processes
        if here.mesh_shape and here.devices:
            devices = sum(d.process_index == here.process for d in here.devices)
        self.is_done = len(parts) >= devices and all(
            part.total is not None and (part.done >= part.total).all() for part in parts
        )
        lines = self._lines(parts)
        began = _passed(here.step) if len(lines) > len(self.drawn) else 0.0
        for number, (done, total, postfix) in enumerate(lines):
            if number == len(self.drawn):
                row = f"[{number}]" if len(lines) > 1 else None
                name = " ".join(filter(None, (self.loop.desc, row))) or None
                self.drawn.append(drawing.Drawn(self.loop, name, total, done, began))
            elif restarted:
                self.drawn[number].restart(done)
            at_once = self.moves == 1 or self.is_done
            self.drawn[number].show(done, postfix, at_once)

    def close(self, leave: bool) -> None:
        with ExitStack() as stack:  # which closes all, even if one fails
            # From the top, so that lines stay in order; but erased from the bottom, so
            # that tqdm leaves the cursor at the beginning of the first line.
            for drawn in reversed(self.drawn) if leave else self.drawn:
                stack.callback(drawn.close, leave)

    def _lines(self, parts: list[DeviceSteps]) -> list[tuple[int, int | None, str]]:
        """(done, total, postfix) of each bar to draw."""
        done: np.ndarray = np.concatenate([part.done for part in parts])
        totals = [part.total for part in parts if part.total is not None]
        total: np.ndarray | None = np.concatenate(totals) if totals else None
        each = self.loop.rows == "each"
        if each:
            shown: Iterable[int] = range(min(len(done), ROWS))
        elif total is None:
            shown = [int(np.argmax(done))]
        else:
            # Among equals the longest, which the bar's total is taken from.
            shown = np.lexsort((-total, done / np.maximum(total, 1)))[:1]
        return [
            (
                int(done[row]),
                None if total is None else int(total[row]),
                _postfix(parts, slice(row, row + 1) if each else slice(None)),
            )
            for row in shown
        ]


def _passed(tap: int | None) -> float:
    """When a device passed this tap, as `time.time()`; if that is not known, now."""
    for record in reversed(hc.monitor.flight()):
        if record.kind == "tap" and record.number == tap:
            return record.start
    return time.time()


def _postfix(parts: list[DeviceSteps], rows: slice) -> str:
    """The metrics of one row, or of all rows as mean and range."""
    texts = []
    for name, text in parts[0].metrics.items():
        if not isinstance(text, str):
            of_all = np.concatenate([part.metrics[name] for part in parts])
            numbers: np.ndarray = of_all.astype(np.float64)[rows]
            low, high = numbers.min(), numbers.max()
            text = f"{numbers.mean():.3g}"
            if low < high:  # else all are equal, or one is NaN, and so is their mean
                text += f" [{low:.3g}, {high:.3g}]"
        texts.append(f"{name}={text}")
    return ", ".join(texts)
