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
import enum
import functools
import itertools
import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from hostcall import _jax, _native
from hostcall._core import config, failures
from hostcall._core.daemon import Job, daemon, fulfil, start
from hostcall._core.errors import FeedEndError, FeedError, counted
from hostcall._core.host_code import HostCode
from hostcall._core.process import PerProcess, living
from hostcall._core.wait import result_of, until_result, until_thread_ends, wait
from hostcall._native import FeedFound
from hostcall._runtime import lifecycle, workers
from hostcall._runtime.lifecycle import Phase

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
        self.puller = puller
        self.ring = puller.ring
        self.timeout = timeout
        self.sizes = sizes  # bytes of each leaf of an item, or of its block
        self.__qualname__ = puller.name
        self._source = source

    def source(self) -> str:
        return self._source

    def __call__(self, lane: int) -> None:
        """Returns when the lane may find an item. Called by the engine."""
        began = time.monotonic()
        waiting = threading.get_ident()

        def has_item(seconds: float) -> bool:
            answer = self.ring.wait(lane, seconds)
            if answer is FeedFound.STOPPED:
                self.puller.check_open()
                error = self.puller.outcome.error
                if error is not None:  # else there was a reset
                    raise error()
            return answer is not FeedFound.NOTHING

        def refuse_at_the_end() -> None:
            since = max(began, Stream.ending_since)
            if time.monotonic() - since > config.EXIT_TIMEOUT:
                seconds = time.monotonic() - began
                self._late(f"{seconds:.0f} s, and the process is ending")

        # hc.monitor.status() shows where the source is.
        workers.delegates[waiting] = [self.puller.thread]
        try:
            if not wait(has_item, self.timeout, refuse_at_the_end):
                self._late(f"timeout={self.timeout:g} s")
                # With several lanes this closes the feed, which is found now.
                wait(has_item)
        except KeyboardInterrupt:
            self.puller.close(INTERRUPTED)
            raise
        finally:
            workers.delegates.pop(waiting, None)

    def _late(self, limit: str) -> None:
        frame = sys._current_frames().get(self.puller.thread)
        position = "its thread has ended"
        if frame is not None:
            line = traceback.extract_stack(frame)[-1]
            position = f"it is at {line.filename}:{line.lineno} in {line.name}"
        why = (
            f"gave no item for {limit}; {position}. If it only is slow, raise timeout=,"
            " or prefetch= if it comes in bursts"
        )
        if self.ring.lanes > 1:
            # All devices must fail, and before the same item: one that went on would
            # wait for the others in a collective. The next look finds the feed closed.
            self.puller.close(f"was closed, since its source {why}")
            return
        raise FeedError(f"hostcall: the source of the feed `{self.puller.name}` {why}")

    def __del__(self) -> None:
        self.puller.close(CLOSED)


def process_ends() -> None:
    """From now on, no program waits longer than EXIT_TIMEOUT for an item."""
    Stream.ending_since = time.monotonic()


def end_all() -> None:
    """Ends the threads of all feeds. No program can take items any more."""
    pullers = living(Puller)
    for puller in pullers:
        puller.close(ENDING)
    # All end at the same time, so one limit holds for all.
    until = time.monotonic() + PATIENCE
    for puller in pullers:
        puller.close(ENDING, max(0.01, until - time.monotonic()))


lifecycle.at_end(Phase.SCRIPT, process_ends)
lifecycle.at_end(Phase.FEEDS, end_all)


# --- The thread ----------------------------------------------------------------------


class State(enum.Enum):
    """What a feed's thread does. Its values are what monitors show."""

    value: str

    OPEN = "open"  # pulls ahead
    ENDED = "ended"  # waits for reset() or restore() after the last item
    FAILED = "failed"  # the same, after the source has raised
    CLOSED = "closed"  # ends, and nothing starts it again


class Outcome(NamedTuple):
    """How the epoch goes on. The thread alone replaces it, as a whole.

    Attributes:
        state: any but CLOSED, which other threads decide.
        error: makes what programs raise after the last item; None while items may
            come, or if programs see the end as ok=False. It makes a new one each time,
            whose traceback leads to the program that raises it.
    """

    state: State = State.OPEN
    error: Callable[[], BaseException] | None = None


