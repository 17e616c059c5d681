"""The records of failures: what is held of each, and for how long.

`failures` says what a failure is, what becomes of it, and what the ledger promises.
These are the records that it keeps:

    Ledger            all of them, and the order in which exceptions are released
    Failure           one failure: its number, its exception while that is kept, and
                      whether it was reported
    KeptException     the exception, which several failures may share
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from hostcall._core import config
from hostcall._core.process import Guarded

# How many failures later a record is forgotten whose exception is released. The failure
# then counts as reported, so a program that fails for ever keeps a bounded ledger.
REMEMBERED = 4096


class KeptException:
    """The exception of a failure, or of several: what a feed's source raised comes
    again from each program that asks the feed.

    Attributes:
        held: the object. Once the user has it and a newer failure has arrived, a weak
            reference to it, or a copy without frames if its type (one written in C)
            allows no weak references, or None if it allows neither.
        tracebacks: those of its chain that belong to the callback, with their
            tracebacks, until they are emptied.
        is_handed_over: the user has the object itself, and it was not raised again
            since then. So its frames must stay.
        first_raised: when, in seconds of time.monotonic().
    """

    __slots__ = ("first_raised", "held", "is_handed_over", "tracebacks")

    def __init__(self, exception: BaseException) -> None:
        self.held: Any = exception
        self.is_handed_over = False
        self.first_raised = time.monotonic()
        self.tracebacks: list[tuple[BaseException, TracebackType]] = []

    def get(self) -> BaseException | None:
        reference = self.held
        if type(reference) is weakref.ref:
            return reference()  # type: ignore[no-any-return]
        return reference  # type: ignore[no-any-return]


class Failure:
    """The record of one failure.

    Attributes:
        number: the one in its text; 1 for the first of the process.
        exception: what was raised; None once it is released.
        is_reported: whether the user has heard of it.
    """

    __slots__ = ("exception", "is_reported", "number")

    def __init__(self, number: int, exception: KeptException | None) -> None:
        self.number = number
        self.exception = exception
        self.is_reported = False


class Ledger(Guarded):
    """All records.

    Attributes:
        lock: held for every change of the rest; single reads go without it.
        records: by number.
        kept: the records whose exception is held, the oldest first.
        newest: the number of the newest.
        explainers: add to an error what it may follow from; see `explained_by`.
    """

    def __init__(self) -> None:
        self.records: dict[int, Failure] = {}
        self.kept: deque[Failure] = deque()
        self.newest = 0
        self.explainers: list[Callable[[BaseException], object]] = []
        super().__init__()

    def exception_of(self, number: int) -> KeptException | None:
        failure = self.records.get(number)
        # Read once: without the lock, another thread may release it meanwhile.
        return None if failure is None else failure.exception

    def newest_exception(self) -> KeptException | None:
        return self.exception_of(self.newest)

    def exceptions(self) -> list[KeptException]:
        """What is held, the oldest first."""
        # The deque is copied in one step: a signal handler may add to it meanwhile.
        exceptions = [failure.exception for failure in self.kept.copy()]
        return [exception for exception in exceptions if exception is not None]

    def add(self, exception: KeptException) -> Failure:
        """Makes the record of a failure that has just happened."""
        self.newest += 1
        failure = Failure(self.newest, exception)
        self.records[failure.number] = failure
        self.kept.append(failure)
        self.forget_old()
        return failure

    def keeps_too_many(self) -> bool:
        if len(self.kept) <= config.KEPT_ERRORS:
            return False
        if len(self.kept) > config.MOST_KEPT_ERRORS:
            return True
        oldest = self.kept[0].exception
        assert oldest is not None, "a kept failure has its exception"
        return time.monotonic() - oldest.first_raised > config.KEPT_SECONDS

    def release_oldest(self) -> KeptException | None:
        """Returns what the oldest kept record held, for the caller to drop."""
        failure = self.kept.popleft()
        exception = failure.exception
        failure.exception = None
        return exception

    def forget_old(self) -> None:
        """Drops records that are old and released, once there are many.

        The reported ones are remembered longest: an array of a failed program may live
        on (a printed traceback keeps it in its frames), and each barrier looks at it.
        """
        # Each time removes at least a third of them, so it costs little per failure.
        if len(self.records) < 3 * REMEMBERED:
            return
        oldest_remembered = self.newest - REMEMBERED
        records = list(self.records.values())
        old = [failure for failure in records if failure.number <= oldest_remembered]
        reported = [failure for failure in old if failure.is_reported]
        for failure in old:
            assert failure.exception is None, "fewer are kept than are remembered"
            if not failure.is_reported or len(reported) > REMEMBERED:
                del self.records[failure.number]
