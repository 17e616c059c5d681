"""What programs hold of feeds, and the feeds' threads.

Each thread owns one iterator, and puts its items into a ring.

The idea: only the feed's own thread touches the source, since iterators are not safe to
use from several threads, and the ring (native/queue/feed_ring.h) hands the items to the
devices. A device enters Python only if it has waited for 10 ms, or if no item can come.

Who holds whom, and so what ends a thread
  * A feed and the programs that use it hold its `Stream`. The thread holds the
    `Puller`, never the stream. So a stream that nothing can use any more is collected,
    and closes its puller.
  * The thread looks at `closed` before each pull, and waits only in the ring, which
    `close` wakes. A source that blocks holds its thread, a daemon, until it returns.

What other threads want of the iterator (reset, restore) is a job for the thread, which
runs between two pulls.

The position after each item that devices have not taken yet is kept, so the position of
the last item that was taken is known, whatever has been pulled ahead.
"""

from __future__ import annotations

import copy
import itertools
import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, ClassVar

from hostcall import _jax, _native
from hostcall._core import config, failures
from hostcall._core.counted import counted
from hostcall._core.daemon import Job, daemon, fulfil, start
from hostcall._core.errors import FeedEndError, FeedError
from hostcall._core.host_code import HostCode
from hostcall._core.process import Owned, living
from hostcall._core.wait import ended, over, wait
from hostcall._native import FeedFound
from hostcall._runtime import workers

# The reasons why a feed gives nothing any more. Each completes "the feed `x` ...".
CLOSED = "was closed. Make another hc.feed, or close it later"
INTERRUPTED = "was closed by Ctrl-C. Make another hc.feed"
ENDING = "was closed, since the process is ending"
FORKED = (
    "belongs to the process from which this one was forked, and its thread does not"
    " exist here. Start workers with multiprocessing's 'spawn' or 'forkserver' method,"
    " and make the feed in the worker"
)

# Seconds that close() and the end of the process wait for a source that blocks.
PATIENCE = 1.0

_NOTHING = object()


class Stream(HostCode):
    """What programs hold of a feed; calling it waits for an item.

    Equal only to itself, so each feed traces to programs of its own.

    Attributes:
        ending_since: when the end of the process began.
    """

    ending_since: ClassVar[float] = math.inf

    def __init__(
        self, puller: Puller, sizes: list[int], timeout: float | None, source: str
    ) -> None:
        self.puller, self.ring, self.timeout = puller, puller.ring, timeout
        self.sizes = sizes  # bytes of each leaf of an item, or of its block
        self.__qualname__ = puller.name
        self._source = source

    def source(self) -> str:
        return self._source

    def __call__(self, lane: int) -> None:
        """Returns when the lane may find an item. Called by the engine."""
        began, waiting = time.monotonic(), threading.get_ident()

        def item(seconds: float) -> bool:
            found = self.ring.wait(lane, seconds)
            if found is FeedFound.STOPPED:
                self.puller.why_stopped()
            return found is not FeedFound.NOTHING

        def look() -> None:
            since = max(began, Stream.ending_since)
            if time.monotonic() - since > config.EXIT_TIMEOUT:
                seconds = time.monotonic() - began
                self._late(f"{seconds:.0f} s, and the process is ending")

        # hc.monitor.status() shows where the source is.
        workers.delegates[waiting] = [self.puller.thread]
        try:
            if not wait(item, self.timeout, look):
                self._late(f"timeout={self.timeout:g} s")
                wait(item)
        except KeyboardInterrupt:
            self.puller.close(INTERRUPTED)
            raise
        finally:
            workers.delegates.pop(waiting, None)

    def _late(self, limit: str) -> None:
        frame = sys._current_frames().get(self.puller.thread)
        where = "its thread has ended"
        if frame is not None:
            last = traceback.extract_stack(frame)[-1]
            where = f"it is at {last.filename}:{last.lineno} in {last.name}"
        why = (
            f"gave no item for {limit}; {where}. If it only is slow, raise timeout=, or"
            " prefetch= if it comes in bursts"
        )
        if self.ring.lanes > 1:
            # All devices must fail, and before the same item: one that went on would
            # wait for the others in a collective. The next look finds the feed closed.
            self.puller.close(f"was closed, since its source {why}")
            return
        raise FeedError(f"hostcall: the source of the feed `{self.puller.name}` {why}")

    def __del__(self) -> None:
        self.puller.close(CLOSED)


