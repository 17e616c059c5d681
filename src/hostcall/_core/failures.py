"""Keeps the exceptions that callbacks raised, and records which the user knows of.

The idea: XLA carries only text. So a failed callback's exception object is kept here
under a number, the text ends with that number, and whoever reads the text can find the
object again.

Guarantees
  * The newest KEPT_ERRORS exceptions can be found, and up to MOST_KEPT_ERRORS of the
    last KEPT_SECONDS. Older ones are forgotten.
  * Only the newest exception keeps the values in its frames (arrays, models). When a
    newer one arrives, the frames of the one before are emptied; its lines stay.
  * An exception object that the user has been given is never changed. hostcall then
    drops its own strong reference instead.

  * A failure that nobody was told of is raised by the next wait for programs. A program
    that fails while it is dispatched raises there, and one with tokens raises where
    those are waited for. A program without tokens (_jax/fast_dispatch.py) that XLA has
    put behind others fails on a thread of XLA's. JAX raises it where a result is read:
    nowhere, if the results were dropped. Such a failure is *owed*.

Frames are emptied outside the lock, because that may run the user's destructors.
"""

from __future__ import annotations

import contextlib
import copy
import re
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax

from hostcall import _jax, _native
from hostcall._core import config, errors, frames
from hostcall._core.process import Guarded, once

_NUMBER = re.compile(r"\[hostcall error (\d+)\]")


class _KeptError:
    """One kept exception.

    Attributes:
        exception: the object. Once the user has the object and a newer exception has
            arrived, a weak reference to it, or a copy without frames if its type (one
            written in C) allows no weak references.
        own: those of its chain that belong to the callback, with their tracebacks.
        handed_over: the user has the object itself, and it was not raised again since
            then. So its frames must stay.
        since: when it was raised first.
    """

    __slots__ = ("exception", "handed_over", "own", "since")

    def __init__(self, exception: BaseException) -> None:
        self.exception: Any = exception
        self.handed_over, self.since = False, time.monotonic()
        self.own: list[tuple[BaseException, TracebackType]] = []

    def get(self) -> BaseException | None:
        held = self.exception
        return held() if isinstance(held, weakref.ref) else held  # type: ignore[no-any-return]

    def let_go(self) -> None:
        """Releases the values in its frames, once it is no longer the newest.

        If the user has the object, its frames are left alone, and hostcall releases
        its reference to the object instead.
        """
        with _failures.lock:
            own, self.own = self.own, []
            if self.handed_over:
                own, self.exception = [], _without_frames(self.get())
        for error, trace in own:
            frames.clear_values(trace)
            frames.keep_lines(error, trace)


class _Known(Guarded):
    """
    Attributes:
        lock: held for every change of the rest; single reads go without it.
        kept: the exceptions, by number.
        last: the number of the newest.
        told: the numbers of those that the user has seen, without very old ones.
        owed: the texts of those that nobody was told of, for the next wait. Any thread
            adds one, and any takes them, in single steps without the lock.
    """

    def __init__(self) -> None:
        self.kept: OrderedDict[int, _KeptError] = OrderedDict()
        self.last = 0
        self.told: set[int] = set()
        self.owed: deque[str] = deque(maxlen=1024)
        super().__init__()

    def renew(self) -> None:
        """A forked child may still ask for its parent's failures, and owes none."""
        super().renew()
        self.owed.clear()

    def keeps_too_many(self, now: float) -> bool:
        if len(self.kept) <= config.KEPT_ERRORS:
            return False
        oldest = next(iter(self.kept.values()))
        late = now - oldest.since > config.KEPT_SECONDS
        return late or len(self.kept) > config.MOST_KEPT_ERRORS


_failures = _Known()


@once
def _watch_reports() -> None:
    _jax.wrap_reports(_report_is_made)
    _native.monitor_raises()


def store(exception: BaseException, handed_over: bool = False) -> int:
    """Stores an exception that a callback raised; returns its number.

    Args:
        exception: the object.
        handed_over: the caller gets this object too, and may look at its frames.
    """
    mine, gone, own = _failures, [], frames.own_tracebacks(exception)
    _watch_reports()
    with mine.lock:
        before = mine.kept.get(mine.last)
        # What a feed's source raised comes again from each program that asks the feed.
        # `list` makes a copy in one step: a signal handler may come back here.
        same = (k for k in list(mine.kept.values()) if k.exception is exception)
        kept = next(same, None) or _KeptError(exception)
        kept.own, kept.handed_over = own, handed_over
        number = mine.last = mine.last + 1
        mine.kept[number] = kept
        while mine.keeps_too_many(time.monotonic()):
            gone.append(mine.kept.popitem(last=False))
    # Outside the lock: emptying frames, and dropping `gone`, may run the user's
    # destructors, which may come back here.
    if before is not None and before is not kept:
        before.let_go()
    return number


