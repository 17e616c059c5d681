"""The threads of feeds. Each owns one iterator, and puts its items into a ring.

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

import atexit
import copy
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from hostcall import _jax, _native
from hostcall._core import config
from hostcall._core.errors import FeedEndError, FeedError
from hostcall._native import FeedEnding, FeedFound
from hostcall._runtime import host_device, workers

# Seconds. A wait returns to Python this often, so that Ctrl-C is noticed.
_SLICE = 0.05
# Seconds that close() and the end of the process wait for a source that blocks.
_PATIENCE = 1.0

# The reasons why a feed gives nothing any more. Each completes "the feed `x` ...".
CLOSED = "was closed. Make another hc.feed, or close it later"
INTERRUPTED = "was closed by Ctrl-C. Make another hc.feed"
ENDING = "was closed, since the process is ending"
FORKED = (
    "belongs to the process from which this one was forked, and its thread does not"
    " exist here. Start workers with multiprocessing's 'spawn' or 'forkserver' method,"
    " and make the feed in the worker"
)

_NOTHING = object()
_living: weakref.WeakSet[Puller] = weakref.WeakSet()
_ending_since: float | None = None


@dataclass
class Opened:
    """A source that is being iterated.

    Attributes:
        iterator: gives the items.
        save: returns the source's own state, or None if it has none.
        load: puts such a state back; returns the iterator that goes on from there.
    """

    iterator: Iterator[Any]
    save: Callable[[], Any] | None = None
    load: Callable[[Any], Iterator[Any]] | None = None


class Source(Protocol):
    """Where items come from (_api/feed/sources.py)."""

    @property
    def again(self) -> bool:
        """Whether it can be iterated a second time."""

    def open(self, epoch: int) -> Opened: ...


class Puller:
    """A feed's thread, and what it shares with others.

    Attributes:
        name: the feed's name in messages.
        error: what the source raised, or how it ended; None while items may come.
        closed: the reason why nothing is pulled any more, or "".
    """

    def __init__(self, name: str, source: Source, on_end: str) -> None:
        self.name, self.source, self.on_end = name, source, on_end
        self.error: BaseException | None = None
        self.closed = ""
        self.ring: Any = None
        self.since: float | None = None  # when the pull that is under way began
        self.epoch = self._item = 0
        self._read: Callable[[Any, int], list[Any]] = lambda value, item: []
        self._opened: Opened | None = None
        self._held: Any = _NOTHING  # the first item, pulled to learn the spec
        self._idle = False
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._begun = threading.Event()
        self._lock = threading.Lock()  # guards the next two, for moments
        self._base = 0  # items that devices had taken when `_after[0]` was the position
        self._after: deque[dict[str, Any]] = deque([{"epoch": 0, "item": 0}])
        self._as_host = False
        self._thread = threading.Thread(
            target=self._run, daemon=True, name=f"hostcall-feed {name}"
        )
        _living.add(self)
        self._thread.start()

    # --- For other threads

    @property
    def thread(self) -> int:
        return self._thread.ident or 0

    def first(self) -> Any:
        """Pulls the first item, which is also the first that devices get."""

        def peek() -> Any:
            if self._held is _NOTHING:
                self._held = self._next()
            return self._held

        value = self.ask(peek, wake=False)
        if value is _NOTHING:
            raise FeedError(
                f"hostcall: the source of the feed `{self.name}` gave no item, so there"
                " is none to take the spec from. Give spec=, a pytree of"
                " jax.ShapeDtypeStruct, if it may be empty"
            )
        return value

    def begin(self, ring: Any, read: Callable[[Any, int], list[Any]]) -> None:
        """Starts to pull ahead. `read(value, number)` makes the item's arrays."""
        self.ring, self._read = ring, read
        self._begun.set()

    def ask(self, job: Callable[[], Any], wake: bool = True) -> Any:
        """Runs a job on the feed's thread, between two pulls."""
        if threading.get_ident() == self.thread:
            raise FeedError(
                f"hostcall: the source of the feed `{self.name}` called the feed's own"
                " reset() or restore(), which would wait for the source. Call it where"
                " the program is called"
            )
        self.check_open()
        future: Future[Any] = Future()
        self._jobs.append((future, job))
        if wake:
            self.ring.wake()
        else:
            self._begun.set()
        while True:
            try:
                return future.result(_SLICE)
            except TimeoutError:
                if future.done():
                    raise
                self.check_open()

    def check_open(self) -> None:
        if self.closed:
            raise FeedError(f"hostcall: the feed `{self.name}` {self.closed}")

    def close(self, why: str, patience: float = 0.0) -> None:
        """Ends the thread. Nothing is pulled after this."""
        if not self.closed:
            self.closed = why
            if self.ring is not None:
                self.ring.close()
            self._begun.set()
        if patience and threading.get_ident() != self.thread:
            self._thread.join(patience)

    def position(self) -> dict[str, Any]:
        """The position after the last item that was taken."""
        with self._lock:
            self._forget_taken()
            return copy.deepcopy(self._after[0])

    def state(self) -> str:
        if self.closed:
            return "closed"
        if self.error is not None:
            return "ended" if isinstance(self.error, FeedEndError) else "failed"
        if self._idle:
            return "ended"
        return "full" if self.since is None else "pulling"

    def why_stopped(self) -> None:
        """Raises the reason why no item comes, unless there has been a reset."""
        self.check_open()
        error = self.error
        if error is not None:
            raise error

    # --- Jobs

    def reset(self) -> None:
        """Starts the next epoch."""
        if not self.source.again:
            raise FeedError(_once(self.name, "reset() can't start it again"))
        self._start_at(self.epoch + 1, 0, None)

    def restore(self, epoch: int, item: int, saved: Any) -> None:
        """Goes on as after the item of this number."""
        if saved is None and not self.source.again:
            self._skip_to(epoch, item)
        else:
            self._start_at(epoch, item, saved)

    def _start_at(self, epoch: int, item: int, saved: Any) -> None:
        self.ring.clear()
        self._held, self.error, self._idle = _NOTHING, None, False
        self.epoch, self._item = epoch, 0
        self._opened = opened = self.source.open(epoch)
        if saved is not None:
            if opened.load is None:
                raise FeedError(
                    f"hostcall: the state for the feed `{self.name}` holds a state of"
                    " its source, and the source can't take one: it has neither"
                    " set_state nor load_state_dict. Make the feed with the source"
                    " that it had when the state was saved"
                )
            opened.iterator = opened.load(saved)
            self._item = item
        self._note_start(saved)
        self._skip(item - self._item)

    def _skip_to(self, epoch: int, item: int) -> None:
        now = self.position()
        ahead = item - now["item"]
        if ahead < 0 or epoch != now["epoch"]:
            raise FeedError(_once(self.name, f"restore() can't go back to item {item}"))
        self._skip(ahead - self.ring.drop(ahead))

    def _skip(self, count: int) -> None:
        """Pulls items that devices do not get. The ring is empty if there are any."""
        for _ in range(count):
            if self.closed:
                return
            if self._next() is _NOTHING:
                raise FeedError(
                    f"hostcall: the feed `{self.name}` can't go on after item"
                    f" {self._item + count}: its source gave only {self._item} items."
                    " Is it the source with which the state was saved?"
                )
            self._item += 1
        if count:
            self._note_start(None)

    def _note_start(self, saved: Any) -> None:
        position = {"epoch": self.epoch, "item": self._item}
        if saved is not None:
            position["source"] = saved
        elif self._item:
            position = self._position()
        with self._lock:
            self._base = self.ring.counts()["taken"]
            self._after = deque([position])

    # --- The thread

    def _run(self) -> None:
        try:
            while not self.closed:
                self._step()
        finally:
            self._opened, self._held = None, _NOTHING
            self._read = lambda value, item: []

    def _step(self) -> None:
        while self._jobs:
            future, job = self._jobs.popleft()
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
        if self.ring is None:
            self._begun.wait()
            if self.ring is None:  # a job came
                self._begun.clear()
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
            self._finish(error)
            return
        with self._lock:
            # Before the push: no device can have taken it then.
            self._after.append(position)
            self._forget_taken()
        self.ring.push(arrays)

    def _next(self) -> Any:
        """The next item, or _NOTHING at the end."""
        if self._held is not _NOTHING:
            value, self._held = self._held, _NOTHING
            return value
        if not self._as_host and _jax.back_ends_started():
            # JAX code in the source computes on a client of its own. The program that
            # waits for the item may occupy its client's only stream.
            workers.as_host_code((host_device.above(None), None)).__enter__()
            self._as_host = True
        self.since = time.monotonic()
        try:
            if self._opened is None:
                self._opened = self.source.open(self.epoch)
            return next(self._opened.iterator, _NOTHING)
        finally:
            self.since = None

    def _end_epoch(self) -> None:
        if self.on_end == "mask":
            self._idle = True
            self.ring.finish(FeedEnding.END)
        elif self.on_end == "raise":
            self._finish(
                FeedEndError(
                    f"hostcall: the feed `{self.name}` has ended after {self._item}"
                    ' items, and a program wants another (on_end="raise"). Run fewer'
                    ' steps, call feed.reset() before the next epoch, or use "mask"'
                )
            )
        elif self._item == 0:
            self._finish(
                FeedError(
                    f"hostcall: the source of the feed `{self.name}` gave no item in"
                    f' epoch {self.epoch}, so on_end="repeat" would repeat it for ever.'
                    " Does it give an iterator that was used up before?"
                )
            )
        else:
            self.epoch, self._item = self.epoch + 1, 0
            self._opened = None

    def _finish(self, error: BaseException) -> None:
        self.error, self._idle = error, True
        self.ring.finish(FeedEnding.STOPPED)

    def _position(self) -> dict[str, Any]:
        """The position after the item that was pulled last."""
        position = {"epoch": self.epoch, "item": self._item}
        if self._opened is not None and self._opened.save is not None:
            # A copy: the source may go on changing what it returned.
            position["source"] = copy.deepcopy(self._opened.save())
        return position

    def _forget_taken(self) -> None:
        """Drops positions before the last taken item's. The lock is held."""
        taken = self.ring.counts()["taken"]
        while self._base < taken and len(self._after) > 1:
            self._after.popleft()
            self._base += 1


