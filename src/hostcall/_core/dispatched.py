"""What a thread has dispatched, and has not heard of yet.

A program with host calls on one CPU device leaves no token (_jax/fast_dispatch.py), but
a *sign*: an array that is ready when the program has ended, and fails if it fails
(_jax/signs.py). Each thread has a *ledger* of the signs of its programs. Other programs
have JAX's tokens, which are each thread's own too.

Guarantees
  * A wait (`hc.barrier`, `jax.effects_barrier`, the end of a `reraise` block, an eager
    ordered call, an object's close) waits for the programs that its thread dispatched
    before it, whatever other threads do. It runs no program, so it needs none of XLA's
    places and compiles nothing, unless a sign is gone (below).
  * A failure is told once: to the thread that dispatched the program, where it reads a
    result or waits. Other threads hear of it only if they read a result.
  * A thread that has ended can't wait. What its programs failed with is told to the
    main thread's next wait; `hc.barrier` there waits for them first. A thread of XLA's
    dispatches only inside host calls, and counts as ended between these.
  * The end of the process waits for the programs of all threads.
  * A ledger keeps no more than XLA runs: 32 programs of each device, and of each its
    sign, which has at most 64 KiB. A thread whose programs have ended when their
    dispatch returns has no ledger.

What may be lost: a sign is *gone* if the user has deleted it, or donated it to another
program. Then nothing of the program is left that could be asked. A wait runs a program
that does nothing behind it, and takes the failures of calls with effects that came
meanwhile, and that no other thread knows of, as the thread's own. With a time limit it
does not wait for such a program.

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
        failures: how many callbacks had failed before the program was dispatched.
    """

    __slots__ = ("failures", "result")

    def __init__(self, result: jax.Array, failures: int) -> None:
        self.result = result
        self.failures = failures

    def is_gone(self) -> bool:
        return bool(self.result.is_deleted())

    def is_ready(self) -> bool:
        """Whether the program has ended; also if the sign is gone."""
        return _is_ready(self.result)

    def failure(self) -> Exception | None:
        """Waits for the program. Returns what JAX raises if a host call failed."""
        found = failures.failure_of(self.result)
        if found is None or not failures.number_in(found):
            return None
        return found.with_traceback(None)  # which leads to this sign


class _Alive:
    """Dies with its thread, whose local variable it is."""


class _Ledger:
    """
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
        self._of_xla = _native.on_foreign_thread()
        self._failures = 0  # at the dispatch before
        self._scan_above = 32

    def is_left(self) -> bool:
        """Whether its thread can't wait for it."""
        if self._alive() is None:
            return True
        # A thread of XLA's keeps its local variables; between calls it runs no Python.
        return self._of_xla and self._thread not in sys._current_frames()

    def add(self, result: jax.Array) -> None:
        """The thread has dispatched a program."""
        self.pending.append(_Sign(result, self._failures))
        self._failures = failures.failures_so_far()
        self.settle()

    def settle(self) -> None:
        """Removes the signs of programs that have ended: those in front, since programs
        of one device end in order; and all, once there are many.
        """
        every = len(self.pending) > self._scan_above
        for sign in self.pending.copy():
            if sign.is_ready():
                # A failure is counted before its program ends, so if there was none
                # since the dispatch, there is nothing to look at.
                failed = failures.failures_so_far() != sign.failures
                self._remove(sign, sign.failure() if failed else None)
            elif not every:
                break
        if every:
            self._scan_above = max(32, 2 * len(self.pending))

    def wait(self) -> None:
        """Waits for the programs that are in it now."""
        for sign in self.pending.copy():
            self._remove(sign, sign.failure())

    def wait_for_gone(self) -> None:
        """Waits for programs whose signs are gone. Called by its thread."""
        for device, before in list(self.gone.items()):
            _jax.wait_for_all_on(device)
            self.gone.pop(device, None)
            self.failed.extend(_unknown_since(before))

    def _remove(self, sign: _Sign, failure: Exception | None) -> None:
        if sign.is_gone():
            for device in sign.result.sharding.device_set:
                self.gone.setdefault(device, sign.failures)
        try:
            self.pending.remove(sign)
        except ValueError:  # somebody else has removed it, and added its failure
            return
        if failure is not None:
            self.failed.append(failure)

    def knows(self, number: int) -> bool:
        """Whether a program in it has failed with this failure."""
        found: list[Exception | None] = [*self.failed.copy()]
        found += [sign.failure() for sign in self.pending.copy() if sign.is_ready()]
        return any(error and failures.number_in(error) == number for error in found)


class _Threads(PerProcess):
    """
    Attributes:
        local: its `ledger` and `reports` (of barriers) are the thread's own; its
            `alive` dies with the thread.
        ledgers: all, by a number.
        failed: reports of threads that have ended.
        of_calls: (number, text) of failures of calls with effects, in programs without
            tokens. They are looked at only if a sign is gone.
    """

    def __init__(self) -> None:
        self.local = threading.local()
        self.ledgers: dict[int, _Ledger] = {}
        self.failed: deque[Exception] = deque(maxlen=_FAILURES_KEPT)
        self.of_calls: deque[tuple[int, str]] = deque(maxlen=_FAILURES_KEPT)
        super().__init__()

    def mine(self) -> _Ledger | None:
        """The calling thread's ledger, if it has one."""
        return getattr(self.local, "ledger", None)

    def begun(self) -> _Ledger:
        """The calling thread's ledger, which is made now if there is none."""
        found = self.mine()
        if found is None:
            self.sweep()
            alive = _Alive()
            found = _Ledger(alive)
            self.ledgers[id(found)] = found
            self.local.alive = alive
            self.local.ledger = found
        return found

    @contextlib.contextmanager
    def leaving_gone(self) -> Iterator[None]:
        """Inside, the calling thread does not wait for programs whose signs are gone:
        that needs a place of XLA's, and so has no limit.
        """
        mine = self.mine()
        if mine is None:
            yield
            return
        gone = mine.gone
        mine.gone = {}
        try:
            yield
        finally:
            mine.gone = mine.gone | gone

    def all(self) -> list[_Ledger]:
        return list(self.ledgers.values())

    def left(self) -> list[_Ledger]:
        return [ledger for ledger in self.all() if ledger.is_left()]

    def sweep(self) -> None:
        """Takes over the failures of threads that have ended. Their ledgers go once
        their programs have ended, however many threads there were.
        """
        for ledger in self.left():
            ledger.settle()
            with contextlib.suppress(IndexError):
                while True:
                    self.failed.append(ledger.failed.popleft())
            if not ledger.pending and ledger._alive() is None:
                self.ledgers.pop(id(ledger), None)