def hand_over(exception: BaseException) -> None:
    """Notes that the user gets this object, if it is a kept one."""
    with _failures.lock:
        every = list(_failures.kept.items())
        number = next((n for n, k in every if k.exception is exception), None)
    if number is not None:
        _handed_over(number)


def _handed_over(number: int | None) -> BaseException | None:
    """The exception of this number, or the newest one, which the user gets now; None if
    it isn't kept.

    Only the newest one is kept with its frames; any other is released to the user at
    once.
    """
    with _failures.lock:  # else a newer one may empty its frames in between
        kept = _failures.kept.get(_failures.last if number is None else number)
        if kept is None:
            return None
        found, kept.handed_over = kept.get(), True
        newest = kept is _failures.kept.get(_failures.last)
    if not newest:
        kept.let_go()
    return found


def _without_frames(exception: BaseException | None) -> Any:
    with contextlib.suppress(TypeError):
        return weakref.ref(exception)
    if not isinstance(exception, BaseExceptionGroup):  # its members have frames
        with contextlib.suppress(Exception):  # its type may need other arguments
            return copy.copy(exception)
    return None


def summary(exception: BaseException) -> str:
    """`Type: message`, even if the exception's own `__str__` raises."""
    try:
        message = str(exception)
    except Exception as error:
        message = f"<its str() raised {type(error).__name__}>"
    return type(exception).__name__ + (f": {message}" if message else "")


def add_note(error: BaseException, note: str) -> None:
    """Adds a note, once: the same object may be raised again, and may be kept."""
    if note not in vars(error).get("__notes__", ()):
        with contextlib.suppress(TypeError):  # its class answers for __notes__
            error.add_note(note)


def text_for_xla(
    exception: BaseException,
    name: str,
    place: object,
    row: tuple[int, ...],
    hint: str = "",
) -> str:
    """The text that JaxRuntimeError shows for an exception of a callback."""
    # XLA passes the text on as a C string in UTF-8.
    said = (summary(exception) + (hint and f". {hint}")).replace("\0", "\\0")
    said = said.encode("utf-8", "backslashreplace").decode()
    at = f", row {row[0] if len(row) == 1 else row}" if row else ""
    where = f"(in callback `{name}`{at}, called at {place})"
    if isinstance(exception, _OF_TRACERS):
        said = (
            f"{type(exception).__name__}: hostcall: `{name}` uses a traced value, by a"
            " global variable or an attribute, or in a function that it traces itself."
            f" Such a value has no number. Pass it as an argument {where}. JAX says:"
            f" {said.partition(': ')[2]}"
        )
        return numbered(exception, errors.with_code(said, "hc-traced"))
    return numbered(exception, f"{said} {where}")


# Closures are searched for tracers when a call is traced (_core/captured.py).
_OF_TRACERS = (
    jax.errors.UnexpectedTracerError,
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
)


def numbered(exception: BaseException, said: str) -> str:
    """Keeps an exception, and appends its number to what is said about it.

    The line of the text's code stays the last one.
    """
    code = errors.code_in(said)
    text = f"{errors.without_code(said)} [hostcall error {store(exception)}]"
    return errors.with_code(text, code) if code else text


def without_number(text: str) -> str:
    """Removes the number from another process's text, since it means nothing here, and
    the line of its code, since other words will follow.
    """
    return errors.without_code(_NUMBER.sub("", text)).rstrip()


def failures_so_far() -> int:
    """How many callbacks have failed in this process."""
    return _failures.last


def number_in(report: BaseException) -> int:
    """The number at the end of JAX's report; 0 if the failure is not a host call's."""
    return number_of(summary(report))


def number_of(text: str) -> int:
    found = _NUMBER.findall(text)
    return int(found[-1]) if found else 0


def original(report: BaseException) -> BaseException | None:
    """The callback's exception behind JAX's report of a failed program, if still kept.

    The caller raises it in place of the report, so the user has it from now on.
    """
    return _handed_over(number_in(report))


def kept(number: int) -> BaseException | None:
    """The exception that `store` gave this number, if it is still kept."""
    found = _failures.kept.get(number)
    return None if found is None else found.get()


def is_kept(error: BaseException) -> bool:
    """Whether a callback raised this object."""
    with _failures.lock:
        return any(kept.get() is error for kept in list(_failures.kept.values()))


def last_error() -> BaseException | None:
    """The exception object that a callback raised last, or None.

    Its traceback leads into the callback, with the values of local variables. The
    newest 32 exceptions of all threads are kept, and up to 1,024 of the last minute.
    hostcall keeps the local variables of the newest one only. Cost: none unless
    something failed.
    """
    return _handed_over(None)


def failures_of_effects() -> list[BaseException]:
    """Calls `_jax.wait_for_effects`; reports made there don't count as told."""
    with looking():
        return _jax.wait_for_effects(is_kept)


def failures_of_all() -> Iterator[BaseException]:
    """Waits for the programs with effects that this thread has dispatched, then for
    every live array. Yields the failures of the former, and those of host calls of the
    latter.
    """
    yield from failures_of_effects()
    for array in jax.live_arrays():
        failure = failure_of(array)
        if failure is not None and number_in(failure):
            yield failure


