"""`timeout=` of a plain function: it runs on a thread that may be left behind."""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import traceback
from typing import Any

from hostcall._core.daemon import DaemonPool
from hostcall._core.wait import wait
from hostcall._runtime import workers
from hostcall._runtime.bound import Bound, Row

_threads = DaemonPool(None, what="timeout=")


def run_with_timeout(run: Bound, row: Row, current: Any) -> Any:
    """Runs the function on a worker; raises CallTimeoutError if it is late.

    Python can't stop a thread, so the worker finishes a late job, and its result is
    dropped. `current` is what `hc.current()` answers.
    """
    args, kwargs = row
    done = threading.Event()
    context = contextvars.copy_context()
    worker: list[int] = []

    def job() -> Any:
        worker.append(threading.get_ident())
        with workers.as_host_code(run.settings, lambda: current):
            return context.run(run.fn, *args, **kwargs)

    waiting = threading.get_ident()
    outcome = _threads.submit(job)
    outcome.add_done_callback(lambda _: done.set())
    workers.delegates[waiting] = worker
    try:
        if not wait(done.wait, run.timeout):
            raise run.late(row, _stack_of(worker))
        return outcome.result()
    finally:
        workers.delegates.pop(waiting, None)
        del outcome  # breaks the cycle error -> traceback -> this frame -> error


def _stack_of(worker: list[int]) -> str:
    if not worker:
        return "its thread has not begun"
    frame = sys._current_frames().get(worker[0])
    if frame is None:
        return "its thread has ended"
    lines = traceback.format_stack(frame)
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the package
    users = [line for line in lines if here not in line and "threading.py" not in line]
    return "it is stuck in:\n" + "".join(users or lines).rstrip()
