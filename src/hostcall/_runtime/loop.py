"""The event loop on which coroutine functions run: hostcall's own, or the user's.

hostcall's own loop runs on one daemon thread, which the first call of a coroutine
function starts. So it works where another loop runs already, such as in a notebook.

The end of the process: _runtime/lifecycle.py runs `stop` after the engine has waited
for all calls, and after objects were closed, which may need the loop. It cancels what
still runs on the loop, a task of the user's for example, and ends the thread before the
interpreter ends. A handler of `atexit` that runs later gets a new loop.

A forked child has no thread for the loop, and starts one of its own (`PerProcess`).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import threading
from typing import TYPE_CHECKING, Any

from hostcall._core import config
from hostcall._core.daemon import Pool, daemon, start
from hostcall._core.errors import HostcallError
from hostcall._core.process import PerProcess
from hostcall._core.wait import until_thread_ends, wait
from hostcall._runtime import lifecycle
from hostcall._runtime.lifecycle import Phase

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger("hostcall")

# Threads for asyncio.to_thread, made when needed. asyncio's own limit is the number of
# cores plus 4. A coroutine function that calls itself keeps a thread for each depth,
# and would wait for ever for the next one; `concurrency` bounds the rows anyway.
_THREADS = 512

# Seconds that cancelled tasks have to end at the end of the process.
_LAST = 2.0


class _State(PerProcess):
    """`lock` protects the rest; it is never held while anything waits. A handler of a
    signal may come while this thread holds it, so it is reentrant.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.own: asyncio.AbstractEventLoop | None = None
        self.thread: threading.Thread | None = None
        self.stopping = threading.Event()  # set while `stop` waits
        super().__init__()


_state = _State()


def current() -> asyncio.AbstractEventLoop:
    """The loop for a call that begins now; starts hostcall's own if it is needed."""
    users_loop: asyncio.AbstractEventLoop | None = config.settings.loop
    if users_loop is not None:
        if users_loop.is_closed():
            raise HostcallError(
                "hostcall: the event loop given by hc.configure(loop=) is closed."
                " Give a running loop, or hc.configure(loop='own') for hostcall's",
                code="hc-closed",
            )
        return users_loop
    with _state.lock:
        if _state.own is None:
            loop = _new_loop()
            # If it fails, the next call tries again.
            thread = daemon("hostcall-loop", _run, loop)
            _state.thread = start(thread, "a coroutine function")
            _state.own = loop
        return _state.own


def _new_loop() -> asyncio.AbstractEventLoop:
    import asyncio

    module: Any = asyncio
    with contextlib.suppress(ImportError):
        module = importlib.import_module("uvloop")  # faster
    loop: asyncio.AbstractEventLoop = module.new_event_loop()
    loop.set_default_executor(Pool(_THREADS, thread_name_prefix="hostcall-to-thread"))
    return loop


def running() -> asyncio.AbstractEventLoop | None:
    """The loop that the calling thread runs, of whomever; None if it runs none."""
    # Whoever runs a loop has imported it, which takes longer than most calls.
    if "asyncio" not in sys.modules:
        return None
    import asyncio

    return asyncio._get_running_loop()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    import asyncio

    asyncio.set_event_loop(loop)
    while not _state.stopping.is_set():
        # asyncio lets SystemExit and KeyboardInterrupt of a task end the loop. Whoever
        # awaits that task gets the exception when the loop runs again.
        try:
            loop.run_forever()
        except BaseException as error:
            logger.error("a task on hostcall's event loop raised", exc_info=error)
    # Stopped by `stop`: what still runs is cancelled, then the loop is closed.
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=_LAST))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def stop() -> None:
    """Ends hostcall's own loop, if it runs."""
    with _state.lock:
        loop = _state.own
        thread = _state.thread
    if loop is None or thread is None or not thread.is_alive():
        return
    _state.stopping.set()
    with contextlib.suppress(RuntimeError):  # it was closed meanwhile
        loop.call_soon_threadsafe(loop.stop)
    # A task that blocks the loop is left behind with the thread, a daemon.
    if wait(until_thread_ends(thread), 2 * _LAST):
        _state.stopping.clear()
        with _state.lock:
            _state.own = None
            _state.thread = None


lifecycle.at_end(Phase.LOOP, stop)
