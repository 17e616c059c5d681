"""What can go wrong, what it says, and where the callback's own exception is kept.

    HostcallError
    ├── SpecError(ValueError)          the call is written wrong: found at trace time
    ├── BatchingError(ValueError)      vmap was not told how
    ├── DerivativeError(ValueError)    a derivative that nobody has given
    ├── ResultError(ValueError)        the function returned something else
    ├── EscapeError(RuntimeError)      a lent view was kept
    ├── UnwrittenError(RuntimeError)   lent memory for results was not written
    ├── CallTimeoutError(TimeoutError) the function took longer than `timeout=`
    ├── DeadlockError(RuntimeError)    a callback would wait for its own program
    └── ExportError(NotImplementedError) a program whose functions can't go with it

The first three and the last are raised to the caller. The others, like whatever the
user's function raises, fail the program that called: XLA carries only text, so the
text ends with a number under which the exception object is kept.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax

from hostcall import _config, _jax


class HostcallError(Exception):
    """Base of all errors that hostcall itself raises."""


class SpecError(HostcallError, ValueError):
    """A call whose `result`, options or arguments can't mean anything."""


class BatchingError(HostcallError, ValueError):
    """`vmap` of a call that was not told how it batches."""


class DerivativeError(HostcallError, ValueError):
    """A derivative or transposition of a call without a rule for it."""


class ResultError(HostcallError, ValueError):
    """The function returned something else than its `result` says."""


class EscapeError(HostcallError, RuntimeError):
    """A view of lent memory is still referenced after the call."""


class UnwrittenError(HostcallError, RuntimeError):
    """The function returned without writing its lent `out`."""


class CallTimeoutError(HostcallError, TimeoutError):
    """The function took longer than its `timeout=`."""


class DeadlockError(HostcallError, RuntimeError):
    """A callback started a program that would wait for the one that calls it."""


class ExportError(HostcallError, NotImplementedError):
    """A program is exported or serialized whose host functions can't go with it."""


_NUMBER = re.compile(r"\[hostcall error (\d+)\]")
_kept: OrderedDict[int, BaseException] = OrderedDict()
_came_out: set[int] = set()
_numbers = itertools.count(1)
_last = 0
_lock = threading.Lock()


def keep(exception: BaseException, comes_out: bool = False) -> int:
    """Keeps an exception that a callback raised, and gives its number.

    Args:
        exception: the object.
        comes_out: it is also raised to the caller, who may handle it.
    """
    global _last
    with _lock:
        number = _last = next(_numbers)
        _kept[number] = exception
        if comes_out:
            _came_out.add(number)
            _came_out.intersection_update(_kept)
        while len(_kept) > _config.KEPT_ERRORS:
            _kept.popitem(last=False)
    if not isinstance(exception, Exception):
        _come_out_as_themselves()
    return number


def text_for_xla(
    exception: BaseException, name: str, place: object, row: tuple[int, ...]
) -> str:
    """The line that JaxRuntimeError shows for an exception of a callback."""
    number = keep(exception)
    try:
        message = str(exception)
    except Exception as error:  # a text for the user's exception, whatever it does
        message = f"<its str() raised {type(error).__name__}>"
    # It goes through a C string in UTF-8.
    message = message.replace("\0", "\\0")
    message = message.encode("utf-8", "backslashreplace").decode()
    said = type(exception).__name__ + (f": {message}" if message else "")
    at = f", row {row[0] if len(row) == 1 else row}" if row else ""
    return (
        f"{said} (in callback `{name}`{at}, called at {place})"
        f" [hostcall error {number}]"
    )


def any_failure() -> bool:
    """Whether a callback has failed in this process."""
    return _last != 0


# What JAX raises for a program that failed. It is JaxRuntimeError, but on its fast path
# ValueError, which is only seen under somebody else's trace function (`in_place_of`).
_REPORTS = (jax.errors.JaxRuntimeError, ValueError)


def _number(report: BaseException) -> int:
    found = _NUMBER.findall(str(report))
    return int(found[-1]) if found else 0