class Positions:
    """The position after each item that was pulled, from the last that devices took on.

    The thread alone changes it. Others copy the list in a single step, and look at the
    copy.
    """

    def __init__(self) -> None:
        # (how many items devices have taken there, the position), one more at each.
        self._after: list[tuple[int, dict[str, Any]]] = [(0, {"epoch": 0, "item": 0})]

    def begin(self, position: dict[str, Any]) -> None:
        """The position before the first item, once the source is open."""
        self._after[0] = (0, position)

    def add(self, position: dict[str, Any], taken: int) -> None:
        """The position after the newest item. Drops those before the last taken one."""
        newest, _ = self._after[-1]
        self._after.append((newest + 1, position))
        oldest, _ = self._after[0]
        assert oldest <= taken <= newest + 1, "devices take what was pulled, in order"
        del self._after[: taken - oldest]

    def restart(self, position: dict[str, Any], taken: int) -> None:
        """All items that were pulled are taken or forgotten."""
        self._after = [(taken, position)]

    def after(self, count_taken: Callable[[], int]) -> dict[str, Any]:
        """The position after the last item that was taken."""
        positions = self._after[:]  # before the count: then its first item is taken
        oldest, _ = positions[0]
        # A restart, which is under way, may have begun to count again.
        index = max(0, min(count_taken() - oldest, len(positions) - 1))
        _, position = positions[index]
        return copy.deepcopy(position)


