"""`hc.Object`: a host object whose methods compiled programs call.

Three classes, from the user to the program:

    Object   what the user holds: checks the declaration, and has a function for each
             method. It waits for programs before it closes, saves or restores.
    Group    the host objects, by row: makes, locks, saves and closes them. Each row of
             a batch has one object. Each object has a lock, so two threads are never
             in it at once.
    Entry    what programs hold for each method. It holds the group, so objects live as
             long as anything can call them, also without the `Object`.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import logging
import pickle
import threading
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, NoReturn

from jax.typing import ArrayLike

from hostcall import _jax, _native
from hostcall._core import dispatched, mistakes
from hostcall._core.callback import CallSpec
from hostcall._core.errors import HostcallError, SpecError, conflict, counted
from hostcall._core.host_code import HostCode
from hostcall._core.mistakes import (
    check_function,
    first_default,
    of_a_number,
    parse_mask,
)
from hostcall._core.options import CALL, CallOptions, Option, Policy, check
from hostcall._core.process import PerProcess, living
from hostcall._core.source import inspect_callable, name_of, users_place
from hostcall._core.spec import (
    Opaque,
    Results,
    flatten_arguments,
    parse_fill,
    parse_result,
)
from hostcall._core.suggestions import suggests
from hostcall._policies.on_loop import settled
from hostcall._primitives.make import bind_call
from hostcall._runtime import context, lifecycle, loop, workers
from hostcall._runtime.context import Current
from hostcall._runtime.lifecycle import Phase

logger = logging.getLogger("hostcall")


# Options that save() and restore() had once, and what to write instead.
_EACH = (
    "each process saves its own objects into the checkpoint of the job (the page"
    " 'Programs over many processes' shows it with Orbax)"
)
_GONE = {"processes": _EACH, "limit": _EACH}


class Object:
    """A host object with state (a simulator, a cursor) for compiled programs.

    ::

        env = hc.Object(Walk, methods={"reset": obs, "step": (obs, reward)})
        place, reward = env.step(action)     # anywhere in JAX code: Walk().step(action)

    The first call makes the object on the host. Under vmap each row has its own object,
    which is the same one in each call and each program.

    Args:
        factory: makes an object: a class, a function or a coroutine function. If it has
            a required argument, it gets the object's index, a tuple: the row along each
            batch axis, the outermost vmap first.
            Inside shard_map and pmap the device's mesh coordinates come first. Without
            any of these, the index is ().
        methods: maps the name of each method to what it returns, described like
            `result` of `hc.call`. Each method becomes an attribute: a function `(*args,
            where=None, fill=None, **kwargs)`. Its arguments reach the object's method
            as in `hc.call`: arrays and numbers as NumPy arrays, all else unchanged.
            Coroutine methods of a class run on the event loop; if the factory is not a
            class, and `vmap_method` is "parallel", a thread waits for each of them.
        order: "ordered": each call runs exactly once, after the previous ordered call.
            "unordered": exactly once, in the order of its program.
        name: the name in messages. Default: the factory's.
        vmap_method: "sequential": the rows run in row order. "parallel": all at once.
        executor: a pool of threads for "parallel", as in `hc.host`.
        concurrency: if coroutine methods are declared: how many of their calls (rows,
            with "parallel") wait at the same time; as in `hc.host`.
        close: ends an object: a method's name, which objects may lack, or a function of
            the object. None: objects are just dropped.
        save: returns an object's state: a method's name, or a function of the object.
            Default: the object itself is the state. States are pickled.
        restore: puts such a state into an object: a method's name, or a function
            `restore(object, state)`.

    Only one thread at a time can be in an object; other threads wait. Objects are
    closed by `close()`, at the end of `with env:`, at the end of the process, and some
    time after this `Object` and all programs that call it have been freed. A forked
    child has no objects: calls there fail, and the parent's objects are not touched.

    Raises:
        SpecError: the declaration is invalid.
        AttributeError: a method was not declared.
        HostcallError: a call after `close()`. When a program runs: the batch differs
            from that of earlier calls, or the object lacks a declared method.
        jax.errors.JaxRuntimeError: a method or the factory failed while a program ran.
            `hostcall.reraise()` gives its exception; an eager call raises it directly.
            The rows after a failed one are not called, and objects keep their states.
            If the factory failed, the next call tries it again.

    Under transformations:
        jit, scan, while_loop, cond, map: one object, called each time the call is
            reached. remat: the backward pass does not call it again.
        vmap: one object per row; for nested vmaps, one per tuple of indices. The first
            call fixes the batch until `renew()`. If no argument depends on the row, JAX
            makes one call for all rows, as without vmap, which is refused once the
            objects belong to rows: pass one that does (`where=` is enough).
        vmap of cond, of while_loop: JAX computes every branch for every row. Pass the
            condition as `where=` too.
        jvp, grad, transposition: refused, as by `hc.call`.
        shard_map, pmap: one object for each device of the mesh, and each row there.
        jit over sharded arrays: one call, on the whole value, as without sharding.

    Cost: that of an ordered `hc.call`, and about 1 us to find and lock the object.
    """

    def __init__(
        self,
        factory: Callable[..., Any],
        *,
        methods: Mapping[str, Any],
        order: Literal["ordered", "unordered"] = "ordered",
        name: str | None = None,
        vmap_method: Literal["sequential", "parallel"] = "sequential",
        executor: object = None,
        concurrency: int | None = None,
        close: str | Callable[[Any], Any] | None = "close",
        save: str | Callable[[Any], Any] | None = None,
        restore: str | Callable[[Any, Any], Any] | None = None,
    ) -> None:
        arguments = dict(locals())
        options = {option: arguments[option] for option in OPTIONS}
        usage = "hc.Object(factory, methods={...}); for one that exists, lambda: it"
        qualified_name = check_function(factory, usage, awaits=True).name
        factory_name = qualified_name.rpartition("<locals>.")[2]
        name = name or ("object" if factory_name == "<lambda>" else factory_name)
        group = Group(factory, _parse_methods(name, methods), name, options)
        if not _jax.traces_nothing():
            mistakes.refuse_traced(factory, _instead_of_traced)
        awaits = any(inspect_callable(group.definition(m)).awaits for m in methods)
        check(f"`{name}`", {**options, "awaits": awaits}, OPTIONS)
        if (save is None) != (restore is None):
            problem = "only one of save= and restore=. Pass both, or neither"
            raise conflict(f"`{name}`", problem)
        self._attach(group)

    def _attach(self, group: Group) -> None:
        """Makes this the handle of a group, with a function for each method."""
        self._group = group
        for method in group.methods:
            self.__dict__[method] = _method(group, method)

    def __getattr__(self, name: str) -> Any:  # not called for declared methods
        group = self.__dict__.get("_group")
        if group is None or name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"hostcall: `{group.name}` has no declared method `{name}`. Its declared"
            f" methods are {', '.join(group.methods)}. To add one, write"
            f" hc.Object(..., methods={{{name!r}: result}})"
        )

    def __repr__(self) -> str:
        group = self._group
        members = list(group.members.values())
        count = sum(member.value is not None for member in members)
        state = "closed" if group.ended else counted(count, "object")
        return f"<hc.Object {group.name} ({', '.join(group.methods)}): {state}>"

    def __reduce__(self) -> NoReturn:
        raise SpecError(
            f"hostcall: the hc.Object `{self._group.name}` can't be pickled or copied,"
            " since programs refer to it. Pickle what its save() returns",
            code="hc-pickle",
        )

    def __del__(self, bury: Callable[[], object] = _native.bury) -> None:
        # An argument, since a module's names are None when Python ends.
        bury()  # frees calls that have ended, which still hold the group

    def __enter__(self) -> Object:
        self._group.check_open("__enter__()")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all objects for good. Further calls do nothing.

        Waits for the programs that this thread has dispatched, and for methods that are
        running. If one of these programs fails, that is logged.

        Raises:
            Exception: what closing an object raised, after all objects were closed; an
                ExceptionGroup if there are several.
            HostcallError: called from inside a callback.
        """
        if not self._group.ended:
            self._wait("close")
            _raise(self._group.drop(ended=CLOSED))

    def renew(self) -> None:
        """Closes all objects, like `close`; the next call makes new ones.

        The new objects may have another batch.
        """
        self._wait("renew")
        _raise(self._group.drop())

    @suggests("hc.Object.save", gone=_GONE)
    def save(self) -> Snapshot:
        """Returns a snapshot of all objects, which can be pickled, for a checkpoint.

        Waits for the programs that this thread has dispatched. An object that programs
        of other threads use is saved between two of their calls. Each object (or with
        `save=` its state) is pickled separately, so what two objects share is stored
        twice. In a job of several processes these are the objects of this process.

        Raises:
            jax.errors.JaxRuntimeError: a program failed, and nothing raised that yet.
            HostcallError: an object can't be pickled, or `save` was called from inside
                a callback or after close().
        """
        failed = self._wait("save", log=False)
        error = failed[0] if failed else dispatched.first_unreported()
        if error is not None:
            raise error
        return self._group.snapshot()

    @suggests("hc.Object.restore", gone=_GONE)
    def restore(self, state: Snapshot) -> None:
        """Goes back to a snapshot that `save` returned, in this process or another.

        The objects become those of the snapshot, with its batch. With `restore=`, their
        states are put into the existing objects, and into new ones for missing rows.
        Without it, the snapshot's objects replace the existing ones. Objects that are
        replaced or not in the snapshot are closed.

        The snapshot is unpickled, so it must come from a trusted source.

        Args:
            state: the snapshot.

        Raises:
            SpecError: `state` is not a snapshot.
            Exception: what `restore=` raised, or closing an object.
        """
        snapshot = self._checked(state)
        self._wait("restore")
        _raise(self._group.restore(snapshot))

    def _checked(self, state: object) -> Snapshot:
        if not isinstance(state, dict) or set(state) != {"batch", "objects"}:
            raise SpecError(
                f"hostcall: restore() of `{self._group.name}` takes what save()"
                f" returned, got {type(state).__name__}"
            )
        return state

    def _wait(self, method: str, log: bool = True) -> list[BaseException]:
        """Waits for this thread's programs. Logs their failures, or returns them."""
        name = self._group.name
        if workers.in_call():
            raise HostcallError(
                f"hostcall: {method}() of `{name}` inside a callback would wait for the"
                " program that made the call. Call it where the program is called",
                code="hc-deadlock",
            )
        self._group.check_open(f"{method}()")
        if not log:
            return _jax.wait_for_effects()
        text = "%s() of `%s` continues after a failed program: %s"
        for failure in dispatched.failures_of_programs():
            logger.error(text, method, name, failure)
        return []


