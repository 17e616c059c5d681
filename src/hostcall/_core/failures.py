"""The ledger of failures: a record of each, with its exception and what became of it.

The idea: XLA carries only text. So the exception object of a call or tap that failed
is kept here under a number, the text ends with that number, and whoever reads the text
can find the object again.

A *failure* is an exception that left one call or tap. A *report* is what JAX raises of
it, a JaxRuntimeError with the number in its text. What becomes of a failure, in words
that all files use:

    kept          `store` has made the record, and holds the exception
    unreported    nobody has heard of it: a wait, or the end of a block, raises it
    reported      the user has read JAX's report of it, or hostcall has raised it
    handed over   the user has the object itself, so hostcall leaves its frames alone
    released      there are too many newer ones: number and "reported" remain

Whether it is reported and what is held of it are independent: `hc.errors.last_error()`
hands over the object of a failure that the program's own error still reports.

Which failures a wait raises, the files that wait say: those of the programs that a
thread has dispatched (_core/dispatched.py) or a block (_runtime/reraise.py), and those
of taps (_runtime/delivery.py). They hold numbers, and ask here what was reported.

Guarantees
  * The newest KEPT_ERRORS exceptions can be found, and up to MOST_KEPT_ERRORS of the
    last KEPT_SECONDS. Older ones are released.
  * Only the newest exception keeps the values in its frames (arrays, models). When a
    newer one arrives, the frames of the one before are emptied; its lines stay.
  * An exception object that the user has been given is never changed. hostcall then
    drops its own strong reference instead.
  * No failure is raised twice by hostcall, unless thousands came in between.
  * What fails while a failure is kept or reported never takes its place. Each step that
    is not the failure's own text and number stands in a block of `beside_a_failure`.
    Only what ends the process (Ctrl-C, SystemExit) comes out of such a block.

The ledger's lock is held for each change; a single read of a dict goes without it.
Frames are emptied, and exceptions dropped, outside the lock: that may run the user's
destructors, which may come back here. (`ledger` has the records.)
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import jax

from hostcall import _jax, _native
from hostcall._core import errors, frames
from hostcall._core.ledger import REMEMBERED, Failure, KeptException, Ledger
from hostcall._core.process import once

logger = logging.getLogger("hostcall")

_ledger = Ledger()

_NUMBER = re.compile(r"\[hostcall error (\d+)\]")

# --- Keeping a failure ---------------------------------------------------------------


def explained_by(fn: Callable[[BaseException], object]) -> None:
    """From now on `fn(error)` adds to an error of a program the failure of another
    process that it may follow from.
    """
    _ledger.explainers.append(fn)


def explain(error: BaseException) -> None:
    """Adds to an error what it may follow from; nothing in a job of one process."""
    for fn in _ledger.explainers.copy():
        fn(error)


@contextlib.contextmanager
def beside_a_failure(step: str) -> Iterator[None]:
    """Runs a step that goes along with keeping or reporting a failure.

    An exception of it is logged and ends here, since the failure is what the user has
    to learn. The step may run the user's code: methods of the exception, handlers of
    logs, destructors. KeyboardInterrupt, SystemExit and the like pass.

    Args:
        step: what it is, for the log.
    """
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):  # a handler of the log may be what failed
            logger.error(
                "%s failed while a failure was reported, which goes on: %s",
                step,
                summary(error),
            )


@once
def _watch_reports() -> None:
    _native.monitor_raises()


def store(exception: BaseException, handed_over: bool = False) -> int:
    """Keeps an exception that a callback raised; returns the failure's number.

    Args:
        exception: the object.
        handed_over: the caller gets this object too, and may look at its frames.
    """
    tracebacks: list[tuple[BaseException, TracebackType]] = []
    with beside_a_failure("looking for its tracebacks"):
        tracebacks = frames.own_tracebacks(exception)
    with beside_a_failure("watching JAX's reports"):
        _jax.install(_jax.When.FAILURE)
        _watch_reports()
    released: list[KeptException | None] = []
    with _ledger.lock:
        newest_before = _ledger.newest_exception()
        record = _record_of(exception) or KeptException(exception)
        record.tracebacks = tracebacks
        record.is_handed_over = handed_over
        number = _ledger.add(record).number
        # Before the program ends: whoever sees it end without a new failure does not
        # look at its results.
        _native.count_failure()
        while _ledger.keeps_too_many():
            released.append(_ledger.release_oldest())
    # Outside the lock: emptying frames, and dropping `released` when this returns, may
    # run the user's destructors, which may come back here.
    if newest_before is not None and newest_before is not record:
        _let_go_of_values(newest_before)
    return number


def _record_of(exception: BaseException) -> KeptException | None:
    """What is held of this object, if it was raised before and is still kept."""
    for record in _ledger.exceptions():
        if record.held is exception:  # not one that is only held weakly
            return record
    return None


def hand_over(exception: BaseException) -> None:
    """Notes that the user gets this object, if it is a kept one."""
    with _ledger.lock:
        record = _record_of(exception)
    if record is not None:
        _hand_over(record)


def hand_over_number(number: int) -> BaseException | None:
    """The exception of this failure, which the user gets now, or None if released."""
    record = _ledger.exception_of(number)
    return None if record is None else _hand_over(record)


def _hand_over(record: KeptException) -> BaseException | None:
    """The object, which the user gets now.

    Only the newest one is kept with its frames; hostcall lets go of any other at once.
    """
    with _ledger.lock:  # else a newer one may empty its frames in between
        exception = record.get()
        record.is_handed_over = True
        is_newest = record is _ledger.newest_exception()
    if not is_newest:
        _let_go_of_values(record)
    return exception


def _let_go_of_values(record: KeptException) -> None:
    """Releases the values in the frames of an exception that is no longer the newest.

    If the user has the object, its frames are left alone, and hostcall releases its
    reference to the object instead. Called without the ledger's lock.
    """
    with _ledger.lock:
        # Taken under the lock, so that one thread alone empties them.
        tracebacks = record.tracebacks
        record.tracebacks = []
        if record.is_handed_over:
            tracebacks = []
            record.held = _without_frames(record.get())
    for error, trace in tracebacks:
        with beside_a_failure("emptying the frames of an earlier one"):
            frames.clear_values(trace)
            frames.keep_lines(error, trace)


def _without_frames(exception: BaseException | None) -> Any:
    """What hostcall holds of an object that the user has: as little as can be."""
    with contextlib.suppress(TypeError):
        return weakref.ref(exception)
    if not issubclass(type(exception), BaseExceptionGroup):  # its members have frames
        with contextlib.suppress(Exception):  # its type may need other arguments
            return copy.copy(exception)
    return None


def kept(number: int) -> BaseException | None:
    """The exception that `store` gave this number, if it is still kept."""
    record = _ledger.exception_of(number)
    return None if record is None else record.get()


def is_kept(error: BaseException) -> bool:
    """Whether a callback raised this object."""
    with _ledger.lock:
        return any(record.get() is error for record in _ledger.exceptions())


def failures_so_far() -> int:
    """How many callbacks have failed in this process."""
    return _ledger.newest


def last_error() -> BaseException | None:
    """The exception object that a callback raised last, or None.

    Its traceback leads into the callback, with the values of local variables. The
    newest 32 exceptions of all threads are kept, and up to 1,024 of the last minute.
    hostcall keeps the local variables of the newest one only. Cost: none unless
    something failed.
    """
    return hand_over_number(_ledger.newest)


# --- What was reported ----------------------------------------------------------------


def is_reported(number: int) -> bool:
    """Whether the user has heard of this failure, by a report or the object. A very old
    one counts as reported, and so does 0, which is no host call's.
    """
    old = max(0, _ledger.newest - REMEMBERED)
    return number <= old or is_surely_reported(number)


def is_surely_reported(number: int) -> bool:
    """The same for a caller who would rather raise a very old failure again than
    never.
    """
    failure = _ledger.records.get(number)
    return failure is not None and failure.is_reported


def mark_reported(number: int) -> None:
    """Notes that the user hears of this failure now; nothing for 0."""
    if number == 0:
        return
    with _ledger.lock:
        failure = _ledger.records.get(number)
        if failure is None:
            # It is very old, or a text that somebody else wrote has its number.
            failure = _ledger.records[number] = Failure(number, None)
        failure.is_reported = True
        _ledger.forget_old()


# --- Texts about failures -------------------------------------------------------------


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
    message = summary(exception)
    if hint:
        message = f"{message}. {hint}"
    # XLA passes the text on as a C string in UTF-8.
    message = message.replace("\0", "\\0")
    message = message.encode("utf-8", "backslashreplace").decode()
    of_row = f", row {row[0] if len(row) == 1 else row}" if row else ""
    origin = f"(in callback `{name}`{of_row}, called at {place})"
    if issubclass(type(exception), _OF_TRACERS):
        _, _, jax_says = message.partition(": ")
        message = (
            f"{_name_of(type(exception))}: hostcall: `{name}` uses a traced value, by a"
            " global variable or an attribute, or in a function that it traces itself."
            f" Such a value has no number. Pass it as an argument {origin}. JAX says:"
            f" {jax_says}"
        )
        return numbered(exception, errors.with_code(message, "hc-traced"))
    return numbered(exception, f"{message} {origin}")


# Closures are searched for tracers when a call is traced (_core/captured.py).
_OF_TRACERS = (
    jax.errors.UnexpectedTracerError,
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
)


def numbered(exception: BaseException, text: str) -> str:
    """Keeps an exception, and appends its number to a text about it.

    The line of the text's code stays the last one.
    """
    code = errors.code_in(text)
    number = store(exception)
    text = f"{errors.without_code(text)} [hostcall error {number}]"
    return errors.with_code(text, code) if code else text


def without_number(text: str) -> str:
    """Removes the number from another process's text, since it means nothing here, and
    the line of its code, since other words will follow.
    """
    return errors.without_code(_NUMBER.sub("", text)).rstrip()


def number_in(report: BaseException) -> int:
    """The number at the end of JAX's report; 0 if the failure is not a host call's."""
    return number_of(summary(report))


def number_of(text: str) -> int:
    numbers = _NUMBER.findall(text)
    return int(numbers[-1]) if numbers else 0


# --- From JAX's report to the exception -----------------------------------------------


def original(report: BaseException) -> BaseException | None:
    """The callback's exception behind JAX's report of a failed program, if still kept.

    The caller raises it in place of the report, so the user has it from now on.
    """
    return hand_over_number(number_in(report))


def replacement(number: int) -> BaseException | None:
    """The exception that the caller should see in place of JAX's report of it, or None.

    KeyboardInterrupt, SystemExit and the like, WatchError, what `hc.observe` raises and
    a debugger's `quit` replace the report.
    """
    exception = kept(number)
    if exception is None:
        return None
    kind = type(exception)  # `isinstance` would ask the exception's own `__class__`
    debugger = sys.modules.get("bdb")  # the base of pdb, imported by debuggers only
    is_no_error = not issubclass(kind, Exception)
    is_quit = debugger is not None and issubclass(kind, debugger.BdbQuit)
    if is_no_error or is_quit or issubclass(kind, errors.ReplacesReport):
        return hand_over_number(number)
    return None


def in_place_of_value_error(report: ValueError) -> BaseException | None:
    """What the caller of a program sees in place of a ValueError of JAX's fast path: a
    JaxRuntimeError, or what replaces that. None: the ValueError is none of JAX's.

    The engine calls this on the thread that raises it, before Python looks for a
    handler (native/base/report.h), and for every other ValueError. One that the user
    made of a report's text stays: that failure has been reported.
    """
    text = report.args[0] if len(report.args) == 1 else None
    if type(text) is not str:  # nothing of the user's runs here
        return None
    number = number_of(text)
    if _ledger.exception_of(number) is None or is_reported(number):
        return None
    mark_reported(number)
    return replacement(number) or jax.errors.JaxRuntimeError(text)


# --- Reports at the time JAX makes them ----------------------------------------------
#
# jaxlib's C++ makes a JaxRuntimeError of XLA's text on the thread that reads the
# result. The only Python code that runs on the way is the constructor of
# JaxRuntimeError. From the first failure on, that constructor is wrapped, for two
# purposes:
#
#   * A report with one of our numbers marks that failure as reported, so that `reraise`
#     does not raise it a second time.
#   * If the callback raised KeyboardInterrupt or SystemExit, the wrapper raises that
#     object, and Python drops the half-made report. The user's `except Exception` then
#     can't swallow a Ctrl-C. The same goes for WatchError, which has the bad values,
#     and for BdbQuit: whoever quits a debugger should not have to read a report.


class _Looking(threading.local):
    is_on = False  # whether hostcall, not the user, reads the reports made here


_looking = _Looking()


@contextlib.contextmanager
def not_reporting() -> Iterator[None]:
    """Inside, hostcall reads reports on this thread, and the user hears of none."""
    was_looking = _looking.is_on
    _looking.is_on = True
    try:
        yield
    finally:
        _looking.is_on = was_looking


def failures_of_effects() -> list[BaseException]:
    """Calls `_jax.wait_for_effects`; what it finds is not reported yet."""
    with not_reporting():
        return _jax.wait_for_effects(is_kept)


def failure_of(result: Any) -> Exception | None:
    """Waits for an array or a token; returns what JAX raises if its program failed."""
    with not_reporting():
        try:
            result.block_until_ready()
        except (*_jax.REPORTS, RuntimeError) as error:  # RuntimeError: it was deleted
            # Its traceback leads to all frames below this one. One of them is given the
            # error: a cycle, with whatever the user's frames hold.
            return error.with_traceback(None)
    return None


def _report_is_made(text: str) -> None:
    """Called in the constructor of each JaxRuntimeError, with its text."""
    if _looking.is_on:
        return
    number = number_of(text)
    raised_instead: BaseException | None = None
    with beside_a_failure("noting JAX's report"):
        mark_reported(number)
        raised_instead = replacement(number)
    if raised_instead is not None:
        raise raised_instead


_jax.handlers.quietly = not_reporting
_jax.handlers.report = _report_is_made
