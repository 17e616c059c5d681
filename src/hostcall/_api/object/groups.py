"""The host objects of one `hc.Object`, and their life.

A `Group` has a `Member` for each row of a batch that has called. A member holds an
object and the lock without which nobody enters it:

    in the group, without object   the next call makes one, or takes the member out
                                   again if the factory fails
    in the group, with its object  calls run in it, one at a time
    out of the group               whoever took it out closes its object

`Group.lock` protects who is in the group, `Member.lock` who is in an object. The race
between a call and the end of its object:

  1. caller: finds the member in the group (`join`)
  2. closer: takes the member out of the group, under the group's lock
  3. closer: takes the member's lock, closes the object, and forgets it
  4. caller: takes the member's lock, finds no object in a member that has left
     (`is_there`), and begins again at 1 with the member that is in the group now

If the caller is first at the member's lock, its call ends before the object is closed.
"""

from __future__ import annotations

import contextvars
import inspect
import logging
import pickle
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from hostcall import _native
from hostcall._core.errors import HostcallError
from hostcall._core.mistakes import first_default, of_a_number
from hostcall._core.process import PerProcess, living
from hostcall._core.spec import Results
from hostcall._policies.on_loop import settled
from hostcall._runtime import lifecycle, loop
from hostcall._runtime.lifecycle import Phase

logger = logging.getLogger("hostcall")

# The axes of a batch: name and size of each axis of a mesh, then the size of each vmap.
Batch = tuple[int | tuple[str, int], ...]
# Which object a row has: (batch, index along each axis), as `place_in_batch` of
# _runtime/context.py returns them. Row 2 of vmap over 4 rows, on device 1 of a mesh of
# 8: ((("x", 8), 4), (1, 2)).
RowIndex = tuple[Batch, tuple[int, ...]]

# What closes, saves or restores an object: a method's name, or a function of it.
Hook = str | Callable[..., Any] | None

# The reasons why a group's objects can't be called any more. Each completes a sentence
# that ends in "was called".
CLOSED = "after close(). Make another hc.Object, or call renew() instead of close()"
ENDING = "while the process was ending"
FORKED = (
    "in a process that was forked from the one that has its objects. Start workers with"
    " multiprocessing's 'spawn' or 'forkserver' method"
)


Snapshot = dict[str, Any]  # what hc.Object.save returns


class Member:
    """A row's object, and what lets one thread into it.

    Attributes:
        lock: held while a thread is in the object. Reentrant: a method may call the
            object again. It is taken by `with` alone: behind a call of `acquire` Ctrl-C
            could leave it locked for ever.
        value: the object; None, which has no methods, while there is none.
    """

    def __init__(self, value: Any = None) -> None:
        self.lock = threading.RLock()
        self.value = value


