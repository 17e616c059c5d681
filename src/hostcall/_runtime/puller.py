"""A feed's thread: it owns one iterator, and puts its items into a ring.

Only this thread touches the source, since iterators are not safe to use from several
threads. What other threads want of the iterator (reset, restore) is a job for the
thread, which runs between two pulls. It looks at `closed` before each pull, and waits
only in the ring, which `close` wakes. A source that blocks holds its thread, a daemon,
until it returns.
"""

from __future__ import annotations

import enum
import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from hostcall import _jax, _native
from hostcall._core import failures
from hostcall._core.daemon import Job, daemon, fulfil, start
from hostcall._core.errors import FeedEndError, FeedError, counted
from hostcall._core.process import PerProcess
from hostcall._core.wait import result_of, until_result, until_thread_ends, wait
from hostcall._native import FeedFound
from hostcall._runtime import workers
from hostcall._runtime.opened import Opened, Positions, once

# The reasons why a feed gives nothing any more. Each completes "the feed `x` ...".
CLOSED = "was closed. Make another hc.feed, or close it later"
INTERRUPTED = "was closed by Ctrl-C. Make another hc.feed"
ENDING = "was closed, since the process is ending"
FORKED = (
    "belongs to the process from which this one was forked, and its thread does not"
    " exist here. Start workers with multiprocessing's 'spawn' or 'forkserver' method,"
    " and make the feed in the worker"
)

# What a pull gives at the end of an epoch.
_NOTHING = object()


class State(enum.Enum):
    """What a feed's thread does. Its values are what monitors show.

    OPEN becomes ENDED or FAILED by the source; reset() and restore() lead back to OPEN.
    Any of them becomes CLOSED, for good, by any thread.
    """

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


