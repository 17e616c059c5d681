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

  * What fails while a failure is kept or told never takes its place. Each step that is
    not the failure's own text and number stands in a block of `beside_a_failure`. Only
    what ends the process (Ctrl-C, SystemExit) comes out of such a block.

Frames are emptied outside the lock, because that may run the user's destructors.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import jax

from hostcall import _jax, _native
from hostcall._core import config, errors, frames
from hostcall._core.process import Guarded, once

logger = logging.getLogger("hostcall")

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
        self.handed_over = False
        self.since = time.monotonic()
        self.own: list[tuple[BaseException, TracebackType]] = []

    def get(self) -> BaseException | None:
        held = self.exception
        return held() if type(held) is weakref.ref else held  # type: ignore[no-any-return]

    def let_go(self) -> None:
        """Releases the values in its frames, once it is no longer the newest.

        If the user has the object, its frames are left alone, and hostcall releases
        its reference to the object instead.
        """
        with _failures.lock:
            own = self.own
            self.own = []
            if self.handed_over:
                own = []
                self.exception = _without_frames(self.get())
        for error, trace in own:
            with beside_a_failure("emptying the frames of an earlier one"):
                frames.clear_values(trace)
                frames.keep_lines(error, trace)


class _Known(Guarded):
    """
    Attributes:
        lock: held for every change of the rest; single reads go without it.
        kept: the exceptions, by number.
        last: the number of the newest.
        told: the numbers of those that the user has seen, without very old ones.
        explainers: add to an error what it may follow from; see `explained_by`.
    """

    def __init__(self) -> None:
        self.kept: OrderedDict[int, _KeptError] = OrderedDict()
        self.last = 0
        self.told: set[int] = set()
        self.explainers: list[Callable[[BaseException], object]] = []
        super().__init__()

    def keeps_too_many(self, now: float) -> bool:
        if len(self.kept) <= config.KEPT_ERRORS:
            return False
        oldest = next(iter(self.kept.values()))
        late = now - oldest.since > config.KEPT_SECONDS
        return late or len(self.kept) > config.MOST_KEPT_ERRORS


_failures = _Known()


def explained_by(fn: Callable[[BaseException], object]) -> None:
    """From now on `fn(error)` adds to an error of a program the failure of another
    process that it may follow from.
    """
    _failures.explainers.append(fn)


def explain(error: BaseException) -> None:
    """Adds to an error what it may follow from; nothing in a job of one process."""
    for fn in _failures.explainers.copy():
        fn(error)


@contextlib.contextmanager
def beside_a_failure(what: str) -> Iterator[None]:
    """Runs a step that goes along with keeping or telling a failure.

    An exception of it is logged and ends here, since the failure is what the user has
    to learn. The step may run the user's code: methods of the exception, handlers of
    logs, destructors. KeyboardInterrupt, SystemExit and the like pass.

    Args:
        what: the step, for the log.
    """
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):  # a handler of the log may be what failed
            said = "%s failed while a failure was reported, which goes on: %s"
            logger.error(said, what, summary(error))


@once
def _watch_reports() -> None:
    _native.monitor_raises()


def store(exception: BaseException, handed_over: bool = False) -> int:
    """Stores an exception that a callback raised; returns its number.

    Args:
        exception: the object.
        handed_over: the caller gets this object too, and may look at its frames.
    """
    mine = _failures
    gone: list[tuple[int, _KeptError]] = []
    own: list[tuple[BaseException, TracebackType]] = []
    with beside_a_failure("looking for its tracebacks"):
        own = frames.own_tracebacks(exception)
    with beside_a_failure("watching JAX's reports"):
        _jax.install(_jax.When.FAILURE)
        _watch_reports()
    with mine.lock:
        before = mine.kept.get(mine.last)
        # What a feed's source raised comes again from each program that asks the feed.
        # `list` makes a copy in one step: a signal handler may come back here.
        same = (k for k in list(mine.kept.values()) if k.exception is exception)
        kept = next(same, None) or _KeptError(exception)
        kept.own = own
        kept.handed_over = handed_over
        number = mine.last = mine.last + 1
        mine.kept[number] = kept
        _native.count_failure()
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
        found = kept.get()
        kept.handed_over = True
        newest = kept is _failures.kept.get(_failures.last)
    if not newest:
        kept.let_go()
    return found


def _without_frames(exception: BaseException | None) -> Any:
    with contextlib.suppress(TypeError):
        return weakref.ref(exception)
    if not issubclass(type(exception), BaseExceptionGroup):  # its members have frames
        with contextlib.suppress(Exception):  # its type may need other arguments
            return copy.copy(exception)
    return None


def summary(exception: BaseException) -> str:
    """`Type: message`, even if the exception's own `__str__` raises."""
    try:
        message = str.__str__(str(exception))  # without a subclass's own methods
    except Exception as error:
        message = f"<its str() raised {_name_of(type(error))}>"
    return _name_of(type(exception)) + (f": {message}" if message else "")


# A metaclass may have an attribute of that name.
_name_of: Callable[[type], str] = vars(type)["__name__"].__get__


def add_note(error: BaseException, note: str) -> None:
    """Adds a note, once: the same object may be raised again, and may be kept."""
    with contextlib.suppress(Exception):  # its class may answer for __notes__
        if note not in vars(error).get("__notes__", ()):
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
    if issubclass(type(exception), _OF_TRACERS):
        said = (
            f"{_name_of(type(exception))}: hostcall: `{name}` uses a traced value, by a"
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
    kind = type(found)  # `isinstance` would ask the exception's own `__class__`
    replaces = issubclass(kind, own) or not issubclass(kind, Exception)
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
    before = _looking.inside
    _looking.inside = True
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
    replaced: BaseException | None = None
    if _looking.inside:
        return
    with beside_a_failure("noting JAX's report"):
        replaced = _noted(text)
    if replaced is not None:
        raise replaced


def _noted(text: str) -> BaseException | None:
    """Notes that JAX makes a report; returns what is raised in place of it."""
    number = number_of(text)
    if number:
        tell(number)
    return replacement(number)


_jax.handlers.quietly = looking
_jax.handlers.report = _report_is_made