def _raise(failures: Sequence[BaseException]) -> None:
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise BaseExceptionGroup(f"closing {len(failures)} objects failed", failures)


def _instead_of_traced(_: str, value: str) -> str:
    return (
        "Make the object before the program, and give its methods what the program"
        f" computes: env.step(..., {value})"
    )


# --- What is declared ----------------------------------------------------------------

_HOOK = Option(
    "a method's name or a function", lambda v: isinstance(v, str) or callable(v)
)
# What `order=` and the like may be.
OPTIONS = {
    "executor": CALL["executor"],
    "concurrency": CALL["concurrency"],
    "order": Option(
        "'ordered' or 'unordered', since an object has state, so its calls can't be"
        " dropped or repeated",
        lambda v: isinstance(v, str) and v in ("ordered", "unordered"),
        needed=True,
    ),
    "vmap_method": Option(
        "'sequential' or 'parallel', since each row has its own object",
        lambda v: isinstance(v, str) and v in ("sequential", "parallel"),
        needed=True,
    ),
    **dict.fromkeys(("close", "save", "restore"), _HOOK),
}


def _parse_methods(name: str, methods: Mapping[str, Any]) -> dict[str, Results]:
    """What each method returns; refuses wrong names."""
    if not isinstance(methods, Mapping) or not methods:
        raise _undeclarable(
            f"methods= of `{name}` should be a dict from method names to result specs,"
            f" got {methods!r}"
        )
    parsed: dict[str, Results] = {}
    for method, result in methods.items():
        if not isinstance(method, str) or not method.isidentifier() or method[0] == "_":
            raise _undeclarable(
                f"methods= of `{name}` has the key {method!r}, which is not the name of"
                " a public method"
            )
        if method in vars(Object):
            raise _undeclarable(
                f"`{name}` can't declare `{method}`, since hc.Object has its own method"
                " of that name. Add a method with another name that calls it, and"
                " declare that one"
            )
        if isinstance(result, Results):  # read from an exported program
            parsed[method] = result
        else:
            parsed[method] = parse_result(result, f"{name}.{method}")
    return parsed


