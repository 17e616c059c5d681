"""`hc.Object`: a host object whose methods compiled programs call.

Three classes, from the user to the program:

    Object   what the user holds: checks the declaration, and has a function for each
             method. It waits for programs before it closes, saves or restores.
    Group    the host objects, by row: makes, locks, saves and closes them. Each row of
             a batch has one object. Each object has a lock, so two threads are never
             in it at once. (groups.py)
    Entry    what programs hold for each method. It holds the group, so objects live as
             long as anything can call them, also without the `Object`. (entries.py)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

from hostcall import _jax, _native
from hostcall._api.object.entries import traced_method
from hostcall._api.object.groups import CLOSED, Group, Snapshot
from hostcall._core import dispatched, mistakes
from hostcall._core.errors import HostcallError, SpecError, conflict, counted
from hostcall._core.mistakes import check_function
from hostcall._core.option_checks import check
from hostcall._core.options import CALL, Option
from hostcall._core.source import inspect_callable
from hostcall._core.spec import Results, parse_result
from hostcall._core.suggestions import suggests
from hostcall._runtime import workers

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
        arguments = locals()
        options = {option: arguments[option] for option in OPTIONS}
        usage = "hc.Object(factory, methods={...}); for one that exists, lambda: it"
        qualified_name = check_function(factory, usage, awaits=True).name
        if not name:
            _, _, name = qualified_name.rpartition("<locals>.")
            if name == "<lambda>":  # says nothing in a message
                name = "object"
        group = Group(factory, _parse_methods(name, methods), name, options)
        # The object outlives the program, and its factory runs when the program does.
        if not _jax.traces_nothing():
            mistakes.refuse_traced(factory, _instead_of_traced)
        # `concurrency=` is for coroutines, so the check must know of one.
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
            setattr(self, method, traced_method(group, method))

    def __getattr__(self, name: str) -> Any:  # not called for declared methods
        # Without a group: `__init__` has raised, or copy and pickle look at an object
        # that they have made without it. They expect a plain AttributeError.
        group = vars(self).get("_group")
        if group is None or name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"hostcall: `{group.name}` has no declared method `{name}`. Its declared"
            f" methods are {', '.join(group.methods)}. To add one, write"
            f" hc.Object(..., methods={{{name!r}: result}})"
        )

    def __repr__(self) -> str:
        group = self._group
        members = list(group.members.values())  # a copy: programs may add some
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
            # A program that is on the way could call a closed object.
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
        # A failure that nobody has heard of yet may have left objects half-way.
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
        if not isinstance(state, dict) or set(state) != {"batch", "objects"}:
            raise SpecError(
                f"hostcall: restore() of `{self._group.name}` takes what save()"
                f" returned, got {type(state).__name__}"
            )
        self._wait("restore")
        _raise(self._group.restore(state))

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
        # Closing goes on all the same: whoever gave up after a failure would else have
        # no way to end the objects.
        text = "%s() of `%s` continues after a failed program: %s"
        for failure in dispatched.failures_of_programs():
            logger.error(text, method, name, failure)
        return []


def handle_of(group: Group) -> Object:
    """One more `Object` of this group, for a loaded program."""
    handle = Object.__new__(Object)
    handle._attach(group)
    return handle


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
    """What each method returns; refuses names that can't be attributes of an Object."""
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
        if method in vars(Object):  # it would hide that one
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
