"""Which bar a delivered step moves, and when bars open and close.

Steps arrive as taps, on the worker that delivers them. Bars are closed there, and by
threads that wait. A lock makes them take turns, so tqdm sees one at a time.

  * At a barrier, and when the process ends, the thread that waits closes bars, after
    its programs have ended and their steps were shown.
  * A program that fails, or is interrupted, queues nothing more. Its bar closes at the
    next barrier, when its line begins a new loop, or when another bar moves on.
  * Ctrl-C ends a wait, not a program: a bar moves on until its program ends.
  * A forked child has a copy of the bars, and no worker. It forgets them.

The end of a run is not announced on the host, so a bar that stops short of its total
may belong to a loop that is over, or to one that is slow. `Bars` closes it as soon as
it knows better, and opens it again where that was a mistake.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import threading
import time
from collections import OrderedDict, deque
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TypeAlias

import jax
import numpy as np

import hostcall as hc
from hostcall._core.host_code import HostCode
from hostcall._core.process import PerProcess
from hostcall.tools._progress.drawing import BarSpec, Drawn
from hostcall.tools._values import with_all_axes

# Seconds for which the steps of an inner loop are skipped after one was shown. The
# first and last step of each run pass the engine's throttle, and an inner loop may
# start a hundred thousand times a second.
QUIET = 0.02
LASTS = 0.3  # seconds after which a loop that `hc.observe` has found gets its bar
SILENT = 1.0  # seconds that a bar may rest while another moves
_CLOSED_AT_MOST = 64

# A line of the user's, with its options.
Key: TypeAlias = tuple[BarSpec, object]
Total: TypeAlias = np.ndarray | int | None
Metrics: TypeAlias = dict[str, np.ndarray | str]
ROWS = 16  # the most bars of one loop
EAGER = -1  # the run of a tap outside of programs

clock = time.monotonic  # tests replace it


# --- One bar --------------------------------------------------------------------------


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
        self,
        delivery: hc.typing.Current,
        step: np.ndarray,
        total: Total,
        metrics: Metrics,
    ) -> None:
        leaves, tree = jax.tree.flatten((step, total, metrics))
        arrays = [x for x in leaves if not isinstance(x, (str, int))]
        spread = np.broadcast_arrays(*with_all_axes(arrays, delivery.transforms))
        rows = (array.ravel() for array in spread)
        leaves = [x if isinstance(x, (str, int)) else next(rows) for x in leaves]
        step, total, self.metrics = tree.unflatten(leaves)
        self.done = step.astype(np.int64) + 1
        self.place = int(np.max(self.done))
        self.is_beyond = False
        self.total = None
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
        began: when it, or its loop anew, began.
        drawn: what is on the screen.
    """

    def __init__(self, key: Key, run: int, bars_before: set[Key]) -> None:
        self.key = key
        self.loop = key[0]
        self.before = bars_before
        self.runs = deque([run], maxlen=16)
        self.spans_runs = run == EAGER
        self.place: int = self.loop.initial
        self.is_done = self.encloses = False
        self.moves = 0
        self.moved = clock()
        self.longest_pause = 0.0
        self.began = time.perf_counter()
        self._restarts = False
        self._devices: dict[jax.Device | None, DeviceSteps] = {}
        self.drawn: list[Drawn] = []

    def move(self, delivery: hc.typing.Current, new: DeviceSteps) -> None:
        """Takes what a device has delivered."""
        now = clock()
        place_before = self.place
        old = self._devices.get(delivery.device)
        self._devices[delivery.device] = new
        parts = self._devices.values()
        self._tap = delivery.step
        self.place = min(part.place for part in parts)
        # A device that delivers for the first time may be behind the others.
        if old and new.place < old.place and self.place < place_before:
            self.began = time.perf_counter()
            self._restarts = True
        if self.place != place_before or not self.moves:
            if self.moves:
                self.longest_pause = max(self.longest_pause, now - self.moved)
            self.moves = self.moves + 1
            self.moved = now
        # Each device of a shard_map delivers, to its own process.
        devices = math.prod(delivery.mesh_shape.values()) // delivery.processes
        if delivery.mesh_shape and delivery.devices:
            devices = sum(d.process_index == delivery.process for d in delivery.devices)
        self.is_done = len(parts) >= devices and all(
            part.total is not None and (part.done >= part.total).all() for part in parts
        )

    def draw(self) -> None:
        order = sorted(self._devices, key=lambda device: device.id if device else -1)
        devices = [self._devices[device] for device in order]
        done: np.ndarray = np.concatenate([part.done for part in devices])
        totals = [part.total for part in devices if part.total is not None]
        total: np.ndarray | None = np.concatenate(totals) if totals else None
        is_each_row = self.loop.rows == "each"
        if is_each_row:
            shown = list(range(min(len(done), ROWS)))
        elif total is None:
            shown = [int(np.argmax(done))]
        else:
            # The row that is the furthest behind. Among equals the longest, which the
            # bar's total is taken from.
            shown = np.lexsort((-total, done / np.maximum(total, 1)))[:1].tolist()
        # A new bar's time begins where a device passed the tap, not where it is shown.
        began = _passed(self._tap) if len(shown) > len(self.drawn) else 0.0
        for number, row in enumerate(shown):
            n = int(done[row])
            rows = slice(row, row + 1) if is_each_row else slice(None)
            if number == len(self.drawn):  # the row has no bar so far
                place = f"[{number}]" if len(shown) > 1 else None
                name = " ".join(filter(None, (self.loop.desc, place))) or None
                last = None if total is None else int(total[row])
                begin_tracebacks_on_a_line()
                self.drawn.append(Drawn(self.loop, name, last, n, began))
            elif self._restarts:
                self.drawn[number].restart(n)
            at_once = self.moves == 1 or self.is_done
            self.drawn[number].show(n, _postfix(devices, rows), at_once)
        self._restarts = False

    def close(self, leave: bool) -> None:
        leave &= len(self.loop.path) < 2
        with ExitStack() as stack:  # which closes all, even if one fails
            # From the top, so that lines stay in order; but erased from the bottom, so
            # that tqdm leaves the cursor at the beginning of the first line.
            for drawn in reversed(self.drawn) if leave else self.drawn:
                stack.callback(drawn.close, leave)


