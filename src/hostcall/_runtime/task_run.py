"""The rows of one call of a coroutine function, as tasks on the event loop.

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
    guard against deadlocks) whenever it runs, and never while it waits: other tasks run
    on the same thread then.

What belongs to which thread: lanes, tasks and what rows have left behind are touched by
the loop's thread only. The waiting thread reads them after `_done` was released, which
is the loop's last act for a call, or after it has given up; then it reads no values.
No lock is needed, since `_done` orders the two threads.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import logging
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from hostcall import _native
from hostcall._core.errors import CallTimeoutError, HostcallError
from hostcall._core.wait import slice_of, wait
from hostcall._runtime import flights, task_texts, waits, workers
from hostcall._runtime.steps import Row

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger("hostcall")

# Seconds that cancelled rows have to end after a timeout or an interrupt.
_GRACE = 1.0
# Seconds after which a loop that has not taken up a call is named in the log.
_BLOCKED = 5.0

# The lanes of each loop, by function. A lane exists while it has rows. Only the thread
# of its loop touches the inner dict.
lanes_of: dict[asyncio.AbstractEventLoop, dict[Any, Lane]] = {}


# The functions of the tasks above, outermost first: of a coroutine, or of a thread that
# asyncio.to_thread started in one.
_above: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar(
    "hostcall_above", default=()
)


class Lane:
    """The rows of one function on one loop: how many run, and which wait."""

    def __init__(self) -> None:
        self.running = 0
        self.waiting: deque[tuple[TaskRun, int]] = deque()

    def fill(self) -> None:
        while self.waiting:
            run, number = self.waiting[0]
            if not run.over and self.running >= run.limit:
                return
            self.waiting.popleft()
            if not run.over:
                self.running += 1
                run.start(number)


class TaskRun:
    """The rows of one call.

    Attributes:
        over: a row has failed, or the waiting thread has given up; no row starts.
        limit: how many rows of the lane may run when one of these starts.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fn: Callable[..., Any],
        name: str,
        rows: Sequence[Row],
        current: Callable[[int], Any],
        settings: workers.Settings,
        key: Any,
        limit: int,
    ) -> None:
        above = _above.get()
        # The tasks above hold their places until these rows have ended. So there is a
        # lane for each depth, and places are only waited for by rows of the same depth,
        # which end without a place of it. Two functions that call each other would wait
        # in a circle if each had one lane for itself.
        self._key = key, len(above)
        self._loop, self.limit = loop, limit
        self._fn, self._rows, self._current = fn, rows, current
        self._settings, self._name = settings, name
        call = _native.current()
        self._place = 0 if call is None else call[0].number
        self._context = contextvars.copy_context()
        self._context.run(_above.set, (*above, key))
        if _native.on_tap_worker():
            self._context.run(workers.in_tap.set, True)
        self._values: list[Any] = [None] * len(rows)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._done = threading.Lock()
        self._done.acquire()
        self._failed: tuple[int, BaseException] | None = None
        self._left = len(rows)
        self._begun = self.over = False

    # --- On the waiting thread -------------------------------------------------------

    def wait(self, timeout: float | None, describe: Callable[[str], str]) -> list[Any]:
        started = time.monotonic()
        until = None if timeout is None else started + timeout
        told = False
        try:
            self._post(self._begin)
            while not self._done.acquire(timeout=slice_of(until)):
                waited = time.monotonic() - started
                if timeout is not None and waited >= timeout:
                    flights.tell("a call takes longer than its timeout")
                    raise CallTimeoutError(describe(self._late()))
                if self._loop.is_closed():
                    raise HostcallError(task_texts.closed(self._name), code="hc-worker")
                if not told and not self._begun and waited > _BLOCKED:
                    told = True
                    logger.warning(
                        "%s", task_texts.blocked(self._name, self._loop, _BLOCKED)
                    )
            if self._failed is None:
                return self._values
            number, error = self._failed
            try:
                error.__dict__["hostcall_row"] = number
                raise error
            finally:
                del error
        except BaseException:
            if not self._begun or self._left:
                self._give_up()
            raise
        finally:
            # Breaks cycles: an exception that leaves here holds this frame.
            self._failed = None
            self._values = []

    def _give_up(self) -> None:
        try:
            self._post(self._cancel)
        except HostcallError:
            return  # the loop is closed, so no row runs
        wait(lambda seconds: self._done.acquire(timeout=seconds), _GRACE)

    def _post(self, step: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(step)
        except RuntimeError as error:
            # Nothing runs on a closed loop, so nobody else uses its lanes any more.
            lanes_of.pop(self._loop, None)
            raise HostcallError(
                task_texts.closed(self._name), code="hc-worker"
            ) from error

    def _late(self) -> str:
        # The loop's thread may change the dict meanwhile; a copy is one step of C.
        tasks = dict(self._tasks)
        if not tasks:
            return "it has not begun" + (
                "" if self._begun else ": the event loop has not taken it up"
            )
        number = min(tasks)
        stack = task_texts.stack_of(tasks[number].get_coro())
        n = len(self._rows)
        row = "it" if n == 1 else f"row {number} of {n}"
        return f"{row} {stack}"

    # --- On the loop -----------------------------------------------------------------

    def _begin(self) -> None:
        self._begun = True
        if self.over:
            return
        lanes = lanes_of.setdefault(self._loop, {})
        self._lane = lanes.setdefault(self._key, Lane())
        self._lane.waiting.extend((self, number) for number in range(self._left))
        self._fill()

    def _fill(self) -> None:
        lane = self._lane
        lane.fill()
        if not lane.running and not lane.waiting:
            lanes = lanes_of[self._loop]
            if lanes.get(self._key) is lane:
                del lanes[self._key]
            if not lanes:
                lanes_of.pop(self._loop, None)

    def start(self, number: int) -> None:
        context = self._context.copy()
        context.run(workers.in_task.set, functools.partial(self._current, number))
        task = self._loop.create_task(self._row(number), context=context)
        self._tasks[number] = task
        task.add_done_callback(functools.partial(self._ended, number))

    async def _row(self, number: int) -> None:
        # Nothing but CancelledError may leave a task: asyncio lets KeyboardInterrupt
        # and SystemExit end the loop.
        import asyncio

        # In a trace, a row of its own: others run on this thread meanwhile.
        lane = waits.Lane(self._place, number, 1) if _native.events_on() else None
        try:
            args, kwargs = self._rows[number]
            self._values[number] = await _made(self._fn, args, kwargs, self._settings)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._fail(number, error)
        finally:
            if lane is not None:
                lane.end()

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        del self._tasks[number]
        self._left -= 1
        self._lane.running -= 1
        if task.cancelled() and not self.over:
            self._fail(
                number,
                HostcallError(task_texts.cancelled(self._name), code="hc-worker"),
            )
        if self._left == 0 or (self.over and not self._tasks):
            self._left = 0
            self._done.release()
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
        if self._begun and not self._tasks and self._left:
            self._left = 0
            self._done.release()
        if self._begun:
            self._fill()


async def _made(
    fn: Callable[..., Any], args: Any, kwargs: Any, settings: workers.Settings
) -> Any:
    awaitable = settings.run(functools.partial(fn, *args, **kwargs))
    if not inspect.isawaitable(awaitable):
        return awaitable  # a plain function of a HostFunction's or an object's
    if not inspect.iscoroutine(awaitable):
        return await awaitable  # a future, which runs no code of its own
    return await _stepped(awaitable, settings.run)


@types.coroutine
def _stepped(
    awaited_in_steps: Any, run: Callable[..., Any]
) -> Generator[Any, Any, Any]:
    """Awaits, with the settings of host code during each step, not between them."""
    step: Callable[[Any], Any] = awaited_in_steps.send
    given: Any = None
    try:
        while True:
            try:
                waits_for = run(step, given)
            except StopIteration as end:
                return end.value
            try:
                step, given = awaited_in_steps.send, (yield waits_for)
            except GeneratorExit:
                raise
            except BaseException as error:
                step, given = awaited_in_steps.throw, error
    finally:
        awaited_in_steps.close()