class Group(PerProcess):
    """The objects of one `hc.Object`, by row. All rows belong to one batch.

    `lock` guards `members` and `ended`. A thread that holds a member's lock may take
    it; the other order would deadlock.

    Attributes:
        members: each row that has called, with its object.
        methods: what each method returns.
        options: as given to `hc.Object`, except factory=, methods= and name=.
        number: of the object in exported programs; "" until it has one.
        ended: the reason that `check_open` gives, or "".
    """

    def __init__(
        self,
        factory: Callable[..., Any],
        methods: Mapping[str, Results],
        name: str,
        options: Mapping[str, Any],
    ) -> None:
        # First: `__del__` looks at it, also if something below raises.
        self.members: dict[RowIndex, Member] = {}
        self.factory = factory
        self.methods = methods
        self.name = name
        self.options = options
        label = f"the factory of `{name}`"
        self._make = of_a_number(factory, label, "the object's index", "index")
        # The parameter that lacks the index, since it has a default; "" once logged.
        self._default_parameter = first_default(factory)
        # Most objects have nothing to close, so the default name "close" is no promise.
        self._close = _hook(options["close"], may_lack=True)
        self._save = _hook(options["save"])  # None: the object is its state
        self._put = _hook(options["restore"])
        self.number = ""
        self.ended = ""
        self.lock = threading.Lock()
        super().__init__()

    def after_fork(self) -> None:
        # A thread of the parent's may have held the lock, and does not exist here.
        self.lock = threading.Lock()
        if self.members:
            # The child must not finalize what the parent still uses.
            _native.keep_for_ever(self.members)
            self.members = {}
            self.ended = FORKED

    def definition(self, method: str) -> object:
        """The method as its class defines it; None if the factory is not a class."""
        is_class = isinstance(self.factory, type)
        return getattr(self.factory, method, None) if is_class else None

    def check_open(self, caller: str) -> None:
        if self.ended:
            raise HostcallError(
                f"hostcall: {caller} of `{self.name}` was called {self.ended}",
                code="hc-closed",
            )

    def call(
        self, row: RowIndex, caller: str, run: Callable[..., Any], *args: object
    ) -> Any:
        """`run(object, *args)`, alone with the object of a row."""
        while True:
            member = self.join(row, caller)
            with member.lock:
                if self.is_there(row, member):
                    # A coroutine is awaited under the lock: it is in the object too.
                    return settled(run(member.value, *args))

    def join(self, row: RowIndex, caller: str) -> Member:
        """The member of a row, maybe without its object."""
        # Without the lock, as nearly every call goes this way: a look into a dict is
        # one step, and a member that leaves the group meanwhile is found out later.
        if (member := self.members.get(row)) is not None:
            return member
        with self.lock:
            self.check_open(caller)
            batch, _ = row
            # All members have one batch, so any of them tells it.
            first_batch, _ = next(iter(self.members), row)
            if first_batch != batch:
                raise _other_batch(caller, self.name, first_batch, batch)
            # Another thread may have added the row since the look without the lock.
            return self.members.setdefault(row, Member())

    def is_there(self, row: RowIndex, member: Member) -> bool:
        """Makes the object if there is none; False if it has left. Its lock is held."""
        if member.value is not None:
            return True
        # `drop` takes members out first and their values afterwards, under their locks:
        # a member that is still in the group has not been closed.
        if self.members.get(row) is not member:
            return False
        try:
            member.value = self._new_object(row)
        except BaseException:
            # Without an object it must not fix the batch of later calls. It may have
            # left meanwhile, and another member may stand in its place.
            with self.lock:
                if self.members.get(row) is member:
                    del self.members[row]
            raise
        return True

    def _new_object(self, row: RowIndex) -> Any:
        _, index = row
        if index and self._default_parameter:
            # The rows' objects will be alike, which is seldom meant.
            logger.warning(
                "the factory of `%s` is not given the object's index, since its first"
                " parameter, %s, has a default. Write hc.Object(lambda index: ...) for"
                " objects that differ, or hc.Object(lambda: ...) if they are alike",
                self.name,
                self._default_parameter,
            )
            self._default_parameter = ""
        value = settled(self._make(index))
        for method in self.methods:
            if not callable(getattr(value, method, None)):
                raise _lacks(self.name, method, value)
        return value

    def snapshot(self) -> Snapshot:
        """The pickled state of each object."""
        with self.lock:
            members = self.members.copy()
        batch: Batch = ()
        objects = {}
        # By index, so that equal objects give equal snapshots, whoever called first.
        for row in sorted(members, key=_index_of):
            batch, index = row
            member = members[row]
            with member.lock:
                if member.value is None:
                    continue
                state = member.value
                if self._save is not None:
                    state = settled(self._save(state))
                # Under the lock too: the state may be the object itself, or share
                # parts with it.
                try:
                    objects[index] = pickle.dumps(state)
                except Exception as error:
                    raise _unpicklable(self.name, index, error) from error
        return {"batch": batch, "objects": objects}

    def restore(self, snapshot: Snapshot) -> list[Exception]:
        """Goes back to a snapshot. Returns what closing other objects raised."""
        # All of them first: if one is broken, nothing has changed.
        states: dict[RowIndex, Any] = {}
        for index, pickled in snapshot["objects"].items():
            states[snapshot["batch"], index] = pickle.loads(pickled)
        if self._put is None:  # the states are the objects
            failures = self.drop()
            members = {row: Member(state) for row, state in states.items()}
            with self.lock:
                self.members.update(members)
            return failures
        failures = self.drop(keep=states.keys())
        for row, state in states.items():
            self.call(row, "restore()", self._put, state)
        return failures

    def drop(self, keep: Collection[RowIndex] = (), ended: str = "") -> list[Exception]:
        """Closes objects as soon as no thread is in them. Returns what that raised."""
        with self.lock:
            self.ended = self.ended or ended  # the first reason stays
            rows = sorted(self.members.keys() - keep, key=_index_of)
            dropped = [self.members.pop(row) for row in rows]
        failures = []
        # Not under the group's lock: closing may take long, and a thread that is in an
        # object may call a method of another.
        for member in dropped:
            with member.lock:  # waits for the thread that is in the object
                value = member.value
                member.value = None  # also if closing fails: it is not tried again
                try:
                    if value is not None and self._close is not None:
                        settled(self._close(value))
                except Exception as error:
                    failures.append(error)
        return failures

    def finish(self) -> None:
        """Closes all objects, and logs failures: no caller is left to raise them to."""
        for error in self.drop(ended=ENDING):
            logger.error("closing an object of `%s` failed", self.name, exc_info=error)

    def __del__(self) -> None:
        if not self.members:
            return
        if loop.running() is None:
            self.finish()
            return
        # The garbage collector ran in a coroutine. A `close` that is one too needs the
        # loop, so another thread waits for it; Python waits for that thread at the end.
        thread = threading.Thread(target=self.finish, name="hostcall-close")
        contextvars.Context().run(thread.start)  # see _core/daemon.py