def _passed(tap: int | None) -> float:
    """When a device passed this tap, as `time.time()`; if that is not known, now."""
    for record in reversed(hc.monitor.flight()):
        if record.kind == "tap" and record.number == tap:
            return record.start
    return time.time()


def _postfix(devices: list[DeviceSteps], rows: slice) -> str:
    """The metrics of one row, or of all rows as mean and range."""
    texts = []
    for name, text in devices[0].metrics.items():
        if not isinstance(text, str):
            of_all = np.concatenate([part.metrics[name] for part in devices])
            numbers: np.ndarray = of_all.astype(np.float64)[rows]
            low = numbers.min()
            high = numbers.max()
            text = f"{numbers.mean():.3g}"
            if low < high:  # else all are equal, or one is NaN, and so is their mean
                text += f" [{low:.3g}, {high:.3g}]"
        texts.append(f"{name}={text}")
    return ", ".join(texts)


# --- All bars -------------------------------------------------------------------------


class Loop(BarSpec, HostCode):
    """The function that the tap of `hc.progress` calls."""

    __name__ = "hc.progress"
    stays = (
        "hc.progress draws its bar in this process. Leave it out, or print the step"
        " with hc.print"
    )

    def tap(self, step: Any, total: Any, metrics: Any, every: float, edge: Any) -> None:
        """Puts it into a program. `edge`: whether a step is shown in any case."""
        # If the queue is full, the newest value of a bar is worth more than the oldest.
        options = {"every": every, "always": edge, "when_full": "drop_oldest"}
        hc.tap(self, step, total, metrics, **options)

    def __call__(self, step: np.ndarray, total: Total, metrics: Metrics) -> None:
        if clock() < _bars.quiet.get(id(self), 0.0):
            return
        delivery = hc.current()
        assert delivery is not None
        new = DeviceSteps(
            delivery, step, self.total if total is None else total, metrics
        )
        with _bars.lock:
            _bars.move(self, delivery, new)


