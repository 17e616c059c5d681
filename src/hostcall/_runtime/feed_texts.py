"""Why feeds give nothing any more, in words, and what their sources raised."""

from __future__ import annotations

from hostcall._core import failures
from hostcall._core.errors import FeedError

# The reasons why a feed gives nothing any more. Each completes "the feed `x` ...".
CLOSED = "was closed. Make another hc.feed, or close it later"
INTERRUPTED = "was closed by Ctrl-C. Make another hc.feed"
ENDING = "was closed, since the process is ending"
FORKED = (
    "belongs to the process from which this one was forked, and its thread does not"
    " exist here. Start workers with multiprocessing's 'spawn' or 'forkserver' method,"
    " and make the feed in the worker"
)


class Failure:
    """What a source raised, for all who want items after it.

    The object is not held here once somebody has got it: its traceback then leads to
    the program, which holds the feed, and no garbage collector sees that circle. It is
    kept among the newest failures, as those of calls are.
    """

    def __init__(self, error: BaseException, name: str) -> None:
        self._error: BaseException | None = error
        self._name, self._said, self._number = name, failures.summary(error), 0

    def __call__(self) -> BaseException:
        error = self._error
        if error is not None:
            self._number, self._error = failures.keep(error), None
            return error
        return failures.kept(self._number) or FeedError(
            f"hostcall: the source of the feed `{self._name}` has failed before with"
            f" {self._said}. It gives nothing until reset() or restore() is called"
        )


def once(name: str, what: str) -> str:
    return (
        f"hostcall: the source of the feed `{name}` is an iterator, which can be"
        f" iterated only once: {what}. Give a function that returns a new iterator,"
        " hc.feed(lambda: make_iterator())"
    )
