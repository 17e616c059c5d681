"""What a thread has dispatched, and has not heard of yet.

A program with host calls on one CPU device leaves no token (_jax/fast_dispatch.py), but
a *sign*: an array that is ready when the program has ended, and fails if it fails
(_jax/signs.py). Each thread has a list of the signs of its programs. Other programs
have JAX's tokens, which are each thread's own too.

Guarantees
  * A wait (`hc.barrier`, `jax.effects_barrier`, the end of a `reraise` block, an eager
    ordered call, an object's close) waits for the programs that its thread dispatched
    before it, whatever other threads do. It runs no program, so it needs none of XLA's
    places and compiles nothing, unless a sign is gone (below).
  * A failure is reported once: to the thread that dispatched the program, where it
    reads a result or waits. Other threads hear of it only if they read a result.
  * A thread that has ended can't wait. What its programs failed with is raised by the
    main thread's next wait; `hc.barrier` there waits for them first. A thread of XLA's
    dispatches only inside host calls, and counts as ended between these.
  * The end of the process waits for the programs of all threads.
  * A thread's list keeps no more than XLA runs, 32 programs of each device, and 8 that
    have ended; of each its sign, which has at most 64 KiB. A thread whose programs have
    ended when their dispatch returns has no list.

What may be lost: a sign is *gone* if the user has deleted it, or donated it to another
program. Then nothing of the program is left that could be asked. A wait runs a program
that does nothing behind it, and takes the failures of calls with effects that came
meanwhile, and that no other thread knows of, as the thread's own. With a time limit it
does not wait for such a program.

Whether a failure was reported is asked of the one ledger (_core/failures.py), by the
number in JAX's error. Here is only which thread hears of it.

Who changes what. A sign is added by its thread. It is looked at, then removed, by that
thread, by the main thread once that thread has ended, or at the end of the process.
Whoever removes it adds its failure, so two who look at one sign add one failure. Each
step is a single one of a deque or a dict, with the GIL and without, so there is no
lock, a signal handler may come between any two, and a Ctrl-C in a wait loses nothing.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator

import jax

from hostcall import _jax, _native
from hostcall._core import failures
from hostcall._core.process import PerProcess
from hostcall._jax.types import Device

_FAILURES_KEPT = 1024

# With more signs than this, those behind a program that still runs are looked at too.
_MANY_SIGNS = 32

# After so many dispatches signs are looked at, if nothing says that they are ready. To
# look takes longer than to note one.
_LOOKS_AFTER = 8


def _is_ready(array: jax.Array) -> bool:
    """Whether nothing has to be waited for."""
    try:
        return bool(array.is_ready())
    except RuntimeError:  # it is deleted
        return True


class _Sign:
    """
    Attributes:
        result: the array.
        failures_before: how many callbacks had failed before the program was
            dispatched.
    """

    __slots__ = ("failures_before", "result")

    def __init__(self, result: jax.Array, failures_before: int) -> None:
        self.result = result
        self.failures_before = failures_before

    def is_gone(self) -> bool:
        return bool(self.result.is_deleted())

    def is_ready(self) -> bool:
        """Whether the program has ended; also if the sign is gone."""
        return _is_ready(self.result)

    def failure(self) -> Exception | None:
        """Waits for the program. Returns what JAX raises if a host call failed."""
        error = failures.failure_of(self.result)
        if error is None or not failures.number_in(error):
            return None
        return error


class _Alive:
    """Dies with its thread, whose local variable it is."""


class _Programs:
    """The programs that one thread has dispatched, by their signs.

    Attributes:
        pending: the signs of programs that may not have ended, the oldest first.
        failed: JAX's reports of programs that failed.
        gone: devices of programs whose signs are gone; with how many callbacks had
            failed before the oldest of these was dispatched.
    """

    def __init__(self, alive: _Alive) -> None:
        self.pending: deque[_Sign] = deque()
        self.failed: deque[Exception] = deque(maxlen=_FAILURES_KEPT)
        self.gone: dict[Device, int] = {}
        self._alive = weakref.ref(alive)
        self._thread = threading.get_ident()
        self._is_xlas = _native.on_foreign_thread()
        self._failures_before = 0  # at the dispatch before
        self._scan_above = _MANY_SIGNS
        self._look_at = _LOOKS_AFTER

    def has_ended(self) -> bool:
        """Whether the thread can't wait any more."""
        return self._alive() is None

    def is_left(self) -> bool:
        """Whether nobody waits for these programs: the thread has ended, or is a thread
        of XLA's that runs no Python now.

        XLA's threads keep their local variables, so `_alive` says nothing of them, and
        no event tells when the host code that dispatched ends: it may be a callback of
        JAX's own, which the engine does not see. A thread that runs Python has a frame,
        so this asks whether there is one, not which
        (test_waits_of_threads.py, with each JAX of the range).
        """
        if self.has_ended():
            return True
        return self._is_xlas and self._thread not in sys._current_frames()

    def add(self, result: jax.Array) -> None:
        """The thread has dispatched a program."""
        # The count is that after the dispatch before, not of now: a callback of this
        # program may have failed already.
        failures_before = self._failures_before
        self._failures_before = failures.failures_so_far()
        sign = _Sign(result, failures_before)
        self.pending.append(sign)
        # If the newest has ended, so have most before it. Over several devices it
        # mostly has not, and to ask each of them takes longer than to keep it.
        is_worth_asking = len(result.sharding.device_set) == 1
        if (
            (is_worth_asking and sign.is_ready())
            or self._failures_before != failures_before
            or len(self.pending) >= self._look_at
        ):
            self.settle()
            self._look_at = len(self.pending) + _LOOKS_AFTER

    def settle(self) -> None:
        """Removes the signs of programs that have ended: those in front, since programs
        of one device end in order; and all, once there are many.
        """
        looks_at_all = len(self.pending) > self._scan_above
        for sign in self.pending.copy():
            if sign.is_ready():
                # A failure is counted before its program ends, so if there was none
                # since the dispatch, there is nothing to look at.
                may_have_failed = failures.failures_so_far() != sign.failures_before
                self._remove(sign, sign.failure() if may_have_failed else None)
            elif not looks_at_all:
                break
        if looks_at_all:
            # Twice as many as stay: the looks then cost a constant for each dispatch.
            self._scan_above = max(_MANY_SIGNS, 2 * len(self.pending))

    def wait(self) -> None:
        """Waits for the programs that are in it now."""
        for sign in self.pending.copy():
            self._remove(sign, sign.failure())

    def wait_for_gone(self) -> None:
        """Waits for programs whose signs are gone. Called by its thread."""
        for device, failures_before in list(self.gone.items()):
            _jax.wait_for_all_on(device)
            # After the wait, which Ctrl-C may end: the device is then waited for again.
            self.gone.pop(device, None)
            self.failed.extend(_unknown_since(failures_before))

    def _remove(self, sign: _Sign, failure: Exception | None) -> None:
        """Takes a sign off the list, and notes what became of its program."""
        if sign.is_gone():
            for device in sign.result.sharding.device_set:
                self.gone.setdefault(device, sign.failures_before)
        try:
            self.pending.remove(sign)
        except ValueError:  # somebody else has removed it, and added its failure
            return
        if failure is not None:
            self.failed.append(failure)

    def has_failed_with(self, number: int) -> bool:
        """Whether a program in it has failed with this failure."""
        errors = list(self.failed.copy())
        for sign in self.pending.copy():
            # A program that still runs is not waited for.
            error = sign.failure() if sign.is_ready() else None
            if error is not None:
                errors.append(error)
        return number in map(failures.number_in, errors)