class Puller(PerProcess):
    """A feed's thread, and what it shares with others.

    Attributes:
        name: the feed's name in messages.
        outcome: how the epoch goes on.
        closed: the reason why nothing is pulled any more, or "". Any thread may set it,
            and nothing takes it back.
        since: when the pull that is under way began.
    """

    def __init__(
        self, name: str, make: Callable[[int], Any], again: bool, on_end: str
    ) -> None:
        self.name = name
        self.on_end = on_end
        self._make = make
        self._again = again
        self.outcome = Outcome()
        self.closed = ""
        self.ring: Any = None
        self.since: float | None = None
        self._read: Any = None  # see `begin`
        self._opened: Opened | None = None  # from the first pull on
        self._jobs = queue.SimpleQueue[Job]()
        self._positions = Positions()
        self._as_host = False
        self._traced = _jax.traced_here()  # the source runs under these settings
        self._thread = daemon(f"hostcall-feed {name}", self._run)
        start(self._thread, f"the feed `{name}`")
        super().__init__()

    def after_fork(self) -> None:
        self.closed = FORKED  # the thread does not exist here
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
            opened, value = self._next()
            opened.iterator = itertools.chain([value], opened.iterator)
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
            wait(until_result(future), look=self.check_open)
            return result_of(future)
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
            self.closed = why  # before the devices wake, which then look at it
            if self.ring is not None:
                self.ring.close()
            self._wake()
        if patience and threading.get_ident() != self.thread:
            wait(until_thread_ends(self._thread), patience)

    def position(self) -> dict[str, Any]:
        """The position after the last item that was taken."""
        return self._positions.after(lambda: self.ring.counts()["taken"])

    @property
    def state(self) -> State:
        return State.CLOSED if self.closed else self.outcome.state

    def shown(self) -> str:
        """The state as monitors show it; of an open feed, whether it is full."""
        state = self.state
        if state is not State.OPEN:
            return state.value
        return "full" if self.since is None else "pulling"

    def stats(self) -> FeedStats:
        counts = self.ring.counts()
        position = self.position()
        since = self.since
        return FeedStats(
            name=self.name,
            state=self.shown(),
            epoch=position["epoch"],
            item=position["item"],
            taken=counts["total"],
            ready=counts["put"] - counts["taken"],
            device_waits=counts["waits"],
            device_seconds=counts["wait_seconds"],
            source_waits=counts["stalls"],
            source_seconds=counts["stall_seconds"],
            pulling_seconds=0.0 if since is None else time.monotonic() - since,
        )

    # --- Jobs. If the source can't be opened, or refuses a state, the feed goes on as
    # before.

    def reset(self) -> None:
        """Starts the next epoch."""
        if not self._again:
            raise FeedError(once(self.name, "reset() can't start it again"))
        self.restore(self.position()["epoch"] + 1, 0, None)

    def restore(self, epoch: int, item: int, saved: Any) -> None:
        """Goes on as after the item of this number, where the source was `saved`."""
        if saved is None and not self._again:
            now = self.position()
            opened = self._opened or self._open(epoch)
            ahead = item - now["item"]
            if ahead < 0 or epoch != now["epoch"]:
                refused = f"restore() can't go back to item {item}"
                raise FeedError(once(self.name, refused))
            # The ring forgets its end too.
            self._go_on(opened, opened.item + ahead - self.ring.drop(ahead))
            return
        opened = self._open(epoch)
        if saved is not None:
            opened.restore(saved, self.name)
            opened.item = item
        self.ring.clear()
        self._go_on(opened, item, saved)

    def _go_on(self, opened: Opened, item: int, saved: Any = None) -> None:
        """Goes on after this item, without those before it: the ring is empty then."""
        self.outcome = Outcome()
        self._opened = opened
        self.since = time.monotonic()
        try:
            while opened.item < item and not self.closed:
                if self._next()[1] is _NOTHING:
                    raise FeedError(
                        f"hostcall: the feed `{self.name}` can't go on after item"
                        f" {item}: its source gave only"
                        f" {counted(opened.item, 'item')}. Is it the source with which"
                        " the state was saved?"
                    )
                opened.item += 1
        except BaseException as error:
            self._fail(error)()  # the caller gets it
            raise
        finally:
            self.since = None
            counts = self.ring.counts()
            if counts["put"] == counts["taken"]:
                self._positions.restart(opened.position(saved), counts["taken"])

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
            self._opened = self._read = None
            self.outcome = self.outcome._replace(error=None)
            del self._make

    def _step(self) -> None:
        if self.ring is None or not self._jobs.empty():
            # Without a ring there is nothing to pull for: this waits for a job.
            fulfil(*self._jobs.get())
        elif self.outcome.state is not State.OPEN:
            self.ring.idle()
        elif self.ring.reserve():
            self.since = time.monotonic()
            self._pull()
            self.since = None

    def _pull(self) -> None:
        try:
            opened, value = self._next()
            if value is _NOTHING:
                self._end_epoch(opened)
                return
            arrays = self._read(value, opened.item)
            opened.item += 1
            position = opened.position()
        except BaseException as error:
            self._fail(error)
            return
        # Before the push: no device can have taken it then, and the position is there
        # when one does.
        self._positions.add(position, taken=self.ring.counts()["taken"])
        self.ring.push(arrays)

    def _next(self) -> tuple[Opened, Any]:
        """(the open source, its next item, or _NOTHING at the end)."""
        self._be_host()
        if self._opened is None:
            self._opened = self._open(0)
            self._positions.begin(self._opened.position())
        return self._opened, next(self._opened.iterator, _NOTHING)

    def _open(self, epoch: int) -> Opened:
        self._be_host()
        return Opened(self._make(epoch), epoch, self._again)

    def _be_host(self) -> None:
        # The program that waits for the item may occupy its client's only stream.
        self._as_host = self._as_host or workers.be_host_code()

    def _end_epoch(self, opened: Opened) -> None:
        error: FeedError | None = None
        if self.on_end == "raise":
            error = FeedEndError(
                f"hostcall: the feed `{self.name}` has ended after"
                f" {counted(opened.item, 'item')}, and a program wants another"
                ' (on_end="raise"). Run fewer steps, call feed.reset() before the next'
                ' epoch, or use "mask"'
            )
        elif self.on_end == "repeat":
            if opened.item:
                self._opened = self._open(opened.epoch + 1)
                return
            error = FeedError(
                f"hostcall: the source of the feed `{self.name}` gave no item in epoch"
                f' {opened.epoch}, so on_end="repeat" would repeat it for ever. Does it'
                " give an iterator that was used up before?"
            )
        again = None if error is None else functools.partial(type(error), *error.args)
        self._finish(Outcome(State.ENDED, again))

    def _fail(self, error: BaseException) -> Callable[[], BaseException]:
        """Keeps what the source raised among the newest failures, as those of calls
        are. Not here: once a program got it, its traceback leads to the program, which
        holds the feed, and no garbage collector sees that circle.
        """
        number = failures.store(error)
        summary = failures.summary(error)

        def failure() -> BaseException:
            exception = failures.kept(number)
            if exception is not None:
                return exception
            return FeedError(
                f"hostcall: the source of the feed `{self.name}` has failed before with"
                f" {summary}. It gives nothing until reset() or restore() is called"
            )

        self._finish(Outcome(State.FAILED, failure))
        return failure

    def _finish(self, outcome: Outcome) -> None:
        assert outcome.state is not State.OPEN, "an epoch ends once"
        self.outcome = outcome
        is_end = outcome.error is None  # programs see it as ok=False
        self.ring.finish(FeedFound.END if is_end else FeedFound.STOPPED)