def _index_of(row: RowIndex) -> tuple[int, ...]:
    _, index = row
    return index


def _at_exit() -> None:
    for group in living(Group):
        group.finish()


lifecycle.at_end(Phase.OBJECTS, _at_exit)


def _hook(hook: Hook, *, may_lack: bool = False) -> Callable[..., Any] | None:
    """The function of an object that an option gives, itself or as a method's name.

    With `may_lack`, nothing happens to objects that have no such method.
    """
    if not isinstance(hook, str):
        return hook

    def call_method(value: Any, *args: Any) -> Any:
        if may_lack:
            return getattr(value, hook, lambda: None)(*args)
        return getattr(value, hook)(*args)

    return call_method


# --- What can go wrong when a program calls -------------------------------------------


def _other_batch(caller: str, name: str, first: Batch, now: Batch) -> HostcallError:
    text = (
        f"hostcall: {caller} of `{name}` was called {_in_words(now)}, but its objects"
        f" were made {_in_words(first)}. Each object belongs to one row, so the batch"
        " can't change: make another hc.Object, or start again with renew()"
    )
    if len(first) != len(now):
        text += (
            ". Under vmap, JAX makes a call only once for all rows if no argument"
            " depends on the row: pass one that does (where=mask is enough)"
        )
    return HostcallError(text, code="hc-object")


def _in_words(batch: Batch) -> str:
    """As messages say it: "for 4 rows on each device of a mesh x=8"."""
    mesh_axes = [axis for axis in batch if isinstance(axis, tuple)]
    sizes = [str(axis) for axis in batch if not isinstance(axis, tuple)]
    words = f"for {' x '.join(sizes)} rows" if sizes else "without vmap"
    if mesh_axes:
        mesh = ", ".join(f"{name}={size}" for name, size in mesh_axes)
        words += f" on each device of a mesh {mesh}"
    return words


def _lacks(name: str, method: str, value: object) -> HostcallError:
    methods = []
    for attribute_name in dir(value):
        # Looked up without running the user's properties.
        attribute = inspect.getattr_static(value, attribute_name, None)
        is_method = callable(attribute) or isinstance(attribute, classmethod)
        if is_method and not attribute_name.startswith("_"):
            methods.append(attribute_name)
    return HostcallError(
        f"hostcall: methods= of `{name}` declares {method!r}, but its factory returned"
        f" a {type(value).__name__}, which has no such method. Its methods are:"
        f" {', '.join(methods) or 'none'}",
        code="hc-object",
    )


def _unpicklable(name: str, index: tuple[int, ...], error: Exception) -> HostcallError:
    return HostcallError(
        f"hostcall: object {index} of `{name}` can't be saved, since it can't be"
        f" pickled ({type(error).__name__}: {error}). Define its state with save= and"
        " restore=: method names, or functions save(object) and restore(object, state)",
        code="hc-pickle",
    )