class _Threads(PerProcess):
    """
    Attributes:
        local: its `programs` and `reports` (of barriers) are the thread's own; its
            `alive` dies with the thread.
        programs: those of all threads, by a number.
        failed: reports of threads that have ended.
        of_effects: (number, text) of failures of calls with effects, in programs
            without tokens. They are looked at only if a sign is gone.
    """

    def __init__(self) -> None:
        self.local = threading.local()
        self.programs: dict[int, _Programs] = {}
        self.failed: deque[Exception] = deque(maxlen=_FAILURES_KEPT)
        self.of_effects: deque[tuple[int, str]] = deque(maxlen=_FAILURES_KEPT)
        super().__init__()

    def current(self) -> _Programs | None:
        """The calling thread's programs, if it has dispatched any."""
        return getattr(self.local, "programs", None)

    def begun(self) -> _Programs:
        """The calling thread's programs; the list begins now if there is none."""
        programs = self.current()
        if programs is None:
            self.sweep()
            alive = _Alive()
            programs = _Programs(alive)
            # A signal handler that dispatches in between makes a list of its own, which
            # this one replaces: the main thread then takes over what it fails with.
            self.programs[id(programs)] = programs
            self.local.alive = alive
            self.local.programs = programs
        return programs

    @contextlib.contextmanager
    def leaving_gone(self) -> Iterator[None]:
        """Inside, the calling thread does not wait for programs whose signs are gone:
        that needs a place of XLA's, and so has no limit.
        """
        programs = self.current()
        if programs is None:
            yield
            return
        gone = programs.gone
        programs.gone = {}
        try:
            yield
        finally:
            # What was there first has the older, lower counts of failures.
            programs.gone = programs.gone | gone

    def all(self) -> list[_Programs]:
        return list(self.programs.values())

    def left(self) -> list[_Programs]:
        return [programs for programs in self.all() if programs.is_left()]

    def sweep(self) -> None:
        """Takes over the failures of threads that have ended. Their lists go once their
        programs have ended, however many threads there were.
        """
        for programs in self.left():
            programs.settle()
            with contextlib.suppress(IndexError):  # until there is none left
                while True:
                    self.failed.append(programs.failed.popleft())
            # A thread of XLA's that is between two calls goes on with its list.
            if not programs.pending and programs.has_ended():
                self.programs.pop(id(programs), None)