_threads = _Threads()


# --- What is noted --------------------------------------------------------------------


def _may_not_have_ended(sign: jax.Array, is_hidden: bool) -> None:
    """Called where the calling thread has dispatched a program (_jax/signs.py)."""
    ledger = _threads.begun()
    ledger.add(sign)
    _native.set_pending(bool(ledger.pending))
    if is_hidden:
        _jax.tell_of_dispatch([sign], ())


def call_failed(text: str) -> None:
    """A call with effects has failed, in a program without tokens."""
    _threads.of_calls.append((failures.number_of(text), text))


def _unknown_since(before: int) -> Iterator[Exception]:
    """The failures of calls with effects that nobody knows of, after so many."""
    for number, text in list(_threads.of_calls.copy()):
        if number <= before or failures.is_told(number):
            continue
        mine = _threads.mine()
        known = mine is not None and mine.knows(number)
        if not known and not _is_anothers(number):
            with failures.looking():
                yield jax.errors.JaxRuntimeError(f"INTERNAL: {text}")


# --- Waits ----------------------------------------------------------------------------


def wait() -> None:
    """Waits for the programs without tokens that this thread has dispatched."""
    ledger = _threads.mine()
    if ledger is None:
        return
    ledger.wait()
    ledger.wait_for_gone()
    _native.set_pending(bool(ledger.pending))


def signs() -> list[jax.Array]:
    """What `hc.barrier` waits for, without what it does for signs that are gone."""
    mine = _threads.mine()
    ledgers = _ledgers_left() if mine is None else [mine, *_ledgers_left()]
    return [sign.result for ledger in ledgers for sign in ledger.pending.copy()]


def _ledgers_left() -> list[_Ledger]:
    """The ledgers of ended threads, on the main thread, which takes them over."""
    on_main = threading.get_ident() == threading.main_thread().ident
    return _threads.left() if on_main else []


def failures_of_all(*, limited: bool = False) -> Iterator[BaseException]:
    """Waits for the programs with effects that this thread has dispatched, then for
    every live array; on the main thread also for programs of threads that have ended.

    Yields the failures of programs with tokens, and those of host calls of the live
    arrays that are no other thread's. Those of programs without tokens are owed.

    `limited`: everything has ended that can be waited for in a limited time.
    """
    if _native.forked():  # no program ends in a forked child
        return
    with _threads.leaving_gone() if limited else contextlib.nullcontext():
        yield from failures.failures_of_effects()
    for ledger in _ledgers_left():
        ledger.wait()
    for array in jax.live_arrays():
        if limited and not _is_ready(array):  # another thread has made it since
            continue
        failure = failures.failure_of(array)
        number = 0 if failure is None else failures.number_in(failure)
        if failure is not None and number and not _is_anothers(number):
            yield failure


def _is_anothers(number: int) -> bool:
    """Whether another thread hears of this failure, or the main one for it."""
    if failures.is_surely_told(number):
        return False
    if number in map(failures.number_in, _threads.failed.copy()):
        return True
    mine = _threads.mine()
    return any(ledger.knows(number) for ledger in _threads.all() if ledger is not mine)


def first_owed() -> BaseException | None:
    """What JAX would have raised for the oldest failure that nobody was told of, among
    those that this thread hears of.

    The caller raises it; those behind it stay.
    """
    owed = []
    if (mine := _threads.mine()) is not None:
        owed.append(mine.failed)
    if threading.get_ident() == threading.main_thread().ident:
        _threads.sweep()
        owed.append(_threads.failed)
    return next(filter(None, map(_first_of, owed)), None)


def _first_of(failed: deque[Exception]) -> BaseException | None:
    with contextlib.suppress(IndexError):  # there is none, or no other one
        while True:
            error = failed.popleft()
            number = failures.number_in(error)
            if not failures.is_told(number):
                failures.tell(number)
                return failures.replacement(number) or error
    return None


def failures_of_programs() -> list[BaseException]:
    """Waits for the programs that this thread has dispatched. Returns the failures."""
    return [*failures.failures_of_effects(), *iter(first_owed, None)]


def failures_of_all_threads() -> list[BaseException]:
    """The same for the programs of all threads, at the end of the process."""
    found = failures_of_programs()
    for ledger in _threads.all():
        ledger.wait()
        while (failure := _first_of(ledger.failed)) is not None:
            found.append(failure)
    return found


def reports() -> list[BaseException]:
    """Failures that a barrier of this thread has found, and not raised yet."""
    local = _threads.local
    if not hasattr(local, "reports"):
        local.reports = []
    found: list[BaseException] = local.reports
    return found


_jax.tell_of_signs(_may_not_have_ended)
_jax.handlers.wait = wait
_jax.handlers.first_failure = first_owed