def _undeclarable(why: str) -> SpecError:
    return SpecError(f"hostcall: {why}", code="hc-object")


# --- Calls ---------------------------------------------------------------------------


_OPTIONS = {"where": None, "fill": None}
_JAXS = {"ordered": 'order="ordered" of hc.Object, the default'}


def _method(group: Group, name: str) -> Callable[..., Any]:
    entry = Entry(group, name)
    results = group.methods[name]
    face = mistakes.Face(
        f"the object `{group.name}`", f"{name}({{args}})", _OPTIONS, _JAXS
    )
    options = CallOptions.of(group.options)
    policy = Policy.of(group.options)
    # What takes the arguments that the user passes; None if that is not known.
    bound: Callable[..., Any] | None = None
    definition = group.definition(name)
    if isinstance(definition, types.FunctionType):
        # `definition` is the function itself for static methods too, which get no
        # object. For the others any object does: no argument is bound to a value.
        attribute = inspect.getattr_static(group.factory, name)
        is_static = isinstance(attribute, staticmethod)
        bound = definition if is_static else types.MethodType(definition, group.factory)

    def method(
        *args: Any, where: ArrayLike | None = None, fill: Any = None, **kwargs: Any
    ) -> Any:
        group.check_open(entry.caller)
        if bound is not None:
            mistakes.check(face, bound, args, kwargs)
        operands, template = flatten_arguments(args, kwargs)
        fills = parse_fill(fill, results, entry.__qualname__)
        mask = None if where is None else parse_mask(where, entry.__qualname__)
        callback = CallSpec(
            Opaque(entry), template, results, fills, options, users_place(), policy
        )
        return results.unflatten(bind_call(callback, operands, mask))

    method.__name__ = name
    method.__qualname__ = entry.__qualname__
    return method


