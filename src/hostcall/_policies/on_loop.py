"""Runs coroutine functions on the event loop, and waits for them.

The thread of a call hands its rows to the loop, and waits for all of them without the
GIL. On the loop, the rows of one function wait for their turn in a `Lane`, in the
order in which they came, whichever calls, devices and programs they belong to.

Guarantees
  * Results are in row order.
  * Of one function at most `concurrency` rows run at the same time at each depth: rows
    that coroutines call count apart from those that programs of the user's call.
  * The first row that fails cancels the others of its call, and its error is raised.
  * A timeout or an interrupt (Ctrl-C, the end of the process) cancels all rows of the
    call. The call then waits for them to end, for a second at most: a coroutine may
    refuse to be cancelled, or may block the loop.
  * Host code in a coroutine has the settings of a callback (its default device, the
    guard against deadlocks) whenever it runs, and never while it waits (stepping.py).

What belongs to which thread: lanes, tasks and what rows have left behind are touched by
the loop's thread only. The waiting thread reads them after `_done` was set, which
is the loop's last act for a call, or after it has given up; then it reads no values.
No lock is needed, since `_done` orders the two threads.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hostcall import _native
from hostcall._core.errors import DeadlockError, HostcallError
from hostcall._core.host_code import as_host_code
from hostcall._core.source import name_of
from hostcall._core.spec import Opaque
from hostcall._core.wait import SLOW, wait
from hostcall._policies.layer import (
    Current,
    Row,
    RowContext,
    TimedFunction,
    Value,
    apply,
    shared,
)
from hostcall._policies.stepping import awaited, stack_of
from hostcall._runtime import loop as loops
from hostcall._runtime import workers

if TYPE_CHECKING:
    import asyncio

# How many rows and calls of one function wait at the same time without `concurrency=`.
CONCURRENCY = 32
# Seconds that cancelled rows have to end after a timeout or an interrupt.
_GRACE = 1.0

# The functions of the tasks above, outermost first: of a coroutine, or of a thread that
# asyncio.to_thread started in one.
_above: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar(
    "hostcall_above", default=()
)


class OnLoop:
    """A function that returns awaitables.

    Args:
        timed: the function.
        concurrency: how many rows of the function run at the same time; None for the
            default. Equal functions, and all rules of one, count as the same function.
    """

    sends = False

    def __init__(self, timed: TimedFunction, concurrency: int | None = None) -> None:
        self.timed = timed
        self.limit = concurrency or CONCURRENCY
        host_code = as_host_code(timed.fn)
        is_ours = host_code is timed.fn
        self.lane = Opaque(host_code.lane() if is_ours else timed.fn)

    def rows(self, rows: Sequence[Row], site: RowContext) -> list[Value]:
        loop = free_loop(self.timed.fn)
        current = site.current()
        part, part_rows, finishes = self.timed.split(rows)
        with contextlib.ExitStack() as locks:
            # The objects of all rows are locked by this thread, in row order, until
            # they have ended. Another thread that enters them does so in that order.
            enter = as_host_code(self.timed.fn).enter
            entered_rows: list[Row] = []
            for i, (args, kwargs) in enumerate(rows):
                entered = enter(current(i), locks, args, kwargs)
                if entered is None:
                    assert not entered_rows, "rows are calls of one function"
                    break
                entered_rows.append(((entered,), {}))
            if entered_rows:
                part = apply
                part_rows = entered_rows
            tasks = _RowTasks(self, loop, part, part_rows, current)
            values = tasks.wait(rows[0], site)
        pairs = zip(finishes, values, strict=True)
        return [finish(value) for finish, value in pairs]


def free_loop(fn: Callable[..., Any]) -> asyncio.AbstractEventLoop:
    """The loop, unless this thread is the loop's and would wait for itself.

    Raises:
        DeadlockError: it is.
    """
    loop = loops.current()
    if loops.running() is loop:
        raise DeadlockError(
            f"hostcall: a program that calls the coroutine function `{name_of(fn)}` was"
            " run on the thread of the event loop that should run it, so it would wait"
            " for itself. Run the program on another thread: await"
            " asyncio.to_thread(program, x)"
        )
    return loop


def run_one(fn: Callable[..., Any], *args: Any) -> Any:
    """Runs one coroutine function on the loop, on behalf of other host code.

    The settings of host code are those of this thread, and so is `hc.current()`.
    """
    timed = TimedFunction(fn, workers.ThreadSettings.here())
    (value,) = OnLoop(timed).rows([(args, {})], RowContext())
    return value


def settled(value: Any) -> Any:
    """The value, or what it gives if it is a coroutine: it runs on the loop."""
    if not inspect.iscoroutine(value):
        return value

    def coroutine() -> Any:
        return value

    coroutine.__qualname__ = value.__qualname__
    return run_one(coroutine)


class Lane:
    """The rows of one function on one loop: how many run, and which wait. It exists
    while a call has it, and only the thread of the loop touches it.
    """

    def __init__(self) -> None:
        self.running = 0
        self.waiting: deque[tuple[_RowTasks, int]] = deque()


class _RowTasks:
    """The rows of one call.

    Attributes:
        over: a row has failed, or the waiting thread has given up; no row starts.
        limit: how many rows of the lane may run when one of these starts.
    """

    def __init__(
        self,
        of: OnLoop,
        loop: asyncio.AbstractEventLoop,
        fn: Callable[..., Any],
        rows: Sequence[Row],
        current: Current,
    ) -> None:
        assert rows, "without rows nothing would set `_done`"
        above = _above.get()
        # The tasks above hold their places until these rows have ended. So there is a
        # lane for each depth, and places are only waited for by rows of the same depth,
        # which end without a place of it. Two functions that call each other would wait
        # in a circle if each had one lane for itself.
        self._lane: Lane = shared.one((Lane, loop, of.lane, len(above)), Lane)
        self.limit = of.limit
        self._timed = of.timed
        self._name = name_of(of.timed.fn)
        self._loop = loop
        self._fn = fn
        self._rows = rows
        self._current = current
        self._context = contextvars.copy_context()
        self._context.run(_above.set, (*above, of.lane))
        if _native.on_tap_worker():
            self._context.run(workers.in_tap.set, True)
        self._values: list[Value] = [None] * len(rows)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._done = threading.Event()
        self._failed: tuple[int, BaseException] | None = None
        self._left = len(rows)
        self._begun = False
        self.over = False

    # --- On the waiting thread -------------------------------------------------------

    def wait(self, first: Row, site: RowContext) -> list[Value]:
        """Runs the rows on the loop; returns their results. To be called once.

        Raises the exception of the row that failed first.
        """
        try:
            self._post(self._begin)
            seconds = self._timed.timeout
            if not wait(self._done.wait, seconds, self._look, self._blocked):
                raise self._timed.late(first, self._late())
            if self._failed is None:
                return self._values
            number, error = self._failed
            site.failed(number)
            try:
                raise error
            finally:
                del error
        except BaseException:
            if not self._done.is_set():
                self._give_up()
            raise
        finally:
            # Breaks cycles: an exception that leaves here holds this frame.
            self._failed = None
            self._values = []

    def _look(self) -> None:
        if self._loop.is_closed():
            raise self._closed()

    def _closed(self) -> HostcallError:
        return HostcallError(
            "hostcall: the event loop was closed before the coroutine function"
            f" `{self._name}` had ended. Keep the loop of hc.configure(loop=) open"
            " until the programs have ended; hostcall's own closes at the end of the"
            " process",
            code="hc-worker",
        )

    def _blocked(self) -> str:
        """What keeps the loop from taking up the rows; "" if it has. `wait` logs it."""
        if self._begun:
            return ""
        if not self._loop.is_running():
            return (
                "hostcall: a program waits for the coroutine function"
                f" `{self._name}`, but the event loop given by hc.configure(loop=) does"
                " not run. Run it on another thread, or leave out loop= for hostcall's"
                " own"
            )
        return (
            f"hostcall: a program has waited {SLOW:g} s for the event loop to take up"
            f" `{self._name}`: something blocks the loop's thread. If it waits for the"
            " program itself, run that on another thread: await"
            " asyncio.to_thread(program, x). In coroutine functions, use await"
            " asyncio.sleep and the like in place of calls that block"
        )

    def _give_up(self) -> None:
        try:
            self._post(self._cancel)
        except HostcallError:
            return  # the loop is closed, so no row runs
        wait(self._done.wait, _GRACE)

    def _post(self, step: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(step)
        except RuntimeError as error:
            raise self._closed() from error

    def _late(self) -> str:
        """Which row has not ended, and where it waits; completes a sentence."""
        # The loop's thread may change the dict meanwhile; a copy is one step of C.
        tasks = dict(self._tasks)
        if not tasks:
            why = "" if self._begun else ": the event loop has not taken it up"
            return f"it has not begun{why}"
        number = min(tasks)
        n = len(self._rows)
        row = "it" if n == 1 else f"row {number} of {n}"
        return f"{row} {stack_of(tasks[number].get_coro())}"

    # --- On the loop -----------------------------------------------------------------

    def _begin(self) -> None:
        self._begun = True
        if self.over:
            return
        self._lane.waiting.extend((self, number) for number in range(self._left))
        self._fill()

    def _fill(self) -> None:
        """Starts the rows that wait in the lane, as far as there is room.

        The lane has the rows of all calls of the function, in the order in which they
        came, and each row brings the limit of its own call. So the row in front decides
        alone: if there is no room for it, it waits, and all behind it wait too, also
        those whose limit is higher. Otherwise calls with a high limit could keep one
        with a low limit waiting for ever.

            running 2    waiting: A's row 7 (limit 2) | B's row 0 (limit 32) | ...

        waits for one of the two to end, and then starts A's row, then B's. Rows of a
        call that is over are dropped wherever the front meets them, whether or not
        there is room: they take none.

        Called after each change of `running`, `waiting` or `over`, on the loop's
        thread. `_start` makes a task and runs nothing of it, so the lane stays as it is
        between the steps.
        """
        lane = self._lane
        while lane.waiting:
            run, number = lane.waiting[0]
            if not run.over and lane.running >= run.limit:
                return
            lane.waiting.popleft()
            if not run.over:
                lane.running += 1
                run._start(number)

    def _start(self, number: int) -> None:
        # A copy: the tasks of rows run in turns, and may set variables of their own.
        context = self._context.copy()
        current = functools.partial(self._current, number)
        # For all threads: asyncio.to_thread takes the context to another one.
        context.run(workers.answer.set, (None, current))
        task = self._loop.create_task(self._row(number), context=context)
        self._tasks[number] = task
        task.add_done_callback(functools.partial(self._ended, number))

    async def _row(self, number: int) -> None:
        # Nothing but CancelledError may leave a task: asyncio lets KeyboardInterrupt
        # and SystemExit end the loop.
        import asyncio

        try:
            args, kwargs = self._rows[number]
            row = functools.partial(self._fn, *args, **kwargs)
            self._values[number] = await awaited(row, self._timed.settings)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._fail(number, error)

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        """Called when the task of a row has ended, however it has."""
        del self._tasks[number]
        self._left -= 1
        self._lane.running -= 1
        assert self._lane.running >= 0, "each row that ends has been started"
        if task.cancelled() and not self.over:
            error = HostcallError(
                f"hostcall: `{self._name}` was cancelled, but not by hostcall:"
                " something cancelled its task, or it raised asyncio.CancelledError",
                code="hc-worker",
            )
            self._fail(number, error)
        self._settle()

    def _settle(self) -> None:
        if self._left == 0 or (self.over and not self._tasks):
            self._done.set()
        self._fill()

    def _fail(self, number: int, error: BaseException) -> None:
        if not self.over:  # else it failed while it was being cancelled
            self._failed = number, error
            self._stop_all(but=number)

    def _stop_all(self, but: int | None = None) -> None:
        self.over = True
        for number, task in list(self._tasks.items()):
            if number != but:
                task.cancel()

    def _cancel(self) -> None:
        self._stop_all()
        if self._begun:
            self._settle()
