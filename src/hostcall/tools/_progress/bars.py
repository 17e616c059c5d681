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

import itertools
import threading
from collections import OrderedDict
from contextlib import ExitStack

import numpy as np

import hostcall as hc
from hostcall._core.host_code import HostCode
from hostcall._core.process import Owned
from hostcall.tools._progress import bar as one
from hostcall.tools._progress.bar import EAGER, Bar, DeviceSteps, Key
from hostcall.tools._progress.drawing import BarSpec

# Seconds for which the steps of an inner loop are skipped after one was shown. The
# first and last step of each run pass the engine's throttle, and an inner loop may
# start a hundred thousand times a second.
QUIET = 0.02
SILENT = 1.0  # seconds that a bar may rest while another moves
_CLOSED_AT_MOST = 64


class Loop(BarSpec, HostCode):
    """The function that the tap of `hc.progress` calls."""

    __name__ = "hc.progress"
    stays = (
        "hc.progress draws its bar in this process. Leave it out, or print the step"
        " with hc.print"
    )

    def __call__(
        self, step: np.ndarray, total: np.ndarray | None, metrics: one.Metrics
    ) -> None:
        if one.clock() < _bars.quiet.get(id(self), 0.0):
            return
        here = hc.current()
        assert here is not None
        new = DeviceSteps(here, step, self.total if total is None else total, metrics)
        with _bars.lock:
            _bars.move(self, here, new)


class Bars(Owned):
    """The bars on the screen, and the places of those that have closed.

    Attributes:
        open: the bars in the order in which they opened. An inner loop's bar is behind
            those of the loops around it.
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

    def renew(self) -> None:
        """In a forked child, forgets the parent's bars: it runs no programs.

        tqdm closes a bar that is garbage. In the child that would write into the
        parent's terminal, or wait for tqdm's lock, which nobody there holds.
        """
        for drawn in (drawn for bar in self.open for drawn in bar.drawn):
            drawn.bar.disable = True
        super().renew()

    def move(self, loop: Loop, here: hc.typing.Current, new: DeviceSteps) -> None:
        """Shows a step that was delivered just now."""
        assert here.run is not None
        key = loop, here.place
        if new.is_beyond and self._has_ended(key):
            return
        bar = self._bar_of(key, here.run, new.place)
        bar.show(here, new)
        outer = self._around(bar)
        if not all(o.is_done for o in outer):
            self.quiet[id(loop)] = one.clock() + QUIET
        if bar.is_done and bar.encloses:
            # Its inner loops still run. It closes with their last step, which must not
            # be skipped.
            self.quiet.clear()
        elif bar.is_done and all(o.is_done for o in outer):
            for done in (bar, *reversed(outer)):
                self._close(done)
        now = one.clock()
        for other in [b for b in self.open if here.run not in b.runs]:
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

    def _has_ended(self, key: Key) -> bool:
        """Whether this line has shown bars, and none of them is open."""
        is_open = any(bar.key == key for bar in self.open)
        return not is_open and any(k == key for k, _ in self.closed)

    def _bar_of(self, key: Key, run: int, place: int) -> Bar:
        """The bar that a step moves, opened if need be."""
        is_first = place == key[0].initial + 1
        same = [bar for bar in self.open if bar.key == key]
        for bar in same:
            begins_again = run == EAGER and is_first and place < bar.place
            if run in bar.runs and not begins_again:
                return bar
        if run != EAGER and place > self.closed.get((key, run), place):
            # It was thought to be over, because another run began.
            self.together.add(key)
        elif is_first and key not in self.together:
            for bar in same:
                if self._around(bar):  # an inner loop starts again
                    bar.runs.append(run)
                    return bar
                self._close(bar, leave=bar.moves > 1)  # as in `close_over`
        elif not is_first:
            behind = [bar for bar in same if bar.place < place]
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
        for each in reversed(closing):
            for run in each.runs:
                self.closed[each.key, run] = each.place
                self.closed.move_to_end((each.key, run))
            self.open.remove(each)
        while len(self.closed) > _CLOSED_AT_MOST:
            self.closed.popitem(last=False)
        with ExitStack() as stack:  # from the innermost
            for each in closing:
                stack.callback(each.close, leave and each is bar)


_bars = Bars()


def close_all(ending: bool = True) -> None:
    """Closes all bars at a barrier; if not `ending`, those that are over."""
    with _bars.lock:
        _bars.close_over(ending)


hc.monitor.at_barrier(close_all)
