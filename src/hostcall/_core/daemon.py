"""Threads of hostcall's own that call the user's functions.

From Python 3.14 on a thread may inherit the context variables of the thread that starts
it, and without the GIL it does so by default. Then everything that this thread calls
would belong to whatever started it: in a notebook, prints would go to that cell for
ever. So these threads start with no context variables set.
"""

from __future__ import annotations

import contextvars
import functools
import queue
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

from hostcall import _native
from hostcall._core.errors import HostcallError
from hostcall._core.process import PerProcess
from hostcall._core.wait import until_thread_ends, wait


def daemon(name: str, target: Callable[..., Any], *args: Any) -> threading.Thread:
    """A daemon thread; not started yet."""
    context: dict[str, Any] = {}
    if sys.version_info >= (3, 14):
        # An empty one: else the thread gets that of whoever happens to start it.
        context["context"] = contextvars.Context()
    return threading.Thread(target=target, args=args, name=name, daemon=True, **context)


def start(thread: threading.Thread, user: str) -> threading.Thread:
    """Starts a thread for `user`, which the error names if Python starts none any more:
    from 3.12 on, it refuses to in handlers of `atexit`.
    """
    try:
        thread.start()
        return thread
    except RuntimeError as error:
        if "shutdown" not in str(error):
            raise
        raise HostcallError(
            f"hostcall: {user} needs a new thread, and Python starts none while the"
            " process ends. In a handler of atexit, use what needs no thread: a call"
            " without timeout=, a plain function in place of a coroutine function",
            code="hc-closed",
        ) from None


class Service(PerProcess):
    """A thread that lives as long as the process. A forked child starts its own.

    Attributes:
        thread: None until it is started.
    """

    def __init__(self, name: str, target: Callable[[], Any], user: str) -> None:
        self._name = name
        self._target = target
        self._user = user
        self.thread: threading.Thread | None = None
        super().__init__()

    def after_fork(self) -> None:
        if self.thread is not None:
            # Kept, as all that is the parent's: see the top of process.py.
            _native.keep_for_ever(self.thread)
            self.thread = None

    def start(self) -> None:
        """Starts it, once. If it does not begin, the next call tries again.

        It is noted before it runs: a signal handler may come in between and start it
        too, or raise.
        """
        if self.thread is not None:
            return
        thread = self.thread = daemon(self._name, self._target)
        try:
            start(thread, self._user)
        except BaseException:
            # Ctrl-C may come after it has begun; then it stays noted.
            if thread.ident is None:
                self.thread = None
            raise

    def join(self, seconds: float | None = None) -> None:
        """Waits until it has ended, if it was started, but no longer than `seconds`."""
        if self.thread is not None:
            wait(until_thread_ends(self.thread), seconds)


Job = tuple[futures.Future[Any], Callable[[], Any]]


def fulfil(future: futures.Future[Any], job: Callable[[], Any]) -> None:
    """Runs a job, unless it was cancelled, and gives its outcome to the future."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(job())
    except BaseException as error:
        future.set_exception(error)
        del future  # breaks the cycle future -> error -> this frame -> future


class Pool(futures.ThreadPoolExecutor):
    """A pool whose threads, which `submit` starts, have no context variables set."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        return contextvars.Context().run(super().submit, fn, *args, **kwargs)


class DaemonPool(PerProcess, futures.Executor):
    """A pool of daemon threads. A forked child gets new ones.

    A ThreadPoolExecutor takes nothing more when the main thread has ended, though
    programs may still run. And the process then waits for its threads: for ever, if a
    row that was interrupted or was late never ends.
    """

    def __init__(
        self,
        threads: int | None,
        begin: Callable[[], object] = lambda: None,
        name: str = "hostcall-rows",
        user: str = "a parallel row",
    ) -> None:
        """At most `threads`; with None no job ever waits for the end of another.

        `begin()` is called first on each thread, which has this `name`. `user` is what
        jobs are.
        """
        self._max_workers = threads  # asked for where ThreadPoolExecutor has it
        self._begin = begin
        self._name = name
        self._user = user
        self._start_anew()
        super().__init__()

    def _start_anew(self) -> None:
        self._jobs = queue.SimpleQueue[Job | None]()
        # Of the two below. A handler of a signal may use the pool, too.
        self._lock = threading.RLock()
        self._threads = 0
        self._free = 0  # threads that wait for a job, less the jobs that wait for them

    def after_fork(self) -> None:
        _native.keep_for_ever((self._jobs, self._lock))
        self._start_anew()

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future = futures.Future[Any]()
        with self._lock:
            limit = self._max_workers
            if self._free <= 0 and (limit is None or self._threads < limit):
                try:
                    start(daemon(self._name, self._run), self._user)
                    self._threads += 1
                    self._free += 1
                except HostcallError:
                    # At the end of the process the threads that there are go on, unless
                    # the jobs wait for each other, as they may without a limit.
                    if limit is None or self._threads == 0:
                        raise
            self._free -= 1  # for this job, which a thread takes or will take
        job = functools.partial(fn, *args, **kwargs)
        self._jobs.put((future, job))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends each thread after the jobs that are queued; waits for none."""
        del wait, cancel_futures  # of an Executor; a row that hangs would hang this too
        with self._lock:
            for _ in range(self._threads):
                self._jobs.put(None)

    def _run(self) -> None:
        self._begin()
        while (job := self._jobs.get()) is not None:
            future, run = job
            fulfil(future, run)
            del job, future, run  # they hold the row's values
            with self._lock:
                self._free += 1


# What has a limit in seconds. It may hang for ever, so nobody waits for these threads
# at the end of the process.
limited = DaemonPool(None, name="hostcall-timeout", user="a limit in seconds")