def original(report: BaseException) -> BaseException | None:
    """The exception behind what JAX raised for a failed program, if still kept."""
    with _lock:
        return _kept.get(_number(report))


def is_kept(error: BaseException) -> bool:
    """Whether a callback raised this object."""
    with _lock:
        return any(kept is error for kept in _kept.values())


def last_error() -> BaseException | None:
    """The exception object that a callback raised last, or None.

    It has its own traceback, into the callback. The newest 32 are kept, across all
    threads. Cost: none unless something failed.
    """
    with _lock:
        return _kept.get(_last)


def failures_of_arrays() -> Iterator[Exception]:
    """Waits for every array that lives; gives what JAX raises for those that failed."""
    for array in jax.live_arrays():
        try:
            if not array.is_deleted():
                array.block_until_ready()
        except (*_REPORTS, RuntimeError) as error:  # RuntimeError: donated meanwhile
            yield error


class reraise(contextlib.ContextDecorator):
    """Context manager and decorator: the callback's own exception comes out.

    A program whose callback raised fails with `jax.errors.JaxRuntimeError`, since
    XLA carries only text. Within `reraise` the object that the callback raised is
    raised in its place, with the traceback into the callback, and the
    JaxRuntimeError as its `__context__`.

    Leaving without an error waits for everything that JAX has under way, so that a
    program that was only dispatched inside fails here and not later. One that has no
    effect and whose results nobody keeps is nobody's to wait for, JAX's neither: keep
    what a pure call is needed for, or give the call an order.

    Raises:
        BaseException: what the callback raised; of several, the one that JAX
            reported, else the first.

    Cost: one wait when the block is left; nothing inside it.
    """

    def __enter__(self) -> reraise:
        with _lock:
            self._before = _last
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._wait()
            with _lock:
                lost = [
                    error
                    for number, error in _kept.items()
                    if number > self._before and number not in _came_out
                ]
            if lost:  # JAX did not tell: its results are gone
                raise lost[0]
        elif isinstance(error, _REPORTS):
            found = original(error)
            if found is not None:
                raise found

    def _wait(self) -> None:
        reports = [*_jax.wait_for_effects(), *failures_of_arrays()]
        for report in reports:
            found = original(report) if _number(report) > self._before else None
            if found is not None:
                try:
                    raise report
                except _REPORTS:
                    raise found  # noqa: B904  (the report is its context)


def in_place_of(report: BaseException) -> BaseException | None:
    """What the caller shall see for what JAX raised on the thread that called.

    The engine asks while the exception looks for its handler (native/report.h).
    """
    found = original(report)
    if found is None:
        return None
    if not isinstance(found, Exception):
        return found
    if type(report) is ValueError:
        same: BaseException = jax.errors.JaxRuntimeError(str(report))
        return same
    return None


# --- KeyboardInterrupt and SystemExit come out as themselves -----------------------
#
# XLA carries text, jaxlib's C++ makes a JaxRuntimeError of it, and nothing runs in
# between. What does run is the class itself: an exception that is raised while
# another is made takes its place, in every version and on the fast path too. So once
# a callback has raised one of those two, and only then, making a JaxRuntimeError
# with its number raises it.

_armed = False


def _come_out_as_themselves() -> None:
    global _armed
    if _armed:
        return
    _armed = True
    plain = jax.errors.JaxRuntimeError.__init__

    def init(self: Any, *args: Any) -> None:
        plain(self, *args)
        if args and isinstance(args[0], str):
            found = original(Exception(args[0]))
            if found is not None and not isinstance(found, Exception):
                raise found

    jax.errors.JaxRuntimeError.__init__ = init  # type: ignore[method-assign]


__all__ = [
    "BatchingError",
    "CallTimeoutError",
    "DeadlockError",
    "DerivativeError",
    "EscapeError",
    "ExportError",
    "HostcallError",
    "ResultError",
    "SpecError",
    "UnwrittenError",
    "last_error",
    "reraise",
]
