"""The host objects of one `hc.Object`: makes, locks, saves and closes them.

Each place of a batch has one object. Each object has a lock, so two threads are never
in it at once. Programs hold an `Entry` for each method, and these hold the group, so
objects live as long as anything can call them.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import pickle
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import Any, NoReturn

from hostcall import _native
from hostcall._core.arguments import of_a_number
from hostcall._core.coroutines import is_coroutine_function
from hostcall._core.errors import HostcallError, SpecError
from hostcall._core.host_code import HostCode
from hostcall._core.process import Owned, living
from hostcall._core.source import name_of
from hostcall._core.spec import Results
from hostcall._policies.on_loop import settled
from hostcall._runtime import context, lifecycle, loop
from hostcall._runtime.context import Current

logger = logging.getLogger("hostcall")

# (batch, index in it), as _runtime/context.py's `place_in_batch` returns them.
# A batch has the size of each vmap, and name and size of each axis of a mesh.
Batch = tuple[int | tuple[str, int], ...]
Place = tuple[Batch, tuple[int, ...]]
Snapshot = dict[str, Any]  # what hc.Object.save returns

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

_UNMADE = object()


class Member:
    """One object. Its lock is reentrant: a method may call the object again."""

    def __init__(self, value: Any = _UNMADE, state: bytes | None = None) -> None:
        self.lock = threading.RLock()
        self.value = value  # _UNMADE before it is made, and after it left its group
        self.state = state  # pickled, to make it from

    @property
    def made(self) -> bool:
        return self.value is not _UNMADE


class Group(Owned):
    """The objects of one `hc.Object`, by place. All places belong to one batch.

    `lock` guards `members` and `ended`. A thread that holds a member's lock may take
    it; the other order would deadlock. `join` looks one up without `lock`, so it may
    have left the group by then. A member's lock is taken by `with` alone: behind a call
    of `acquire` Ctrl-C could leave it locked for ever.

    Attributes:
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
        self.members: dict[Place, Member] = {}  # first: `__del__` looks
        self.factory, self.methods = factory, methods
        self.name, self.options = name, options
        what = f"the factory of `{name}`"
        self._make = of_a_number(factory, what, "the object's index", "index")
        self._close = _hook(options["close"], lambda: None) or (lambda value: None)
        self._save = _hook(options["save"]) or (lambda value: value)
        self._put = _hook(options["restore"])  # None: the object is its state
        self.number = self.ended = ""
        self.lock = threading.Lock()
        super().__init__()

    def renew(self) -> None:
        self.lock = threading.Lock()
        if self.members:  # the child never finalizes the parent's objects
            _native.keep_for_ever(self.members)
            self.members, self.ended = {}, FORKED

    def definition(self, method: str) -> object:
        """The method as its class defines it; None if the factory is not a class."""
        is_class = isinstance(self.factory, type)
        return getattr(self.factory, method, None) if is_class else None

    def check_open(self, who: str) -> None:
        if self.ended:
            raise HostcallError(
                f"hostcall: {who} of `{self.name}` was called {self.ended}",
                code="hc-closed",
            )

    def call(self, place: Place, who: str, run: Callable[[Any], Any]) -> Any:
        """`run(object)`, alone with the object at a place."""
        while True:
            member = self.join(place, who)
            with member.lock:
                if self.is_there(place, member):
                    return settled(run(member.value))

    def join(self, place: Place, who: str) -> Member:
        """What is at a place, maybe without its object."""
        if (found := self.members.get(place)) is not None:
            return found
        with self.lock:
            self.check_open(who)
            before = next(iter(self.members), place)[0]
            if before != place[0]:
                raise _other_batch(who, self.name, before, place[0])
            return self.members.setdefault(place, Member())

    def is_there(self, place: Place, member: Member) -> bool:
        """Makes the object if there is none; False if it has left. Its lock is held."""
        if member.made:
            return True
        if self.members.get(place) is not member:
            return False
        try:
            member.value, member.state = self._made(place, member.state), None
        except BaseException:
            with self.lock:
                if member.state is None and self.members.get(place) is member:
                    del self.members[place]  # so that it fixes no batch
            raise
        return True

    def _made(self, place: Place, state: bytes | None) -> Any:
        before, put = None if state is None else pickle.loads(state), self._put
        is_whole = state is not None and put is None
        value = before if is_whole else settled(self._make(place[1]))
        for method in self.methods:
            if not callable(getattr(value, method, None)):
                raise _lacks(self.name, method, value)
        if state is not None and put is not None:
            settled(put(value, before))
        return value

    def snapshot(self) -> Snapshot:
        """The pickled state of each object.

        `waiting` has the states of objects that nobody has called since `restore`.
        """
        with self.lock:
            members = sorted(self.members.items(), key=lambda item: item[0][1])
        objects, waiting = {}, {}
        for (_, index), member in members:
            with member.lock:
                if not member.made:
                    if member.state is not None:
                        waiting[index] = member.state
                    continue
                state = settled(self._save(member.value))
                try:
                    objects[index] = pickle.dumps(state)
                except Exception as error:
                    raise _unpicklable(self.name, index, error) from error
        batch = members[0][0][0] if members else ()
        return {"batch": batch, "objects": objects, "waiting": waiting}

    def restore(self, snapshot: Snapshot, everyones: bool) -> list[Exception]:
        """Goes back to a snapshot. Returns what closing other objects raised.

        The states of objects that are not made yet wait for the first call, if the
        snapshot is of all processes: which of them are this one's is not known before.
        """
        batch, put = snapshot["batch"], self._put
        states = {(batch, index): each for index, each in snapshot["objects"].items()}
        with self.lock:
            made = {place for place, each in self.members.items() if each.made}
        now = [p for p in states if not everyones or (put and p in made)]
        # All of them first: if one is broken, nothing has changed.
        values = {place: pickle.loads(states.pop(place)) for place in now}
        failures = self.drop(keep=made & values.keys() if put else ())
        with self.lock:
            self.members.update({p: Member(state=each) for p, each in states.items()})
            if put is None:
                self.members.update({p: Member(value) for p, value in values.items()})
                return failures
        for place, value in values.items():

            def put_back(each: Any, state: Any = value) -> Any:
                return put(each, state)

            self.call(place, "restore()", put_back)
        return failures

    def drop(self, keep: Collection[Place] = (), ended: str = "") -> list[Exception]:
        """Closes objects as soon as no thread is in them. Returns what that raised."""
        with self.lock:
            self.ended = self.ended or ended
            places = [place for place in self.members if place not in keep]
            going = [self.members.pop(p) for p in sorted(places, key=lambda p: p[1])]
        failures = []
        for member in going:
            with member.lock:
                value, member.value = member.value, _UNMADE
                try:
                    if value is not _UNMADE:
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


