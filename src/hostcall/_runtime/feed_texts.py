"""Why feeds give nothing any more, in words, and what their sources raised."""

from __future__ import annotations

from hostcall._core import failures
from hostcall._core.counted import counted
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


def ended(name: str, count: int) -> str:
    return (
        f"hostcall: the feed `{name}` has ended after {counted(count, 'item')}, and a"
        ' program wants another (on_end="raise"). Run fewer steps, call feed.reset()'
        ' before the next epoch, or use "mask"'
    )


def empty(name: str, epoch: int) -> str:
    return (
        f"hostcall: the source of the feed `{name}` gave no item in epoch {epoch}, so"
        ' on_end="repeat" would repeat it for ever. Does it give an iterator that was'
        " used up before?"
    )


def once(name: str, what: str) -> str:
    return (
        f"hostcall: the source of the feed `{name}` is an iterator, which can be"
        f" iterated only once: {what}. Give a function that returns a new iterator,"
        " hc.feed(lambda: make_iterator())"
    )


def too_few(name: str, wanted: int, given: int) -> str:
    return (
        f"hostcall: the feed `{name}` can't go on after item {wanted}: its source gave"
        f" only {counted(given, 'item')}. Is it the source with which the state was"
        " saved?"
    )


def no_state(name: str) -> str:
    return (
        f"hostcall: the state for the feed `{name}` holds a state of its source, and"
        " the source can't take one: it has neither set_state nor load_state_dict. Make"
        " the feed with the source that it had when the state was saved"
    )


def died(error: BaseException) -> str:
    return (
        f"was closed, since its thread failed with {failures.summary(error)}. Make"
        " another hc.feed"
    )