class Bars(PerProcess):
    """The bars on the screen, and the places of those that have closed.

    Attributes:
        open: the bars in the order in which they opened. An inner loop's bar is behind
            those of the loops around it, but for loops that `hc.observe` has found,
            which know their place.
        closed: (key, run) -> the place at which the bar closed, the newest last.
        together: keys whose runs overlap: several threads run the program.
        quiet: the `id` of an inner loop -> until when its steps are skipped.
    """

    def __init__(self) -> None:
        # Protects the rest and what it draws. Reentrant, since a signal handler may
        # wait at a barrier while its thread closes bars.
        self.lock = threading.RLock()
        self.open: list[Bar] = []
        self.closed: OrderedDict[tuple[Key, int], int] = OrderedDict()
        self.together: set[Key] = set()
        self.quiet: dict[int, float] = {}
        super().__init__()

    def move(self, loop: Loop, delivery: hc.typing.Current, new: DeviceSteps) -> None:
        """Shows a step that was delivered just now."""
        assert delivery.run is not None
        key = loop, delivery.place
        is_open = any(bar.key == key for bar in self.open)
        if new.is_beyond and not is_open and any(k == key for k, _ in self.closed):
            return  # its bars have ended
        bar = self._bar_of(key, delivery.run, new.place)
        bar.move(delivery, new)
        outer = self._around(bar)
        is_late = bar.loop.path and not bar.drawn
        if not is_late or time.perf_counter() - bar.began > LASTS:
            for shown_bar in (*(o for o in outer if not o.drawn), bar):
                shown_bar.draw()
        if not all(o.is_done for o in outer):
            self.quiet[id(loop)] = clock() + QUIET
        if bar.is_done and bar.encloses:
            # Its inner loops still run. It closes with their last step, which must not
            # be skipped.
            self.quiet.clear()
        elif bar.is_done and all(o.is_done for o in outer):
            for done in (bar, *reversed(outer)):
                self._close(done)
        now = clock()
        for other in [b for b in self.open if delivery.run not in b.runs]:
            limit = max(SILENT, 10 * other.longest_pause)
            if other.moves > 1 and now - other.moved > limit:
                self._close(other)

    def close_over(self, ending: bool) -> None:
        """Closes what is over at a barrier: all but the bars of Python loops."""
        with ExitStack() as stack:  # which closes all, even if one fails
            for bar in self.open:
                if ending or bar.is_done or not bar.spans_runs:
                    # A bar that has shown one step may belong to a loop that has just
                    # begun and goes on. It is erased, and comes again if it does.
                    stack.callback(self._close, bar, ending or bar.moves > 1)

    def _bar_of(self, key: Key, run: int, place: int) -> Bar:
        """The bar that a step moves, opened if need be."""
        is_first = place == key[0].initial + 1
        bars_of_loop = [bar for bar in self.open if bar.key == key]
        for bar in bars_of_loop:
            begins_again = run == EAGER and is_first and place < bar.place
            if run in bar.runs and not begins_again:
                return bar
        if run != EAGER and place > self.closed.get((key, run), place):
            # It was thought to be over, because another run began.
            self.together.add(key)
        elif is_first and key not in self.together:
            for bar in bars_of_loop:
                if self._around(bar):  # an inner loop starts again
                    bar.runs.append(run)
                    return bar
                self._close(bar, leave=bar.moves > 1)  # as in `close_over`
        elif not is_first:
            behind = [bar for bar in bars_of_loop if bar.place < place]
            if behind:  # a later run of a Python loop
                bar = max(behind, key=lambda bar: bar.place)
                bar.runs.append(run)
                bar.spans_runs = True
                return bar
        ended = [k for k, _ in reversed(self.closed)]
        bar = Bar(key, run, set(itertools.takewhile(lambda k: k != key, ended)))
        # If it was closed in an earlier run, a Python loop drives it.
        bar.spans_runs |= place > key[0].initial + 1 and key in ended
        self.open.append(bar)
        for outer in self._around(bar):
            outer.encloses |= key not in outer.before
        return bar

    def _around(self, bar: Bar) -> list[Bar]:
        """The bars of the loops around this bar's loop, the outermost first."""
        older = self.open[: self.open.index(bar)]
        path = bar.loop.path
        if path:
            # A step of an inner loop may be delivered before the outer loop's first, so
            # the order in which they opened does not tell.
            older = [o for o in older if not o.loop.path]
            inside = [o for o in self.open if o.loop.path and o is not bar]
            inside = [o for o in inside if o.loop.path == path[: len(o.loop.path)]]
            older += sorted(inside, key=lambda o: len(o.loop.path))
            older = [o for o in older if o.loop.path != path]
        return [o for o in older if o.spans_runs or set(o.runs) & set(bar.runs)]

    def _close(self, bar: Bar, leave: bool = True) -> None:
        """Closes a bar and those of its inner loops, which are erased.

        If that fails, they are forgotten all the same.
        """
        if bar not in self.open:  # it went with the bar of an outer loop
            return
        leave = leave and not self._around(bar)
        closing = [bar, *(b for b in self.open if bar in self._around(b))]
        self.quiet.clear()
        for closed_bar in reversed(closing):
            for run in closed_bar.runs:
                self.closed[closed_bar.key, run] = closed_bar.place
                self.closed.move_to_end((closed_bar.key, run))
            self.open.remove(closed_bar)
        while len(self.closed) > _CLOSED_AT_MOST:
            self.closed.popitem(last=False)
        with ExitStack() as stack:  # from the innermost
            for closed_bar in closing:
                stack.callback(closed_bar.close, leave and closed_bar is bar)


_bars = Bars()


def close_all(ending: bool = True) -> None:
    """Closes all bars at a barrier; if not `ending`, those that are over."""
    with _bars.lock:
        _bars.close_over(ending)


hc.monitor.at_barrier(close_all)


@functools.cache
def begin_tracebacks_on_a_line() -> None:
    """Has an error that ends the program close the bars before it is shown.

    A program that fails leaves its bar open. Its traceback would begin on its line.
    """
    hook_before = sys.excepthook

    def show(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        close_all()
        hook_before(kind, error, trace)

    sys.excepthook = show