def failure_of(result: Any) -> Exception | None:
    """Waits for an array or a token; returns what JAX raises if its program failed."""
    with looking():
        try:
            result.block_until_ready()
        except (*_jax.REPORTS, RuntimeError) as error:  # RuntimeError: it was deleted
            return error
    return None


def replacement(number: int) -> BaseException | None:
    """The exception that the caller should see in place of JAX's report of it, or None.

    KeyboardInterrupt, SystemExit and the like, WatchError, what `hc.observe` raises and
    a debugger's `quit` replace the report.
    """
    found = kept(number)
    debugger = sys.modules.get("bdb")  # the base of pdb, imported by debuggers only
    own: tuple[type, ...] = (errors.ReplacesReport,)
    if debugger is not None:
        own += (debugger.BdbQuit,)
    replaces = isinstance(found, own) or not isinstance(found, Exception)
    return _handed_over(number) if found is not None and replaces else None


def told_as(text: str) -> BaseException:
    """What the caller raises for a failure of which XLA says this: JAX's report, or
    what replaces it.
    """
    number = number_of(text)
    tell(number)
    return replacement(number) or jax.errors.JaxRuntimeError(text)


def in_place_of_value_error(report: ValueError) -> BaseException | None:
    """The same for a ValueError of JAX's fast path, which should be a JaxRuntimeError.

    The engine calls this on the thread that raises it, before Python looks for a
    handler (native/base/report.h), and for every other ValueError. One that the user
    made of a report's text stays: that failure has been told.
    """
    text = report.args[0] if len(report.args) == 1 else None
    if type(text) is not str:  # nothing of the user's runs here
        return None
    number = number_of(text)
    return None if is_told(number) or number not in _failures.kept else told_as(text)


# --- Reports at the time JAX makes them ----------------------------------------------
#
# jaxlib's C++ makes a JaxRuntimeError of XLA's text on the thread that reads the
# result. The only Python code that runs on the way is the constructor of
# JaxRuntimeError. From the first failure on, that constructor is wrapped, for two
# purposes:
#
#   * A report with one of our numbers marks that failure as told, so that `reraise`
#     does not raise it a second time.
#   * If the callback raised KeyboardInterrupt or SystemExit, the wrapper raises that
#     object, and Python drops the half-made report. The user's `except Exception` then
#     can't swallow a Ctrl-C. The same goes for WatchError, which has the bad values,
#     and for BdbQuit: whoever quits a debugger should not have to read a report.

_TOLD_AT_MOST = 4096


class _Looking(threading.local):
    inside = False


_looking = _Looking()


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """Marks reports made inside, on this thread, as read by hostcall, not the user."""
    before, _looking.inside = _looking.inside, True
    try:
        yield
    finally:
        _looking.inside = before


def is_told(number: int) -> bool:
    """Whether the user has seen this failure, as a report or as the object. A very old
    one counts as told, and so does 0, which is no host call's.
    """
    old = max(0, _failures.last - _TOLD_AT_MOST)
    return number <= old or is_surely_told(number)


def is_surely_told(number: int) -> bool:
    """The same for a caller who would rather raise a very old failure again than
    never.
    """
    return number in _failures.told


def tell(number: int) -> None:
    """Notes that the user has seen this failure."""
    mine = _failures
    with mine.lock:
        mine.told.add(number)
        if len(mine.told) > 2 * _TOLD_AT_MOST:
            mine.told = {n for n in mine.told if n > mine.last - _TOLD_AT_MOST}


def _report_is_made(text: str) -> None:
    number = number_of(text)
    found = kept(number)
    is_programs = found is not None and not isinstance(found, Exception)
    if _looking.inside and (is_told(number) or not is_programs):
        return
    if number:
        tell(number)
    if (replaced := replacement(number)) is not None:
        raise replaced


# --- Failures that nobody was told of -------------------------------------------------


def owe(text: str) -> None:
    """Notes a failure, if this is a thread of XLA's."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    # Else somebody has dispatched the program here, and the error is raised there. That
    # is so, too, if XLA's thread only helps the dispatching one, which tells of it.
    if str(frame.f_globals.get("__name__")).startswith("hostcall."):
        _failures.owed.append(text)


def first_owed() -> BaseException | None:
    """What JAX would have raised for the oldest failure that nobody was told of.

    The caller raises it; those behind it stay.
    """
    with contextlib.suppress(IndexError):  # there is none, or no other one
        while is_told(number_of(text := _failures.owed.popleft())):
            pass
        return told_as(f"INTERNAL: {text}")
    return None


def failures_of_programs() -> list[BaseException]:
    """Waits for the programs that this thread has dispatched. Returns the failures."""
    return [*failures_of_effects(), *iter(first_owed, None)]


_jax.when_waiting_for_effects(first_owed)
