"""Calls coroutine functions: runs them on the event loop, and waits for them.

`run_tasks` is for the rows of a call, and `run_one` and `settled` are for other host
code that meets a coroutine. task_run.py says what holds while they run.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hostcall._core.coroutines import CONCURRENCY
from hostcall._core.errors import DeadlockError
from hostcall._core.host_code import own
from hostcall._core.source import name_of
from hostcall._core.spec import Static
from hostcall._runtime import loop as loops
from hostcall._runtime import steps, task_texts, workers
from hostcall._runtime.steps import Row
from hostcall._runtime.task_run import TaskRun

if TYPE_CHECKING:
    import asyncio


def run_tasks(
    fn: Callable[..., Any],
    rows: Sequence[Row],
    current: Callable[[int], Any],
    settings: workers.Settings,
    *,
    concurrency: int | None = None,
    timeout: float | None = None,
    describe: Callable[[str], str] = str,
) -> list[Any]:
    """Runs `fn` on all rows as tasks; returns their results in row order.

    Code of hostcall's own may have steps, as in `rows.run_rows`.

    Args:
        fn: a function that returns an awaitable.
        rows: (args, kwargs) of each row.
        current: returns what `hc.current()` answers in a row, by the row's number.
        settings: the settings of JAX that the rows have.
        concurrency: how many rows of the function run at the same time. What counts
            as the same function: see `_lane_of`.
        timeout: seconds for all rows together, or None.
        describe: makes the message of a timeout from what is late.

    Raises:
        BaseException: what the first failing row raised.
        CallTimeoutError: the rows are late.
        DeadlockError: this thread is the loop's, and would wait for itself.
    """
    loop = refuse_on_loop(fn)
    limit = concurrency or CONCURRENCY
    with contextlib.ExitStack() as held:
        part, there, finish = _prepared(fn, rows, current, held)
        run = TaskRun(
            loop, part, name_of(fn), there, current, settings, _lane_of(fn), limit
        )
        values = run.wait(timeout, describe)
    return [end(value) for end, value in zip(finish, values, strict=True)]


def refuse_on_loop(fn: Callable[..., Any]) -> asyncio.AbstractEventLoop:
    """The loop, unless this thread is the loop's and would wait for itself.

    Raises:
        DeadlockError: it is.
    """
    loop = loops.current()
    if loops.is_here(loop):
        raise DeadlockError(task_texts.would_wait(name_of(fn)))
    return loop


def _prepared(
    fn: Any, rows: Sequence[Row], current: Any, held: contextlib.ExitStack
) -> tuple[Any, list[Row], list[Callable[[Any], Any]]]:
    """`steps.split`. A method of an object enters the objects of all rows first.

    The rows' objects are locked by this thread, in row order, until `held` is closed.
    Another thread that enters the same objects does so in the same order.
    """
    mine = own(fn)
    entered: list[Row] = []
    for number, (args, _) in enumerate(rows):
        entry = None if mine is None else mine.enter(current(number), held, args)
        if entry is None:
            break
        entered.append(((entry,), {}))
    if not entered:
        return steps.split(fn, list(rows))
    return steps.apply, entered, [steps.same] * len(entered)


def _lane_of(fn: Any) -> Any:
    """What counts as the same function: equal functions, and all rules of one."""
    mine = own(fn)
    return Static(fn if mine is None else mine.lane())


def run_one(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    current: Any = None,
) -> Any:
    """Runs one coroutine function on the loop, on behalf of other host code.

    The settings of host code are those of this thread.
    """
    row = args, kwargs or {}
    return run_tasks(fn, [row], lambda _: current, workers.Settings.here())[0]


def settled(value: Any) -> Any:
    """The value, or what it gives if it is a coroutine: it runs on the loop."""
    if not inspect.iscoroutine(value):
        return value
    here = workers.stand_in()

    def coroutine() -> Any:
        return value

    coroutine.__qualname__ = value.__qualname__
    return run_one(coroutine, (), current=here)