class Puller(PerProcess):
    """A feed's thread, and what it shares with others.

    Args:
        name: the feed's name in messages.
        make: makes what gives the items of an epoch, of its number.
        again: whether `make` can do so again.
        on_end: as in `hc.feed`.

    Attributes:
        ring: where the items go; None until `begin`.
        outcome: how the epoch goes on.
        closed: the reason why nothing is pulled any more, or "". Any thread may set it,
            and nothing takes it back.
        since: when the pull that is under way began.
    """

    def __init__(
        self, name: str, make: Callable[[int], Any], again: bool, on_end: str
    ) -> None:
        self.name = name
        self._on_end = on_end
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
        self._is_host_code = False
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
            # Put back in front: the first pull gets it once more.
            opened.iterator = itertools.chain([value], opened.iterator)
            return value

        value = self.ask(peek)
        if value is _NOTHING:
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
            self.ring.wake()  # the thread may wait there for space
        try:
            # Behind the put: a thread that ends before it looks at the job is closed.
            self.check_open()
            wait(until_result(future), look=self.check_open)
            return result_of(future)
        finally:
            # After Ctrl-C nobody waits for the job, so it is not run any more, unless
            # the thread has begun with it.
            future.cancel()

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
        # The source itself may close its feed: its thread can't wait for its own end.
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

    # --- Jobs. If the source can't be opened, or refuses a state, the feed goes on as
    # before.

    def reset(self) -> None:
        """Starts the next epoch."""
        if not self._again:
            raise FeedError(once(self.name, "reset() can't start it again"))
        self.restore(self.position()["epoch"] + 1, 0, None)

    def restore(self, epoch: int, item: int, saved: Any) -> None:
        """Goes on as after the item of this number, where the source was `saved`.

        A source with a state gets it back. Of any other the epoch begins anew, and the
        items up to this one are skipped; an iterator, which can't begin anew, only
        skips forwards.
        """
        if saved is None and not self._again:
            self._skip_forwards(epoch, item)
            return
        opened = self._open(epoch)
        if saved is not None:
            opened.restore(saved, self.name)
            opened.item = item
        self.ring.clear()
        self._go_on(opened, item, saved)

    def _skip_forwards(self, epoch: int, item: int) -> None:
        now = self.position()
        opened = self._opened or self._open(epoch)
        count = item - now["item"]
        if count < 0 or epoch != now["epoch"]:
            refused = f"restore() can't go back to item {item}"
            raise FeedError(once(self.name, refused))
        # Some of them may be in the ring, pulled ahead. It forgets its end too.
        count_dropped = self.ring.drop(count)
        self._go_on(opened, opened.item + count - count_dropped)

    def _go_on(self, opened: Opened, item: int, saved: Any = None) -> None:
        """Goes on after this item, without those before it: the ring is empty then."""
        self.outcome = Outcome()
        self._opened = opened
        self.since = time.monotonic()
        try:
            while opened.item < item and not self.closed:
                _, value = self._next()
                if value is _NOTHING:
                    raise FeedError(
                        f"hostcall: the feed `{self.name}` can't go on after item"
                        f" {item}: its source gave only"
                        f" {counted(opened.item, 'item')}. Is it the source with which"
                        " the state was saved?"
                    )
                opened.item += 1
        except BaseException as error:
            self._fail(error)
            failures.hand_over(error)  # the caller gets this object, not programs alone
            raise
        finally:
            self.since = None
            counts = self.ring.counts()
            # Else items that were pulled ahead remain, whose positions still hold.
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
            self._opened = None
            self._read = None
            self.outcome = self.outcome._replace(error=None)
            del self._make

    def _step(self) -> None:
        """Does a job, or waits, or pulls an item."""
        if self.ring is None or not self._jobs.empty():
            # Without a ring there is nothing to pull for: this waits for a job.
            future, job = self._jobs.get()
            fulfil(future, job)
        elif self.outcome.state is not State.OPEN:
            self.ring.idle()
        elif self.ring.reserve():  # else something woke the thread: it looks again
            self.since = time.monotonic()
            self._pull()
            self.since = None

    def _pull(self) -> None:
        """Puts the next item into the place that the ring has reserved for it."""
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
        """Lets the source compute with JAX as host code does, on another client: the
        program that waits for the item may occupy its own client's only stream.
        """
        # Tried again until JAX has started, which this must not do.
        if not self._is_host_code:
            self._is_host_code = workers.be_host_code()

    def _end_epoch(self, opened: Opened) -> None:
        """Begins the next epoch, or lets programs see the end as `on_end` says."""
        if self._on_end == "mask":
            self._finish(Outcome(State.ENDED))
        elif self._on_end == "raise":
            text = (
                f"hostcall: the feed `{self.name}` has ended after"
                f" {counted(opened.item, 'item')}, and a program wants another"
                ' (on_end="raise"). Run fewer steps, call feed.reset() before the next'
                ' epoch, or use "mask"'
            )
            # Made anew for each program that asks: an exception keeps its traceback.
            self._finish(Outcome(State.ENDED, lambda: FeedEndError(text)))
        elif opened.item:
            self._opened = self._open(opened.epoch + 1)
        else:
            text = (
                f"hostcall: the source of the feed `{self.name}` gave no item in epoch"
                f' {opened.epoch}, so on_end="repeat" would repeat it for ever. Does it'
                " give an iterator that was used up before?"
            )
            self._finish(Outcome(State.ENDED, lambda: FeedError(text)))

    def _fail(self, error: BaseException) -> None:
        """Keeps what the source raised among the newest failures, as those of calls
        are. Not here: once a program got it, its traceback leads to the program, which
        holds the feed, and no garbage collector sees that circle.
        """
        number = failures.store(error)
        summary = failures.summary(error)

        def failure() -> BaseException:
            # The object itself while the ledger has it, for its traceback.
            exception = failures.kept(number)
            if exception is not None:
                return exception
            return FeedError(
                f"hostcall: the source of the feed `{self.name}` has failed before with"
                f" {summary}. It gives nothing until reset() or restore() is called"
            )

        self._finish(Outcome(State.FAILED, failure))

    def _finish(self, outcome: Outcome) -> None:
        assert outcome.state is not State.OPEN, "an epoch ends once"
        self.outcome = outcome
        is_end = outcome.error is None  # programs see it as ok=False
        self.ring.finish(FeedFound.END if is_end else FeedFound.STOPPED)
