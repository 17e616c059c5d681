"""Draws bars: with tqdm, as lines in a log, or with a factory of the user's.

One thread at a time calls these functions (bars.py).

Rates. A bar is made when its first step has been delivered, some milliseconds after the
device has passed it, or more if a package is imported first. Steps that were queued
meanwhile then come at once. So a bar is made with that step as `initial`, and its clock
starts when the device passed it: its rate is that of the steps since then. A factory of
the user's gets the loop's own `initial`, and all steps since as updates.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import hostcall as hc
from hostcall.errors import PackageError

Factory: TypeAlias = Callable[..., Any]  # of a bar: tqdm's, or a user's

REDRAW = 0.02  # seconds between two drawings of one bar
LINE_SECONDS = 10.0  # between two lines where there is no terminal


@dataclass(frozen=True)
class BarSpec:
    """What a call of `hc.progress` says of its loop.

    Equal for equal lines, so that JAX's caches hit.

    Attributes:
        total, desc, unit, initial, bar, rows: as given to `hc.progress`; `total` is
            None if it is not known when the program is traced.
        path: of a loop that `hc.observe` has found, the loops that it is in, the
            outermost first, and itself. Its bar is drawn when it has lasted, and erased
            if it is inside another's. () for others.
    """

    total: int | None
    desc: str | None
    unit: str
    initial: int
    # A line in a Python loop may make a new function in each step.
    bar: Literal["auto"] | Factory = field(compare=False)
    rows: str
    path: tuple[str, ...] = ()


class Drawn:
    """A bar with tqdm's methods, which is told places instead of increments."""

    def __init__(
        self, loop: BarSpec, desc: str | None, total: int | None, n: int, began: float
    ) -> None:
        """Makes the bar of a loop whose device had done `n` steps at `began`."""
        make = factory(loop.bar)
        self._make = functools.partial(make, desc=desc, total=total, unit=loop.unit)
        self._n = self._first = n if loop.bar == "auto" else loop.initial
        self.bar = self._make(initial=self._n)
        self._is_tqdm = hasattr(self.bar, "last_print_n")
        if self._is_tqdm:
            age = max(time.time() - began, 0.0)
            self.bar.start_t -= age
            self.bar.last_print_t -= age

    def show(self, n: int, postfix: str, at_once: bool) -> None:
        if postfix:
            self.bar.set_postfix_str(postfix, refresh=False)
        if n != self._n or not self._is_tqdm:
            self.bar.update(n - self._n)
        self._n = n
        if at_once and self._is_tqdm:
            self.bar.refresh()

    def restart(self, n: int) -> None:
        """Begins again in the same place, with `n` steps. The next `show` draws it."""
        if hasattr(self.bar, "reset"):
            if self._is_tqdm:  # it draws at once, with the rate since `initial`
                self.bar.initial = 0
            self.bar.reset()
            self._n = 0
        else:
            self.bar.close()
            self.bar = self._make(initial=self._first)
            self._n = self._first
        if self._is_tqdm:
            self.bar.n = self.bar.last_print_n = self.bar.initial = self._n = n

    def close(self, leave: bool) -> None:
        """Draws the bar a last time, and leaves it on the screen, or erases it."""
        if not leave:
            self.bar.leave = False
        self.bar.close()


def write_line(text: str) -> None:
    """Writes a text to stderr as lines of their own, above the bars."""
    if sys.stderr is None:  # in pythonw, or in a daemon
        return
    tqdm = sys.modules.get("tqdm")
    if tqdm is not None and sys.stderr.isatty():
        tqdm.tqdm.write(text, file=sys.stderr)
        return
    sys.stderr.write(f"{text}\n")  # at once, beside what the program writes
    sys.stderr.flush()


def _draws_here() -> bool:
    """Whether this process draws. The first one does, unless it gets no step: it has no
    device of the program, or the program is partitioned and its first device is another
    process's.
    """
    here = hc.current()
    if here is None or here.process == 0:
        return True
    owners = {device.process_index for device in here.devices}
    is_first = len(owners) > 1 and here.devices[0].process_index == here.process
    return is_first and (0 not in owners or not here.mesh_shape)


def factory(bar: Literal["auto"] | Factory) -> Factory:
    if bar != "auto":
        return bar
    from tqdm.auto import tqdm

    in_notebook = any(cls.__module__ == "tqdm.notebook" for cls in tqdm.__mro__)
    # There is no stderr in pythonw, or in a daemon.
    if not _draws_here() or (sys.stderr is None and not in_notebook):
        return functools.partial(tqdm, disable=True)
    if not (in_notebook or sys.stderr.isatty()):
        return _lines()
    return functools.partial(
        tqdm, file=sys.stderr, mininterval=REDRAW, miniters=1, dynamic_ncols=True
    )


def need_tqdm() -> None:
    """Imports what draws the bar, so that its absence is told where it is asked for."""
    who = "hc.progress(bar='auto')"
    extra = "hostcall[progress]"
    instead = "set HOSTCALL_PROGRESS=0 in the environment to run without bars"
    package = PackageError.needed("tqdm", who, extra, instead)
    # Makes tqdm's lock. If the first bar is drawn while the process ends, it is too
    # late: multiprocessing, which the lock belongs to, has ended before, and from
    # Python 3.14 on warns of a lock that is left.
    package.tqdm.get_lock()


def _lines() -> Factory:
    """Tqdm's bar as whole lines without control codes, for files and pipes."""
    from tqdm.std import tqdm

    class Lines(tqdm):  # type: ignore[misc]
        leave: Any
        written = None
        due = 0.0

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            del pos
            if msg is None and self._time() >= self.due and self.n != self.written:
                self.written, self.due = self.n, self._time() + LINE_SECONDS
                self.fp.write(f"{self}\n")
                self.fp.flush()

        def close(self) -> None:
            if self.leave and not self.disable:
                self.due = 0.0
                self.display()
            self.leave = False  # or tqdm writes an empty line
            super().close()

    # With a delay, the constructor writes no line: it does not know the metrics yet.
    return functools.partial(Lines, file=sys.stderr, miniters=1, ascii=True, delay=1e-9)