def _once(name: str, what: str) -> str:
    return (
        f"hostcall: the source of the feed `{name}` is an iterator, which can be"
        f" iterated only once: {what}. Give a function that returns a new iterator,"
        " hc.feed(lambda: make_iterator())"
    )


class Stream:
    """What programs hold of a feed; calling it waits for an item.

    Equal only to itself, so each feed traces to programs of its own.
    """

    def __init__(
        self, puller: Puller, ring: Any, timeout: float | None, source: str
    ) -> None:
        self.puller, self.ring, self.timeout = puller, ring, timeout
        self.__qualname__ = puller.name
        self.hostcall_source = source  # the key of its statistics

    def __call__(self, lane: int) -> None:
        """Returns when the lane may find an item. Called by the engine."""
        start, waiting = time.monotonic(), threading.get_ident()
        # hc.monitor.status() shows where the source is.
        workers.delegates[waiting] = self.puller.thread
        try:
            while True:
                found = self.ring.wait(lane, _SLICE)
                if found is FeedFound.STOPPED:
                    self.puller.why_stopped()
                if found is not FeedFound.NOTHING:
                    return
                self._check(start)
        except KeyboardInterrupt:
            self.puller.close(INTERRUPTED)
            raise
        finally:
            workers.delegates.pop(waiting, None)

    def _check(self, start: float) -> None:
        now = time.monotonic()
        if self.timeout is not None and now - start >= self.timeout:
            self._late(f"timeout={self.timeout:g} s")
        if (
            _ending_since is not None
            and now - max(start, _ending_since) > config.EXIT_TIMEOUT
        ):
            self._late(f"{now - start:.0f} s, and the process is ending")

    def _late(self, limit: str) -> NoReturn:
        frame = sys._current_frames().get(self.puller.thread)
        where = "its thread has ended"
        if frame is not None:
            last = traceback.extract_stack(frame)[-1]
            where = f"it is at {last.filename}:{last.lineno} in {last.name}"
        raise FeedError(
            f"hostcall: the source of the feed `{self.puller.name}` gave no item for"
            f" {limit}; {where}. If it only is slow, raise timeout=, or prefetch= if it"
            " comes in bursts"
        )

    def __del__(self) -> None:
        self.puller.close(CLOSED)


def living() -> list[Puller]:
    return [p for p in list(_living) if p.ring is not None and p.closed != FORKED]


def process_ends() -> None:
    """From now on, no program waits longer than EXIT_TIMEOUT for an item."""
    global _ending_since
    _ending_since = time.monotonic()


def end_all() -> None:
    """Ends the threads of all feeds. No program can take items any more."""
    pullers = [p for p in list(_living) if p.closed != FORKED]
    for puller in pullers:
        puller.close(ENDING)
    until = time.monotonic() + _PATIENCE
    for puller in pullers:
        puller.close(ENDING, max(0.01, until - time.monotonic()))


def _after_fork() -> None:
    for puller in list(_living):
        puller.closed = FORKED
        puller._lock = threading.Lock()  # a thread of the parent may have held it
        # Never destroyed: a condition variable's destructor waits for its waiters, and
        # the threads of these do not exist here.
        _native.keep_for_ever(puller.ring)


# This module is imported before the engine begins, so this hook runs after the engine's
# (_runtime/lifecycle.py), which waits for programs. It is for processes without any.
atexit.register(end_all)
os.register_at_fork(after_in_child=_after_fork)
