"""Starts the engine in a process, and ends it with the process.

The idea: a callback on one of XLA's threads crashes the process if the interpreter ends
under it. So at exit the engine first lets everything finish that must run, then takes
no more calls, and only then lets the interpreter go.

Guarantees
  * The ending thread's programs with effects have run; queued taps are delivered.
  * After ENDED no thread of XLA's enters Python.
  * What hangs is named in the log and interrupted, after HOSTCALL_EXIT_TIMEOUT and
    again each time that passes (_runtime/watcher.py). Two waits have no limit: for
    programs that still run, and for calls on XLA's threads that no interrupt ends.
  * Ctrl-C ends the process in any of the waits. Those for taps and calls return to
    Python every 50 ms; while a program is waited for, the watcher interrupts its
    callbacks.

The steps of `end`

  1. ENDING    wait for programs with effects
  2. DRAINING  deliver the queued taps
  3. CLOSED    no call enters Python any more; wait for the running ones
  4. ENDED     the job's other processes are met, or left behind if one has failed;
               hostcall's own threads are joined; the interpreter may end

How a process can end, and what happens then

    the script ends, sys.exit, an error      atexit runs all four steps
    a multiprocessing child ends             a Finalize runs all four: children of
                                             fork and forkserver leave by os._exit,
                                             which skips atexit
    SIGTERM without a handler                taps are delivered, then the signal ends
                                             the process
    Ctrl-C in one of the waits               the process ends at once, with status 130
    os.fork                                  the child refuses all work if JAX had
                                             started
    a daemon thread is in a call             it is left behind, as Python leaves it

docs/design/threads.md tells the whole story.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading

from hostcall import _jax, _native
from hostcall._core import failures
from hostcall._runtime import (
    answers,
    delivery,
    feeds,
    fork,
    host_device,
    leaving,
    peers,
    watcher,
)

logger = logging.getLogger("hostcall")

# Seconds. A wait returns to Python this often, so that Ctrl-C is noticed.
_SLICE = 0.05

# Protects `_ending`: atexit and a Finalize may both call `end`.
_lock = threading.Lock()
_ending = False


def begin() -> None:
    """Prepares the process for its end. Called once, when the engine is first used."""
    os.register_at_fork(after_in_child=_after_fork)
    watcher.start()
    leaving.begin()
    atexit.register(end)
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing import util

        # The low priority runs it after the program's own finalizers, which may tap.
        util.Finalize(None, end, kwargs={"interpreter": False}, exitpriority=-100)


def end(*, interpreter: bool = True) -> None:
    """Runs the four steps, once.

    Args:
        interpreter: the interpreter shuts down afterwards, which stops daemon threads;
            False if the process ends by os._exit instead.
    """
    global _ending
    with _lock:
        if _ending or _native.closed():  # in a forked child the engine is closed
            return
        _ending = True
    try:
        leaving.script_ended()
        watcher.watch_the_end()
        feeds.process_ends()
        _wait_for_programs()
        delivery.flush(None, "the end of the process")
        delivery.call_at_barrier(ending=True)
        _native.close()
        _wait_for_calls(interpreter)
        # After the last call, since a call may still have pushed taps.
        delivery.stop()
        feeds.end_all()
        # After the last program, and while Ctrl-C is still watched.
        leaving.leave()
        # After all waits: other processes may ask what this one waits for.
        answers.stop()
        # After all waits, since it interrupts what hangs in them.
        watcher.stop()
        # Releases what dropped programs held; the watcher did so until it ended.
        _native.bury()
    except KeyboardInterrupt:
        # Without the normal exit, which would end the interpreter under running calls.
        try:
            leaving.interrupted()
            delivery.flush_streams()
        finally:
            os._exit(130)


def _wait_for_programs() -> None:
    for failure in failures.failures_of_effects():
        what = str(failure) if isinstance(failure, Exception) else repr(failure)
        logger.error("a program failed while the process was ending: %s", what)


def _wait_for_calls(interpreter: bool) -> None:
    watcher.watch_calls_too()
    if interpreter:
        # From now on a call on a daemon thread that ends stays inside the engine. JAX's
        # C++ would ask for the GIL next, while the interpreter shuts down.
        _native.leave_behind()
    while not _native.wait_idle(_SLICE):
        daemons = [t.ident for t in threading.enumerate() if t.daemon and t.ident]
        if _native.only_on_threads(daemons):
            return


def _after_fork() -> None:
    fork.after_fork()
    answers.after_fork()
    peers.after_fork()
    delivery.after_fork()
    if not _native.forked():  # JAX had not started
        watcher.start()
        return
    watcher.after_fork()
    # A client's destructor joins its threads, which do not exist here. A child that
    # ends by sys.exit would crash there, as it does in plain JAX, so the clients are
    # kept alive.
    for client in (*_jax.clients(), *host_device.clients()):
        _native.keep_for_ever(client)
