"""Runs a function on the thread of its call, or with a limit on a thread beside it."""

from __future__ import annotations

import contextvars
import functools
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from hostcall._core.daemon import limited
from hostcall._core.source import PACKAGE
from hostcall._core.wait import result_of, until_result, wait
from hostcall._policies.layer import Row, RowContext, TimedFunction
from hostcall._runtime import workers


class Here:
    """On the thread that is in the call."""

    sends = False

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn

    def rows(self, rows: Sequence[Row], site: RowContext) -> list[Any]:
        return [self._fn(*args, **kwargs) for args, kwargs in rows]


class OnThread:
    """`timeout=` of a plain function: on a worker, which is left behind if it is late.

    Python can't stop a thread, so the worker finishes a late job, and its result is
    dropped.
    """

    sends = False

    def __init__(self, timed: TimedFunction) -> None:
        self._timed = timed

    def rows(self, rows: Sequence[Row], site: RowContext) -> list[Any]:
        timed = self._timed
        current = site.current()
        worker = list[int]()  # its number, once it has begun
        context = contextvars.copy_context()

        def run_rows() -> list[Any]:
            results = []
            for number, (args, kwargs) in enumerate(rows):
                workers.answer_here(functools.partial(current, number))
                results.append(timed.fn(*args, **kwargs))
            return results

        def job() -> list[Any]:
            worker.append(threading.get_ident())
            return timed.settings.run(context.run, run_rows)  # type: ignore[no-any-return]

        waiting = threading.get_ident()
        # Before the function begins: from then on hc.monitor.status() shows its stack.
        workers.delegates[waiting] = worker
        outcome: Future[Any] | None = None
        try:
            outcome = limited.submit(job)
            if not wait(until_result(outcome), timed.timeout):
                raise timed.late(rows[0], _stack_of(worker))
            return result_of(outcome)  # type: ignore[no-any-return]
        finally:
            workers.delegates.pop(waiting, None)
            outcome = None  # breaks the cycle error -> this frame -> outcome -> error


def _stack_of(worker: list[int]) -> str:
    if not worker:
        return "its thread has not begun"
    frame = sys._current_frames().get(worker[0])
    if frame is None:
        return "its thread has ended"
    lines = traceback.format_stack(frame)
    # Without the frames that hostcall and the thread begin with.
    users_lines = [
        line for line in lines if PACKAGE not in line and "threading.py" not in line
    ]
    return "it is stuck in:\n" + "".join(users_lines or lines).rstrip()