def pullers() -> list[Puller]:
    """The feeds of this process that can be looked at."""
    return [p for p in living(Puller) if p.ring is not None and p.closed != FORKED]


def process_ends() -> None:
    """From now on, no program waits longer than EXIT_TIMEOUT for an item."""
    Stream.ending_since = time.monotonic()


def end_all() -> None:
    """Ends the threads of all feeds. No program can take items any more."""
    for puller in (mine := living(Puller)):
        puller.close(ENDING)
    until = time.monotonic() + PATIENCE
    for puller in mine:
        puller.close(ENDING, max(0.01, until - time.monotonic()))


# --- The thread ----------------------------------------------------------------------


class Puller(Owned):
    """A feed's thread, and what it shares with others.

    Attributes:
        name: the feed's name in messages.
        error: makes what programs raise after the last item; None while items may
            come, or if they see the end as ok=False.
        closed: the reason why nothing is pulled any more, or "".
    """

    def __init__(
        self, name: str, make: Callable[[int], Any], again: bool, on_end: str
    ) -> None:
        self.name, self.on_end = name, on_end
        self._make, self._again = make, again
        self.error: Callable[[], BaseException] | None = None
        self.closed = ""
        self.ring: Any = None
        self.since: float | None = None  # when the pull that is under way began
        self.epoch = self._item = 0
        self._read: Any = None  # see `begin`
        self._opened: Opened | None = None
        self._idle = False
        self._jobs = queue.SimpleQueue[Job]()
        # How many items devices have taken at each position, one more at each. Only the
        # thread changes it; others copy it as a whole.
        self._after: list[tuple[int, dict[str, Any]]] = [(0, {"epoch": 0, "item": 0})]
        self._as_host = False
        self._traced = _jax.traced_here()  # the source runs under these settings
        self._thread = daemon(f"hostcall-feed {name}", self._run)
        start(self._thread, f"the feed `{name}`")
        super().__init__()

    def renew(self) -> None:
        self.closed = FORKED
        # Never destroyed: a condition variable's destructor waits for its waiters, and
        # the threads of these do not exist here.
        if self.ring is not None:
            _native.keep_for_ever(self.ring)

    # --- For other threads

    @property
    def thread(self) -> int:
        return self._thread.ident or 0

    def first(self) -> Any:
        """Pulls the first item, which is also the first that devices get."""

        def peek() -> Any:
            value = self._next()
            assert self._opened is not None
            self._opened.iterator = itertools.chain([value], self._opened.iterator)
            return value

        if (value := self.ask(peek)) is _NOTHING:
            raise FeedError(
                f"hostcall: the source of the feed `{self.name}` gave no item, so there"
                " is none to take the spec from. Give spec=, a pytree of"
                " jax.ShapeDtypeStruct, if it may be empty",
                code="hc-feed-source",
            )
        return value

    def begin(self, ring: Any, read: Callable[[Any, int], list[Any]]) -> None:
        """Starts to pull ahead. `read(value, number)` makes the item's arrays."""
        self._read = read
        self.ring = ring  # from now on the thread may pull
        self._wake()

    def ask(self, job: Callable[[], Any]) -> Any:
        """Runs a job on the feed's thread, between two pulls."""
        if threading.get_ident() == self.thread:
            raise FeedError(
                f"hostcall: the source of the feed `{self.name}` called the feed's own"
                " reset() or restore(), which would wait for the source. Call it where"
                " the program is called",
                code="hc-deadlock",
            )
        future: Future[Any] = Future()
        self._jobs.put((future, job))
        if self.ring is not None:
            self.ring.wake()
        try:
            self.check_open()
            wait(ended(future), look=self.check_open)
            return future.result()
        finally:
            future.cancel()  # Ctrl-C: unless the thread has taken it

    def _wake(self) -> None:
        """Lets a thread that waits for its first job look at `closed` and `ring`."""
        self._jobs.put((Future(), lambda: None))

    def check_open(self) -> None:
        if self.closed:
            raise FeedError(f"hostcall: the feed `{self.name}` {self.closed}")

    def close(self, why: str, patience: float = 0.0) -> None:
        """Ends the thread. Nothing is pulled after this."""
        if not self.closed:
            self.closed = why
            if self.ring is not None:
                self.ring.close()
            self._wake()
        if patience and threading.get_ident() != self.thread:
            wait(over(self._thread), patience)

    def position(self) -> dict[str, Any]:
        """The position after the last item that was taken."""
        after = self._after[:]  # before the count: then its first item is taken
        taken = self.ring.counts()["taken"] - after[0][0]
        # A restart, which is under way, may have begun to count again.
        return copy.deepcopy(after[max(0, min(taken, len(after) - 1))][1])

    def state(self) -> str:
        if self.closed:
            return "closed"
        if isinstance(self.error, Failure):
            return "failed"
        if self._idle:
            return "ended"
        return "full" if self.since is None else "pulling"

    def why_stopped(self) -> None:
        """Raises the reason why no item comes, unless there has been a reset."""
        self.check_open()
        if (error := self.error) is not None:
            raise error()

    # --- Jobs

    def reset(self) -> None:
        """Starts the next epoch."""
        if not self._again:
            raise FeedError(once(self.name, "reset() can't start it again"))
        self._start_at(self.position()["epoch"] + 1, 0, None)

    def restore(self, epoch: int, item: int, saved: Any) -> None:
        """Goes on as after the item of this number."""
        if saved is None and not self._again:
            self._skip_to(epoch, item)
        else:
            self._start_at(epoch, item, saved)

    def _start_at(self, epoch: int, item: int, saved: Any) -> None:
        # If this raises, the feed goes on as before.
        self._be_host()
        opened = Opened(self._make(epoch))
        if saved is not None:
            if opened.load is None:
                raise FeedError(
                    f"hostcall: the state for the feed `{self.name}` holds a state of"
                    " its source, and the source can't take one: it has neither"
                    " set_state nor load_state_dict. Make the feed with the source that"
                    " it had when the state was saved"
                )
            opened.restore(copy.deepcopy(saved))  # the source may change what it got
        self.ring.clear()
        self.error, self._idle = None, False
        self.epoch, self._item = epoch, 0 if saved is None else item
        self._opened = opened
        self._note_start(copy.deepcopy(saved))
        self._skip(item - self._item)

    def _skip_to(self, epoch: int, item: int) -> None:
        now = self.position()
        ahead = item - now["item"]
        if ahead < 0 or epoch != now["epoch"]:
            raise FeedError(once(self.name, f"restore() can't go back to item {item}"))
        dropped = self.ring.drop(ahead)  # the ring forgets its end too
        self.error, self._idle = None, False
        self._skip(ahead - dropped)

    def _skip(self, count: int) -> None:
        """Pulls items that devices do not get. The ring is empty if there are any."""
        wanted = self._item + count
        try:
            while self._item < wanted and not self.closed:
                if self._next() is _NOTHING:
                    raise FeedError(
                        f"hostcall: the feed `{self.name}` can't go on after item"
                        f" {wanted}: its source gave only"
                        f" {counted(self._item, 'item')}. Is it the source with which"
                        " the state was saved?"
                    )
                self._item += 1
        except BaseException as error:
            failure = Failure(error, self.name)
            failure()  # the caller gets it
            self._finish(failure)
            raise
        finally:
            if count:
                self._note_start(None)

    def _note_start(self, saved: Any) -> None:
        position = {"epoch": self.epoch, "item": self._item}
        if saved is not None:
            position["source"] = saved
        elif self._item:
            position = self._position()
        self._after = [(self.ring.counts()["taken"], position)]

    # --- The thread

    def _run(self) -> None:
        try:
            if self._traced is not None:
                self._traced.enter()  # for the life of the thread
            while not self.closed:
                self._step()
        except BaseException as error:
            self.close(
                f"was closed, since its thread failed with {failures.summary(error)}."
                " Make another hc.feed"
            )
        finally:
            # The source may hold anything, also what leads to programs of this feed.
            self._opened = self._read = self.error = None
            del self._make

    def _step(self) -> None:
        if self.ring is None or not self._jobs.empty():
            fulfil(*self._jobs.get())
        elif self._idle:
            self.ring.idle()
        elif self.ring.reserve():
            self._pull()

    def _pull(self) -> None:
        try:
            value = self._next()
            if value is _NOTHING:
                self._end_epoch()
                return
            arrays = self._read(value, self._item)
            self._item += 1
            position = self._position()
        except BaseException as error:
            self._finish(Failure(error, self.name))
            return
        # Before the push: no device can have taken it then.
        self._after.append((self._after[-1][0] + 1, position))
        del self._after[: self.ring.counts()["taken"] - self._after[0][0]]
        self.ring.push(arrays)

    def _next(self) -> Any:
        """The next item, or _NOTHING at the end."""
        self._be_host()
        self.since = time.monotonic()
        try:
            if self._opened is None:
                self._opened = Opened(self._make(self.epoch))
                if not self._again:
                    # Only its state leads back to the start.
                    self._after[0] = (0, self._position())
            return next(self._opened.iterator, _NOTHING)
        finally:
            self.since = None

    def _be_host(self) -> None:
        # The program that waits for the item may occupy its client's only stream.
        if not self._as_host:
            self._as_host = workers.be_host_code()

    def _end_epoch(self) -> None:
        if self.on_end == "mask":
            self._idle = True
            self.ring.finish(FeedFound.END)
        elif self.on_end == "raise":
            text = (
                f"hostcall: the feed `{self.name}` has ended after"
                f" {counted(self._item, 'item')}, and a program wants another"
                ' (on_end="raise"). Run fewer steps, call feed.reset() before the next'
                ' epoch, or use "mask"'
            )
            self._finish(lambda: FeedEndError(text))
        elif self._item == 0:
            text = (
                f"hostcall: the source of the feed `{self.name}` gave no item in epoch"
                f' {self.epoch}, so on_end="repeat" would repeat it for ever. Does it'
                " give an iterator that was used up before?"
            )
            self._finish(lambda: FeedError(text))
        else:
            self.epoch, self._item = self.epoch + 1, 0
            self._opened = None

    def _finish(self, error: Callable[[], BaseException]) -> None:
        self.error, self._idle = error, True
        self.ring.finish(FeedFound.STOPPED)

    def _position(self) -> dict[str, Any]:
        """The position after the item that was pulled last."""
        position = {"epoch": self.epoch, "item": self._item}
        if self._opened is not None and self._opened.save is not None:
            # A copy: the source may go on changing what it returned.
            position["source"] = copy.deepcopy(self._opened.save())
        return position


# --- The source ----------------------------------------------------------------------

# grain's iterators have the first pair, torchdata's StatefulDataLoader and the data
# sets of Hugging Face the second.
_STATES = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


class Opened:
    """A source that is being iterated, with the state of its iterator or else its own.

    Attributes:
        iterator: gives the items.
        save: returns the source's own state; None if it has none.
    """

    save: Callable[[], Any] | None = None
    load: Callable[[Any], Any] | None = None

    def __init__(self, made: Any) -> None:
        if callable(getattr(made, "as_numpy_iterator", None)):  # a tf.data.Dataset
            made = made.as_numpy_iterator()
        self.iterator: Iterator[Any] = iter(made)
        for holder in (self.iterator, made):
            for save, load in _STATES:
                if callable(getattr(holder, save, None)) and hasattr(holder, load):
                    self._holder = holder
                    self.save, self.load = getattr(holder, save), getattr(holder, load)
                    return

    def restore(self, state: Any) -> None:
        """Puts such a state back, and goes on from there."""
        assert self.load is not None
        self.load(state)
        self.iterator = iter(self._holder)  # an iterator is its own


# --- Why there is nothing more -------------------------------------------------------


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