def _at_exit() -> None:
    for group in living(Group):
        group.finish()


lifecycle.after_the_last_call(_at_exit)


def _hook(given: Hook, *lacking: Callable[[], None]) -> Callable[..., Any] | None:
    """The function of an object that an option gives, itself or as a method's name.

    `lacking` is what is called of an object without that method.
    """
    if not isinstance(given, str):
        return given
    return lambda value, *args: getattr(value, given, *lacking)(*args)


# --- What programs call --------------------------------------------------------------


class Entry(HostCode):
    """The function that programs call for one method.

    It calls the method of the object that belongs to the calling row and device.
    """

    travels_as = "object"

    def __init__(self, group: Group, method: str) -> None:
        self.group, self.name, self.who = group, method, f"{method}()"
        self._awaits = is_coroutine_function(group.definition(method))
        self.__qualname__ = f"{group.name}.{method}"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.group.call(
            self._place(None),
            self.who,
            lambda value: getattr(value, self.name)(*args, **kwargs),
        )

    def enter(
        self, here: Current | None, held: ExitStack, args: Any, kwargs: Any
    ) -> Callable[..., Any] | None:
        place = self._place(here)
        while True:
            member = self.group.join(place, self.who)
            held.enter_context(member.lock)
            if self.group.is_there(place, member):
                called = getattr(member.value, self.name)
                return functools.partial(called, *args, **kwargs)

    def _place(self, here: Current | None) -> Place:
        """Where the object of a row is."""
        place = context.place_in_batch(here)
        if place is None:
            raise HostcallError(
                f"hostcall: {self.who} of `{self.group.name}` can't tell which object"
                " is meant: the program was lowered for a mesh without devices, or the"
                " executor runs rows on the thread that waits for them",
                code="hc-object",
            )
        return place

    def awaits(self) -> bool:
        return self._awaits

    def no_derivative(self) -> str:
        made = name_of(self.group.factory)
        return (
            f"It is a method of the hc.Object `{self.group.name}`, made by `{made}`,"
            " and objects' methods have no derivatives, since a call may change the"
            " object. Write what needs one as a function: hc.host(f, result=...), with"
            " a rule."
        )

    def lane(self) -> Group:  # all methods of the object are one
        return self.group

    def __reduce__(self) -> NoReturn:
        raise SpecError(
            f"hostcall: the objects of `{self.group.name}` are in this process, but its"
            " executor= runs rows in other processes. Pass a pool of threads",
            code="hc-conflict",
        )


# --- What can go wrong when a program calls -------------------------------------------


def _other_batch(who: str, name: str, before: Batch, now: Batch) -> HostcallError:
    text = (
        f"hostcall: {who} of `{name}` was called {_said(now)}, but its objects were"
        f" made {_said(before)}. Each object belongs to one row, so the batch can't"
        " change: make another hc.Object, or start again with renew()"
    )
    if len(before) != len(now):
        text += (
            ". Under vmap, JAX makes a call only once for all rows if no argument"
            " depends on the row: pass one that does (where=mask is enough)"
        )
    return HostcallError(text, code="hc-object")


def _said(batch: Batch) -> str:
    mesh = ", ".join(f"{a[0]}={a[1]}" for a in batch if isinstance(a, tuple))
    grid = " x ".join(str(size) for size in batch if not isinstance(size, tuple))
    rows = f"for {grid} rows" if grid else "without vmap"
    return f"{rows} on each device of a mesh {mesh}" if mesh else rows


def _lacks(name: str, method: str, value: object) -> HostcallError:
    has = [n for n in dir(value) if n[0] != "_" and callable(getattr(value, n, None))]
    return HostcallError(
        f"hostcall: methods= of `{name}` declares {method!r}, but its factory returned"
        f" a {type(value).__name__}, which has no such method. Its methods are:"
        f" {', '.join(has) or 'none'}",
        code="hc-object",
    )


def _unpicklable(name: str, index: tuple[int, ...], error: Exception) -> HostcallError:
    return HostcallError(
        f"hostcall: object {index} of `{name}` can't be saved, since it can't be"
        f" pickled ({type(error).__name__}: {error}). Define its state with save= and"
        " restore=: method names, or functions save(object) and restore(object, state)",
        code="hc-pickle",
    )