# --- The source ----------------------------------------------------------------------

# grain's iterators have the first pair, torchdata's StatefulDataLoader and the data
# sets of Hugging Face the second.
_STATES = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


class Opened:
    """A source that is being iterated, with the state of its iterator or else its own.

    Attributes:
        epoch: the number of this epoch.
        item: how many items of it were pulled.
        again: whether the epoch can be started again, so that its start needs no state.
            That of a source may be wrong before the first item: of the last epoch.
        iterator: gives the items.
    """

    def __init__(self, source: Any, epoch: int, again: bool) -> None:
        if callable(getattr(source, "as_numpy_iterator", None)):  # a tf.data.Dataset
            source = source.as_numpy_iterator()
        self.epoch = epoch
        self.item = 0
        self.again = again
        try:
            self.iterator: Iterator[Any] = iter(source)
        except TypeError as error:
            if isinstance(source, Iterable):  # an error of its own
                raise
            raise FeedError(
                f"hostcall: the function of a feed returned {source!r:.60}, which can't"
                " be iterated. It should return the items of an epoch: a generator"
                " function (yield item)",
                code="hc-feed-source",
            ) from error
        # The iterator's own state first: that of the source may be of its last epoch.
        stateful = [
            (holder, *names)
            for holder in (self.iterator, source)
            for names in _STATES
            if all(callable(getattr(holder, name, None)) for name in names)
        ]
        self._stateful = stateful[0] if stateful else None

    def position(self, saved: Any = None) -> dict[str, Any]:
        """The position after the item that was pulled last; `saved` is the source's."""
        position = {"epoch": self.epoch, "item": self.item}
        needed = saved is None and (self.item > 0 or not self.again)
        if needed and self._stateful is not None:
            holder, save, _ = self._stateful
            saved = getattr(holder, save)()
        if saved is not None:  # a copy: the source may go on changing what it returned
            position["source"] = copy.deepcopy(saved)
        return position

    def restore(self, state: Any, name: str) -> None:
        """Puts such a state back, and goes on from there."""
        if self._stateful is None:
            raise FeedError(
                f"hostcall: the state for the feed `{name}` holds a state of its"
                " source, and the source can't take one: it has neither set_state nor"
                " load_state_dict. Make the feed with the source that it had when the"
                " state was saved"
            )
        holder, _, load = self._stateful
        getattr(holder, load)(copy.deepcopy(state))  # it may change what it got
        self.iterator = iter(holder)  # an iterator is its own


def once(name: str, refused: str) -> str:
    return (
        f"hostcall: the source of the feed `{name}` is an iterator, which can be"
        f" iterated only once: {refused}. Give a function that returns a new iterator,"
        " hc.feed(lambda: make_iterator())"
    )


# --- What monitors see ---------------------------------------------------------------


@dataclass(frozen=True)
class FeedStats:
    """One feed, as `hc.monitor.feeds()` found it.

    Attributes:
        name: the feed's tag, or the name of its source.
        state: "pulling" (the source is asked for an item), "full" (as many items are
            pulled ahead as `prefetch` allows), "ended", "failed" or "closed".
        epoch: the epoch of the last item that a program took.
        item: how many items of that epoch programs have taken.
        taken: items that programs have taken, over all epochs.
        ready: items that are pulled ahead now.
        device_waits: how often a device waited for an item.
        device_seconds: how long these waits took. Large: the source is too slow.
        source_waits: how often the source waited for a free place.
        source_seconds: how long these waits took. Large: the program is slower than
            the source, and nothing is wrong.
        pulling_seconds: how long the source has been at the item that it gives now.
    """

    name: str
    state: str
    epoch: int
    item: int
    taken: int
    ready: int
    device_waits: int
    device_seconds: float
    source_waits: int
    source_seconds: float
    pulling_seconds: float


def feeds() -> list[FeedStats]:
    """The feeds that are alive. Cost: microseconds for each."""
    alive = [p for p in living(Puller) if p.ring is not None and p.closed != FORKED]
    return sorted((puller.stats() for puller in alive), key=lambda feed: feed.name)
