"""Starts the engine in a process, and ends it with the process.

The idea: a callback on one of XLA's threads crashes the process if the interpreter ends
under it. So at exit the engine first lets everything finish that must run, then takes
no more calls, and only then lets the interpreter go.

Guarantees
  * Programs with effects have run, those of all threads (with JAX's tokens, those of
    the ending thread); queued taps are delivered.
  * After the last phase no thread of XLA's enters Python, except as LATE says.
  * A handler that was registered with `atexit` may run programs with host code,
    whenever it was registered.
  * What hangs is named in the log and interrupted, after HOSTCALL_EXIT_TIMEOUT and
    again each time that passes (_runtime/watcher.py). Two waits have no limit: for
    programs that still run, and for calls on XLA's threads that no interrupt ends.
  * Ctrl-C ends the process in any of the waits. Those for taps and calls return to
    Python every 50 ms; while a program is waited for, the watcher interrupts its
    callbacks.

The phases of `end` are those of `Phase`, in its order. This file knows none of the
services that end: each says with `at_end` what it does in which phase.

`atexit` runs handlers in reverse order of registration. `end` is registered when
hostcall is imported, so it runs after every handler that is registered later, and
before JAX's own. `drain`, the phases up to TAPS, is registered when the engine is first
used: what programs have queued is delivered before an older handler closes a file or a
connection that the taps write to.

LATE. A handler that was registered before hostcall was imported runs after `end`, when
hostcall has no thread any more. Plain JAX works there, so the closed engine makes calls
too: those that come while the ending thread is inside such a handler (OpenLate in
native/base/engine.h). A tap is delivered by the thread that taps. A program that the
handler does not wait for may lose its call, as in plain JAX. Feeds and objects that
existed before are closed.

How a process can end, and what happens then

    the script ends, sys.exit, an error      atexit runs all phases
    a multiprocessing child ends             a Finalize runs them all: children of
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
import contextlib
import enum
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator

from hostcall import _jax, _native
from hostcall._core import dispatched
from hostcall._core.errors import HostcallError
from hostcall._core.process import call_after_fork, refusal, starting
from hostcall._core.wait import wait

logger = logging.getLogger("hostcall")


class Phase(enum.IntEnum):
    """What ends at the end of the process, in this order."""

    SCRIPT = 1  # the script has ended: others are told, and waits get a limit
    PROGRAMS = 2  # programs with effects have run
    TAPS = 3  # what they have queued is delivered
    CLOSING = 4  # the last that is done while calls may still come
    # Here the engine is closed: no call enters Python any more, and the running ones
    # have ended.
    LAST_TAPS = 5  # a call may still have pushed taps
    FEEDS = 6  # no program can take items any more
    JOB = 7  # the job's other processes are met, or left behind if one has failed
    OBJECTS = 8
    LOOP = 9  # objects may need it to close
    WATCHER = 10  # it watches for Ctrl-C, and interrupts what hangs in the waits above


_DRAINED = [phase for phase in Phase if phase <= Phase.TAPS]
_CLOSED = [phase for phase in Phase if phase > Phase.CLOSING]


class _End:
    """
    Attributes:
        watch: starts the thread that watches the process; None before `begin`.
        ender: the thread that has called `end`.
        at: what services do in each phase.
        at_ctrl_c: what they do if Ctrl-C ends the process in a phase.
    """

    def __init__(self) -> None:
        self.watch: Callable[[], None] | None = None
        self.ender: int | None = None
        self.at: dict[Phase, list[Callable[[], object]]]
        self.at = {phase: [] for phase in Phase}
        self.at_ctrl_c: list[Callable[[], object]] = []

    @property
    def begun(self) -> bool:
        """Whether the engine is used."""
        return self.watch is not None

    def run(self, phases: Iterable[Phase]) -> None:
        for phase in phases:
            for fn in self.at[phase].copy():
                fn()


_end = _End()


def begin(watch: Callable[[], None]) -> None:
    """Prepares the process for its end, once, when the engine is first used.

    `watch` starts the thread that watches the process, and raises HostcallError if
    there can be none. In a forked child it is called again.
    """
    if _end.ender or _end.begun:
        return
    try:
        watch()
    except HostcallError:
        # A handler of atexit is the first to use the engine, and Python starts no
        # thread any more. Calls and taps need none in the state LATE.
        end()
        return
    _end.watch = watch
    atexit.register(drain)
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing import util

        # The low priority runs it after the program's own finalizers, which may tap.
        util.Finalize(None, end, kwargs={"interpreter": False}, exitpriority=-100)


def at_end(phase: Phase, fn: Callable[[], object]) -> None:
    """Calls `fn()` in this phase of the end, behind what was registered before.

    Not by `atexit`, whose order would depend on what was imported first. `fn` raises
    nothing. What it does up to TAPS, it may be asked to do twice.
    """
    _end.at[phase].append(fn)


def at_ctrl_c(fn: Callable[[], object]) -> None:
    """Calls `fn()` if Ctrl-C ends the process in one of the phases."""
    _end.at_ctrl_c.append(fn)


def drain() -> None:
    """Runs the phases up to TAPS. What is done meanwhile is not refused."""
    if _end.ender or not _end.begun or _native.closed():
        return
    with _ending_by_ctrl_c():
        _end.run(_DRAINED)


def end(*, interpreter: bool = True) -> None:
    """Runs all phases, once.

    Args:
        interpreter: the interpreter shuts down afterwards, which stops daemon threads;
            False if the process ends by os._exit instead.
    """
    with starting.lock:  # atexit and a Finalize may both come here
        if _end.ender or _native.closed():  # in a forked child the engine is closed
            return
        _end.ender = threading.get_ident()
    with _ending_by_ctrl_c():
        if _end.begun:
            _end.run(_DRAINED)
        _end.run([Phase.CLOSING])
        _native.close()
        if _end.begun:
            _wait_for_calls(interpreter)
        _end.run(_CLOSED)
        # Releases what dropped programs held; the watcher did so until it ended.
        _native.bury()
        _native.set_hook(_native.Hook.ADMITS_LATE, _in_a_late_handler)
        _native.open_late()


@contextlib.contextmanager
def _ending_by_ctrl_c() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        # Without the normal exit, which would end the interpreter under running calls.
        try:
            for fn in _end.at_ctrl_c.copy():
                fn()
        finally:
            os._exit(130)


def _wait_for_programs() -> None:
    for failure in dispatched.failures_of_all_threads():
        # KeyboardInterrupt and its like have no text of their own.
        is_error = isinstance(failure, Exception)
        text = str(failure) if is_error else repr(failure)
        logger.error("a program failed while the process was ending: %s", text)


at_end(Phase.PROGRAMS, _wait_for_programs)


def _in_a_late_handler() -> bool:
    """Whether the ending thread is inside a handler that may wait for this call.

    Then the interpreter does not end meanwhile. JAX's own handler, which drops the
    back ends, waits for no call.

    A call comes on a thread of XLA's, and atexit says nothing of the handler that runs,
    nor is there an event between two handlers, so this looks at the ending thread: the
    outermost frame is the handler's. No frame means that it is past atexit. Only the
    first part of a module's name is read, which is `jax` for all of JAX's handlers
    (tests/runtime/test_process.py, with each JAX of the range: handlers of all kinds
    run programs, and one drops a program with a long call).
    """
    if threading.get_ident() == _end.ender:
        return True
    frame = sys._current_frames().get(_end.ender or 0)
    if frame is None:
        return False
    while frame.f_back is not None:
        frame = frame.f_back
    module = str(frame.f_globals.get("__name__", ""))
    package, _, _ = module.partition(".")
    return package not in ("jax", "hostcall")


def _wait_for_calls(interpreter: bool) -> None:
    if interpreter:
        # From now on a call on a daemon thread that ends stays inside the engine. JAX's
        # C++ would ask for the GIL next, while the interpreter shuts down.
        _native.leave_behind()

    def ended(seconds: float) -> bool:
        if _native.wait_idle(seconds):
            return True
        daemons = [t.ident for t in threading.enumerate() if t.daemon and t.ident]
        return _native.only_on_threads(daemons)

    wait(ended)


def _start_anew() -> None:
    """The child of a fork may not use JAX if its parent had started that."""
    _jax.install_anew()
    started = _end.begun and _jax.back_ends_started()
    if started:
        # Before all else that may enter the engine: it is closed in this process.
        _native.after_fork()
        _jax.refuse_programs(lambda: refusal("a JAX program is compiled or run"))
    call_after_fork()
    if not started:
        if _end.watch is not None:
            _end.watch()
        return
    # Their destructors join threads that do not exist here. A child that ends by
    # sys.exit would crash or hang there, as it does in plain JAX, so they are kept
    # alive; the clients of _runtime/host_device.py are by their `after_fork`.
    for owner in _jax.owners_of_threads():
        _native.keep_for_ever(owner)


# When hostcall is imported; see above.
atexit.register(end)
os.register_at_fork(after_in_child=_start_anew)