# --- The host objects ----------------------------------------------------------------

# Which object a row has: (batch, index in it), as _runtime/context.py's
# `place_in_batch` returns them.
# A batch has the size of each vmap, and name and size of each axis of a mesh.
Batch = tuple[int | tuple[str, int], ...]
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
    """One object. Its lock is reentrant: a method may call the object again."""

    def __init__(self, value: Any = None) -> None:
        self.lock = threading.RLock()
        self.value = value  # None, which has no methods, while there is no object


class Group(PerProcess):
    """The objects of one `hc.Object`, by row. All rows belong to one batch.

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
        self.members: dict[RowIndex, Member] = {}  # first: `__del__` looks
        self.factory = factory
        self.methods = methods
        self.name = name
        self.options = options
        label = f"the factory of `{name}`"
        self._make = of_a_number(factory, label, "the object's index", "index")
        # The parameter that lacks the index, since it has a default; "" once logged.
        self._default_parameter = first_default(factory)
        self._close = _hook(options["close"], lambda: None)
        self._save = _hook(options["save"])  # None: the object is its state
        self._put = _hook(options["restore"])
        self.number = self.ended = ""
        self.lock = threading.Lock()
        super().__init__()

    def after_fork(self) -> None:
        self.lock = threading.Lock()
        if self.members:  # the child never finalizes the parent's objects
            _native.keep_for_ever(self.members)
            self.members = {}
            self.ended = FORKED

    def handle(self) -> Object:
        """One more `Object` of this group, for a loaded program."""
        handle = Object.__new__(Object)
        handle._attach(self)
        return handle

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
        while True:  # once more if another thread has dropped the member meanwhile
            member = self.join(row, caller)
            with member.lock:
                if self.is_there(row, member):
                    return settled(run(member.value, *args))

    def join(self, row: RowIndex, caller: str) -> Member:
        """The member of a row, maybe without its object."""
        if (member := self.members.get(row)) is not None:
            return member
        with self.lock:
            self.check_open(caller)
            batch, _ = row
            first_batch, _ = next(iter(self.members), row)
            if first_batch != batch:
                raise _other_batch(caller, self.name, first_batch, batch)
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
            with self.lock:
                if self.members.get(row) is member:
                    del self.members[row]  # so that it fixes no batch
            raise
        return True

    def _new_object(self, row: RowIndex) -> Any:
        _, index = row
        if index and self._default_parameter:
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
            members = sorted(self.members.items(), key=lambda item: item[0][1])
        objects = {}
        for (_, index), member in members:
            with member.lock:
                if member.value is None:
                    continue
                state = member.value
                if self._save is not None:
                    state = settled(self._save(state))
                try:
                    objects[index] = pickle.dumps(state)
                except Exception as error:
                    raise _unpicklable(self.name, index, error) from error
        batch = members[0][0][0] if members else ()
        return {"batch": batch, "objects": objects}

    def restore(self, snapshot: Snapshot) -> list[Exception]:
        """Goes back to a snapshot. Returns what closing other objects raised."""
        batch = snapshot["batch"]
        put = self._put
        with self.lock:
            with_object = {
                row for row, member in self.members.items() if member.value is not None
            }
        # All of them first: if one is broken, nothing has changed.
        states = {
            (batch, index): pickle.loads(pickled)
            for index, pickled in snapshot["objects"].items()
        }
        if put is None:  # the states are the objects
            failures = self.drop()
            members = {row: Member(state) for row, state in states.items()}
            with self.lock:
                self.members.update(members)
            return failures
        failures = self.drop(keep=with_object & states.keys())
        for row, state in states.items():
            self.call(row, "restore()", put, state)
        return failures

    def drop(self, keep: Collection[RowIndex] = (), ended: str = "") -> list[Exception]:
        """Closes objects as soon as no thread is in them. Returns what that raised."""
        with self.lock:
            self.ended = self.ended or ended
            rows = [row for row in self.members if row not in keep]
            rows.sort(key=lambda row: row[1])
            dropped = [self.members.pop(row) for row in rows]
        failures = []
        for member in dropped:
            with member.lock:  # waits for the thread that is in the object
                value = member.value
                member.value = None
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


def _at_exit() -> None:
    for group in living(Group):
        group.finish()


lifecycle.at_end(Phase.OBJECTS, _at_exit)


def _hook(hook: Hook, *lacking: Callable[[], None]) -> Callable[..., Any] | None:
    """The function of an object that an option gives, itself or as a method's name.

    `lacking` is what is called of an object without that method.
    """
    if not isinstance(hook, str):
        return hook
    return lambda value, *args: getattr(value, hook, *lacking)(*args)


# --- What programs call --------------------------------------------------------------


class Entry(HostCode):
    """The function that programs call for one method.

    It calls the method of the object that belongs to the calling row and device.
    """

    travels_as = "object"

    def __init__(self, group: Group, method: str) -> None:
        self.group = group
        self.name = method
        self.caller = f"{method}()"
        self._awaits = inspect_callable(group.definition(method)).awaits
        self.__qualname__ = f"{group.name}.{method}"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.group.call(
            self._row(None),
            self.caller,
            lambda value: getattr(value, self.name)(*args, **kwargs),
        )

    def enter(
        self, current: Current | None, locks: ExitStack, args: Any, kwargs: Any
    ) -> Callable[..., Any] | None:
        row = self._row(current)
        while True:
            member = self.group.join(row, self.caller)
            # A member that has left stays locked until the call has ended, which does
            # no harm: it has no object.
            locks.enter_context(member.lock)
            if self.group.is_there(row, member):
                method = getattr(member.value, self.name)
                return functools.partial(method, *args, **kwargs)

    def _row(self, current: Current | None) -> RowIndex:
        """Which row calls, and so which object is called."""
        row = context.place_in_batch(current)
        if row is None:
            raise HostcallError(
                f"hostcall: {self.caller} of `{self.group.name}` can't tell which"
                " object is meant: the program was lowered for a mesh without devices,"
                " or the executor runs rows on the thread that waits for them",
                code="hc-object",
            )
        return row

    def awaits(self) -> bool:
        return self._awaits

    def no_derivative(self) -> str:
        factory = name_of(self.group.factory)
        return (
            f"It is a method of the hc.Object `{self.group.name}`, made by `{factory}`,"
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
    mesh = ", ".join(
        f"{axis[0]}={axis[1]}" for axis in batch if isinstance(axis, tuple)
    )
    grid = " x ".join(str(size) for size in batch if not isinstance(size, tuple))
    rows = f"for {grid} rows" if grid else "without vmap"
    return f"{rows} on each device of a mesh {mesh}" if mesh else rows


def _lacks(name: str, method: str, value: object) -> HostcallError:
    # Looked up without running the user's properties.
    attributes = {
        name: inspect.getattr_static(value, name, None) for name in dir(value)
    }
    methods = [
        attribute_name
        for attribute_name, attribute in attributes.items()
        if attribute_name[0] != "_"
        and (callable(attribute) or isinstance(attribute, classmethod))
    ]
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