_threads = _Threads()


# --- What is noted --------------------------------------------------------------------


def _may_not_have_ended(sign: jax.Array, is_hidden: bool) -> None:
    """Called where the calling thread has dispatched a program (_jax/signs.py)."""
    programs = _threads.begun()
    programs.add(sign)
    _native.set_pending(bool(programs.pending))
    if is_hidden:
        _jax.report_dispatch([sign], ())


def call_failed(text: str) -> None:
    """A call with effects has failed, in a program without tokens."""
    _threads.of_effects.append((failures.number_of(text), text))


def _unknown_since(failures_before: int) -> Iterator[Exception]:
    """The failures of calls with effects that nobody knows of, after so many."""
    programs = _threads.current()
    for number, text in list(_threads.of_effects.copy()):
        if number <= failures_before or failures.is_reported(number):
            continue
        is_known = programs is not None and programs.has_failed_with(number)
        if not is_known and not _is_anothers(number):
            # What JAX would have raised where it read the sign.
            with failures.not_reporting():
                yield jax.errors.JaxRuntimeError(f"INTERNAL: {text}")


# --- Waits ----------------------------------------------------------------------------


def wait() -> None:
    """Waits for the programs without tokens that this thread has dispatched."""
    programs = _threads.current()
    if programs is None:
        return
    programs.wait()
    programs.wait_for_gone()
    _native.set_pending(bool(programs.pending))


def signs() -> list[jax.Array]:
    """What `hc.barrier` waits for, without what it does for signs that are gone."""
    threads = _left_to_main()
    current = _threads.current()
    if current is not None:
        threads.insert(0, current)
    return [sign.result for programs in threads for sign in programs.pending.copy()]


def _is_main() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _left_to_main() -> list[_Programs]:
    """The programs of ended threads, on the main thread, which takes them over."""
    return _threads.left() if _is_main() else []


def failures_of_all(*, limited: bool = False) -> Iterator[BaseException]:
    """Waits for the programs with effects that this thread has dispatched, then for
    every live array; on the main thread also for programs of threads that have ended.

    Yields the failures of programs with tokens, and those of host calls of the live
    arrays that are no other thread's. Those of programs without tokens stay with their
    thread: `first_unreported` raises them.

    `limited`: everything has ended that can be waited for in a limited time.
    """
    if _native.forked():  # no program ends in a forked child
        return
    gone = _threads.leaving_gone() if limited else contextlib.nullcontext()
    with gone:
        yield from failures.failures_of_effects()
    for programs in _left_to_main():
        programs.wait()
    for array in jax.live_arrays():
        if limited and not _is_ready(array):  # another thread has made it since
            continue
        error = failures.failure_of(array)
        number = 0 if error is None else failures.number_in(error)
        if error is not None and number and not _is_anothers(number):
            yield error


def _is_anothers(number: int) -> bool:
    """Whether another thread hears of this failure, or the main one for it."""
    if failures.is_surely_reported(number):
        return False
    if number in map(failures.number_in, _threads.failed.copy()):
        return True
    current = _threads.current()
    return any(
        programs.has_failed_with(number)
        for programs in _threads.all()
        if programs is not current
    )


def first_unreported() -> BaseException | None:
    """What JAX would have raised for the oldest failure that nobody has heard of, among
    those that this thread hears of.

    The caller raises it; those behind it stay.
    """
    heard_here = []
    programs = _threads.current()
    if programs is not None:
        heard_here.append(programs.failed)
    if _is_main():
        _threads.sweep()
        heard_here.append(_threads.failed)
    for failed in heard_here:
        error = _take_unreported(failed)
        if error is not None:
            return error
    return None


def _take_unreported(failed: deque[Exception]) -> BaseException | None:
    """Takes the first of these reports that is news, and all before it."""
    with contextlib.suppress(IndexError):  # there is none, or no other one
        while True:
            error = failed.popleft()
            number = failures.number_in(error)
            if not failures.is_reported(number):
                failures.mark_reported(number)
                return failures.replacement(number) or error
    return None


def failures_of_programs() -> list[BaseException]:
    """Waits for the programs that this thread has dispatched. Returns the failures."""
    return [*failures.failures_of_effects(), *iter(first_unreported, None)]


def failures_of_all_threads() -> list[BaseException]:
    """The same for the programs of all threads, at the end of the process."""
    errors = failures_of_programs()
    for programs in _threads.all():
        programs.wait()
        while (error := _take_unreported(programs.failed)) is not None:
            errors.append(error)
    return errors


def reports() -> list[BaseException]:
    """Failures that a barrier of this thread has found, and not raised yet."""
    local = _threads.local
    if not hasattr(local, "reports"):
        local.reports = []
    reports_here: list[BaseException] = local.reports
    return reports_here


_jax.report_signs_to(_may_not_have_ended)
_jax.handlers.wait = wait
_jax.handlers.first_failure = first_unreported
