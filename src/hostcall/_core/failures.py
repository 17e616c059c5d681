"""The exceptions that callbacks raised, by number, and who has been told of them."""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax

from hostcall import _jax
from hostcall._core import config, frames

_NUMBER = re.compile(r"\[hostcall error (\d+)\]")


class _Kept:
    """An exception under its number.

    Attributes:
        exception: the object. Once the user has it and a newer one has come: a weak
            reference to it, or where its type (one of C's) allows none, a copy.
        own: the tracebacks whose frames are the callback's own.
        handed_over: the user has the object itself, so its frames are the user's.
    """

    __slots__ = ("exception", "handed_over", "own")

    def __init__(self, exception: BaseException, handed_over: bool) -> None:
        self.exception: Any = exception
        self.handed_over = handed_over
        self.own = () if handed_over else frames.own_tracebacks(exception)

    def get(self) -> BaseException | None:
        held = self.exception
        found = held() if isinstance(held, weakref.ref) else held
        return found  # type: ignore[no-any-return]

    def let_go(self) -> None:
        """Lets go of the values in its frames, since it is not the newest any more.

        Frames that the user may be looking at are left alone: then hostcall lets go of
        the object.
        """
        own: tuple[TracebackType, ...] = ()
        with _lock:
            own, self.own = self.own, own
            exception = self.get()
            if self.handed_over:
                own = ()
                if exception is not None:
                    self.exception = _without_frames(exception)
        for trace in own:
            frames.clear_values(trace)


_kept: OrderedDict[int, _Kept] = OrderedDict()
_numbers = itertools.count(1)
_last = 0
_lock = threading.Lock()


def keep(exception: BaseException, handed_over: bool = False) -> int:
    """Keeps an exception that a callback raised, and gives its number.

    Args:
        exception: the object.
        handed_over: it is also raised to the caller, who may handle it.
    """
    global _last
    _watch_reports()
    kept, gone = _Kept(exception, handed_over), []
    with _lock:
        before = _kept.get(_last)
        number = _last = next(_numbers)
        _kept[number] = kept
        while len(_kept) > config.KEPT_ERRORS:
            gone.append(_kept.popitem(last=False))
    # Without the lock, since what goes may run code of the user's.
    if before is not None:
        before.let_go()
    return number


def hand_over(exception: BaseException) -> None:
    """Notes that the user gets this object, if it is one of those that are kept."""
    with _lock:
        found = [kept for kept in _kept.values() if kept.exception is exception]
    for kept in found:
        _hand_over(kept)


def _hand_over(kept: _Kept) -> None:
    """The newest is kept on, with its frames; any other is the user's alone."""
    with _lock:
        kept.handed_over = True
        newest = kept is _kept.get(_last)
    if not newest:
        kept.let_go()


def _without_frames(exception: BaseException) -> Any:
    try:
        return weakref.ref(exception)
    except TypeError:
        pass
    if isinstance(exception, BaseExceptionGroup):
        return None  # its members have frames
    try:
        return copy.copy(exception)
    except Exception:  # of a type that can't be made from its `args`
        return None


def summary(exception: BaseException) -> str:
    """`Type: message`, whatever the exception's own code does."""
    try:
        message = str(exception)
    except Exception as error:
        message = f"<its str() raised {type(error).__name__}>"
    return type(exception).__name__ + (f": {message}" if message else "")


def text_for_xla(
    exception: BaseException, name: str, place: object, row: tuple[int, ...]
) -> str:
    """The line that JaxRuntimeError shows for an exception of a callback."""
    # It goes through a C string in UTF-8.
    said = summary(exception).replace("\0", "\\0")
    said = said.encode("utf-8", "backslashreplace").decode()
    at = f", row {row[0] if len(row) == 1 else row}" if row else ""
    return numbered(exception, f"{said} (in callback `{name}`{at}, called at {place})")


def numbered(exception: BaseException, said: str) -> str:
    """What is said of an exception, with the number under which it is kept."""
    return f"{said} [hostcall error {keep(exception)}]"


def without_number(text: str) -> str:
    """What another process said, whose numbers are its own."""
    return _NUMBER.sub("", text).rstrip()


