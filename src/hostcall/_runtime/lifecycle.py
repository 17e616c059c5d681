"""How a process begins with the engine, and how it ends, whatever the way out.

    RUNNING ──> ENDING    programs that must run are waited for
                DRAINING  what taps have queued is delivered
                CLOSED    no call enters; those under way end
                ENDED     our threads are joined, the interpreter may go

    way out                                  what it does
    the script ends, sys.exit, an error      atexit: all of the above
    a child of multiprocessing ends          a Finalize of its own: children of fork and
                                             forkserver leave by os._exit, before atexit
    SIGTERM without a handler                taps are delivered, then the signal ends it
    Ctrl-C, in any of the waits              ends at once, with status 130
    os.fork                                  in the child: FORKED, all is refused
    a daemon thread in a call                left behind, as Python leaves it

Each wait is in slices, so that Ctrl-C comes through. There is one clock (`_watcher`):
what has taken HOSTCALL_EXIT_TIMEOUT since the end began is named and interrupted, and
again each time that it has taken as long. Two things have no limit: programs that go
on, and calls on XLA's threads that no interrupt ends, since the interpreter can't be
taken from under them. docs/design/threads.md has the whole.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading

from hostcall import _jax, _native
from hostcall._core import failures
from hostcall._runtime import delivery, fork, host_device, watcher

logger = logging.getLogger("hostcall")

# A wait looks up so often, for Ctrl-C to come through.
_SLICE = 0.05

_lock = threading.Lock()
_ending = False


def begin() -> None:
    """Called once, when the engine is first used."""
    os.register_at_fork(after_in_child=_after_fork)
    watcher.start()
    atexit.register(end)
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing import util

        # After the program's own finalizers, which may still tap.
        util.Finalize(None, end, kwargs={"interpreter": False}, exitpriority=-100)


def end(*, interpreter: bool = True) -> None:
    """Runs the state machine, once.

    Args:
        interpreter: the interpreter itself ends after this, and with it every daemon
            thread; else only the process does, by os._exit.
    """
    global _ending
    with _lock:
        if _ending or _native.closed():  # closed: a forked child
            return
        _ending = True
    try:
        watcher.watch_the_end()
        _wait_for_programs()
        delivery.flush(None, "the end of the process")
        _native.close()
        _wait_for_calls(interpreter)
        delivery.stop()
        watcher.stop()
        _native.bury()
    except KeyboardInterrupt:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
        os._exit(130)


def _wait_for_programs() -> None:
    for failure in failures.failures_of_effects():
        what = str(failure) if isinstance(failure, Exception) else repr(failure)
        logger.error("a program failed while the process was ending: %s", what)


def _wait_for_calls(interpreter: bool) -> None:
    watcher.watch_calls_too()
    if interpreter:
        _native.leave_behind()
    while not _native.wait_idle(_SLICE):
        daemons = [t.ident for t in threading.enumerate() if t.daemon and t.ident]
        if _native.only_on_threads(daemons):
            return


def _after_fork() -> None:
    fork.after_fork()
    delivery.after_fork()
    if not _native.forked():  # JAX had not started
        watcher.start()
        return
    watcher.after_fork()
    # The end of a client joins its threads, which do not exist here: a child that ends
    # by sys.exit would die of it (JAX's own does).
    for client in (*_jax.clients(), *host_device.clients()):
        _native.keep_for_ever(client)