def failures_so_far() -> int:
    """How many callbacks have failed in this process."""
    return _last


def number_in(report: BaseException) -> int:
    """The number that a report of JAX's ends with; 0 where it is not hostcall's."""
    return _number_in(str(report))


def _number_in(text: str) -> int:
    found = _NUMBER.findall(text)
    return int(found[-1]) if found else 0


def original(report: BaseException) -> BaseException | None:
    """The exception behind what JAX raised for a failed program, if still kept.

    It is raised in place of the report, and so the user's from now on.
    """
    kept = _kept.get(number_in(report))
    if kept is None:
        return None
    found = kept.get()
    _hand_over(kept)
    return found


def is_kept(error: BaseException) -> bool:
    """Whether a callback raised this object."""
    with _lock:
        return any(kept.get() is error for kept in _kept.values())


def last_error() -> BaseException | None:
    """The exception object that a callback raised last, or None.

    It has its own traceback, into the callback, with the values of its frames. The
    newest 32 exceptions are kept, across all threads; only the newest keeps values
    that nobody else holds. Cost: none unless something failed.
    """
    kept = _kept.get(_last)
    if kept is None:
        return None
    kept.handed_over = True
    return kept.get()


def failures_of_effects() -> list[BaseException]:
    """`_jax.wait_for_effects`, for hostcall to know."""
    with looking():
        return _jax.wait_for_effects(is_kept)


def failures_of_arrays() -> Iterator[Exception]:
    """Waits for every array that lives; gives what JAX raises for those that failed."""
    for array in jax.live_arrays():
        failure = failure_of(array)
        if failure is not None:
            yield failure


def failure_of(result: Any) -> Exception | None:
    """Waits for an array or a token; gives what JAX raises if its program failed."""
    with looking():
        try:
            result.block_until_ready()
        except (*_jax.REPORTS, RuntimeError) as error:  # RuntimeError: it is deleted
            return error
    return None


def in_place_of(report: BaseException) -> BaseException | None:
    """What the caller shall see for what JAX raised on the thread that called.

    The engine asks while the exception looks for its handler (native/base/report.h).
    """
    kept = _kept.get(number_in(report))
    if kept is None:
        return None
    found = kept.get()
    if not isinstance(found, Exception):
        return original(report)
    if type(report) is ValueError:
        same: BaseException = jax.errors.JaxRuntimeError(str(report))
        return same
    return None


# --- Reports, as they are made -------------------------------------------------------
#
# XLA carries text, jaxlib's C++ makes a JaxRuntimeError of it on the thread that looks
# at the result, and nothing runs in between. What does run is the class itself. So from
# the first failure on, making a JaxRuntimeError with our number notes that somebody has
# been told of it. And KeyboardInterrupt and SystemExit come out as themselves: an
# exception that is raised while another is made takes its place, in every version and
# on the fast path too.

_TOLD_AT_MOST = 4096
_told: set[int] = set()
_told_below = 0  # what is older counts as told

_looking = threading.local()
_watching = False


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """What this thread is told inside, hostcall is told and not the user."""
    before = getattr(_looking, "on", False)
    _looking.on = True
    try:
        yield
    finally:
        _looking.on = before


def is_told(number: int) -> bool:
    """Whether the user has been told of this failure, by a report or the object."""
    return number in _told or number <= _told_below


def tell(number: int) -> None:
    """Notes that the user has been told."""
    global _told, _told_below
    with _lock:
        _told.add(number)
        if len(_told) > _TOLD_AT_MOST:
            _told_below = sorted(_told)[_TOLD_AT_MOST // 2]
            _told = {n for n in _told if n > _told_below}


def _watch_reports() -> None:
    global _watching
    if _watching:
        return
    _watching = True
    _jax.tell_of_reports(_report_is_made)


def _report_is_made(text: str) -> None:
    number = _number_in(text)
    kept = _kept.get(number)
    found = None if kept is None else kept.get()
    comes_out = found is not None and not isinstance(found, Exception)
    if getattr(_looking, "on", False) and (is_told(number) or not comes_out):
        return
    if number:
        tell(number)
    if found is not None and kept is not None and comes_out:
        _hand_over(kept)
        raise found
