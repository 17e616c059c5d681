"""`hc.Object`: a host object whose methods compiled programs call.

`Object` is what the user holds: it checks the declaration, and has a function for each
method. The host objects are in a `Group` (group.py), which programs hold too.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

from jax.typing import ArrayLike

from hostcall import _jax, _native
from hostcall._api.object import everywhere
from hostcall._api.object.group import CLOSED, Entry, Group, Snapshot
from hostcall._core import failures, mistakes
from hostcall._core.arguments import (
    check_function,
    conflict,
    of_all_processes,
    parse_mask,
)
from hostcall._core.callback import Callback
from hostcall._core.coroutines import is_coroutine_function
from hostcall._core.counted import counted
from hostcall._core.errors import HostcallError, SpecError
from hostcall._core.options import CALL, Option, check
from hostcall._core.source import users_place
from hostcall._core.spec import Results, flatten_arguments, parse_fill, parse_result
from hostcall._primitives.call.make import make
from hostcall._runtime import context

logger = logging.getLogger("hostcall")

_ALONE = "the objects of this process"


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
            "unordered": exactly once, in program order within straight-line code.
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
        options = {each: value for each, value in locals().items() if each in OPTIONS}
        usage = "hc.Object(factory, methods={...})"
        said = check_function(factory, usage, awaits=True)
        said = said.rpartition("<locals>.")[2]
        name = name or ("object" if said == "<lambda>" else said)
        group = Group(factory, _parse_methods(name, methods), name, options)
        if _jax.is_tracing():
            mistakes.refuse_traced(factory, _instead_of_traced)
        awaits = any(is_coroutine_function(group.definition(m)) for m in methods)
        check(f"`{name}`", {**options, "awaits": awaits}, OPTIONS)
        if (save is None) != (restore is None):
            what = "only one of save= and restore=. Pass both, or neither"
            raise conflict(f"`{name}`", what)
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
        made = sum(member.made for member in list(group.members.values()))
        state = "closed" if group.ended else counted(made, "object")
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

    def save(
        self, *, processes: Literal["all"] | None = None, limit: float = 300.0
    ) -> dict[str, Any]:
        """Returns a snapshot of all objects, which can be pickled, for a checkpoint.

        Waits for the programs that this thread has dispatched. An object that programs
        of other threads use is saved between two of their calls. Each object (or with
        `save=` its state) is pickled separately, so what two objects share is stored
        twice.

        Args:
            processes: "all": the objects of all processes of the job, in one snapshot
                that each process gets. All processes have to call it. Nothing is
                unpickled, but the others' states come through JAX's coordination
                service: restore the snapshot only if its port is the job's own. None:
                those of this process.
            limit: seconds to wait for the other processes.

        Raises:
            jax.errors.JaxRuntimeError: a program failed, and nothing raised that yet.
            HostcallError: an object can't be pickled, or `save` was called from inside
                a callback or after close(); with processes="all" also, in each process,
                if this happens in one, or two have an object with the same index.
        """
        group = self._group
        who = f"save() of `{group.name}`"
        if of_all_processes(processes, limit, who, _ALONE):
            return everywhere.gather(group.name, self._snapshot, limit)
        snapshot = self._snapshot()
        waiting = snapshot.pop("waiting")
        if waiting:
            raise HostcallError(
                f"hostcall: save() of `{group.name}` can't tell what is this"
                f" process's own: restore(..., processes='all') brought the states of"
                f" {counted(len(waiting), 'object')}, to which no call has come yet."
                " Use save(processes='all')",
                code="hc-object",
            )
        return snapshot

    def _snapshot(self) -> Snapshot:
        failed = self._wait("save", log=False)
        error = failed[0] if failed else failures.first_owed()
        if error is not None:
            raise error
        return self._group.snapshot()

    def restore(
        self,
        state: dict[str, Any] | None,
        *,
        processes: Literal["all"] | None = None,
        limit: float = 300.0,
    ) -> None:
        """Goes back to a snapshot that `save` returned, in this process or another.

        The objects become those of the snapshot, with its batch. With `restore=`, their
        states are put into the existing objects, and into new ones for missing rows.
        Without it, the snapshot's objects replace the existing ones. Objects that are
        replaced or not in the snapshot are closed.

        The snapshot is unpickled, so it must come from a trusted source.

        Args:
            state: the snapshot. With processes="all" all processes give the same one.
                A process that gives None gets that of process 0 through JAX's
                coordination service, and unpickles it. That service asks nobody who he
                is, so give the snapshot in each process unless you trust all who can
                reach its port.
            processes: "all": the objects of all processes of the job. All have to call
                it. A process makes an object from its state when the first call comes
                to that object, so the job may have other processes or another order of
                devices than the one that saved. None: those of this process.
            limit: seconds to wait for the other processes.

        Raises:
            SpecError: `state` is not a snapshot.
            Exception: what `restore=` raised, or closing an object.
        """
        name = self._group.name
        who = f"restore() of `{name}`"
        everyones = of_all_processes(processes, limit, who, _ALONE)
        if everyones:
            found = everywhere.scatter(name, state, self._checked, limit)
        else:
            found = self._checked(state)
        self._wait("restore")
        _raise(self._group.restore(found, everyones))

    def _checked(self, state: object) -> Snapshot:
        if not isinstance(state, dict) or set(state) != {"batch", "objects"}:
            raise SpecError(
                f"hostcall: restore() of `{self._group.name}` takes what save()"
                f" returned, got {type(state).__name__}"
            )
        return state

    def _wait(self, what: str, log: bool = True) -> list[BaseException]:
        """Waits for this thread's programs. Logs their failures, or returns them."""
        name = self._group.name
        if context.current() is not None:
            raise HostcallError(
                f"hostcall: {what}() of `{name}` inside a callback would wait for the"
                " program that made the call. Call it where the program is called",
                code="hc-deadlock",
            )
        self._group.check_open(f"{what}()")
        if not log:
            return _jax.wait_for_effects()
        text = "%s() of `%s` continues after a failed program: %s"
        for failure in failures.failures_of_programs():
            logger.error(text, what, name, failure)
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
    **{each: CALL[each] for each in ("executor", "concurrency")},
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
    wrong = ""
    if not isinstance(methods, Mapping) or not methods:
        wrong = (
            f"methods= of `{name}` should be a dict from method names to result specs,"
            f" got {methods!r}"
        )
    for method in () if wrong else methods:
        if not isinstance(method, str) or not method.isidentifier() or method[0] == "_":
            wrong = (
                f"methods= of `{name}` has the key {method!r}, which is not the name of"
                " a public method"
            )
        elif hasattr(Object, method):
            wrong = (
                f"`{name}` can't declare `{method}`, since hc.Object has its own method"
                " of that name. Add a method with another name that calls it, and"
                " declare that one"
            )
    if wrong:
        raise SpecError(f"hostcall: {wrong}", code="hc-object")
    return {
        # Those of an exported program are read.
        method: each
        if isinstance(each, Results)
        else parse_result(each, f"{name}.{method}")
        for method, each in methods.items()
    }


# --- Calls ---------------------------------------------------------------------------


_OPTIONS = frozenset({"where", "fill"})
_JAXS = {"ordered": 'order="ordered" of hc.Object, the default'}


def _method(group: Group, name: str) -> Callable[..., Any]:
    entry, results = Entry(group, name), group.methods[name]
    face = mistakes.Face(
        f"the object `{group.name}`", f"{name}({{args}})", _OPTIONS, _JAXS
    )
    called = group.definition(name)
    bound = isinstance(called, types.FunctionType) and types.MethodType(
        called, group.factory
    )

    def method(
        *args: Any, where: ArrayLike | None = None, fill: Any = None, **kwargs: Any
    ) -> Any:
        group.check_open(entry.who)
        if bound:
            mistakes.check(face, bound, args, kwargs)
        operands, template = flatten_arguments(args, kwargs)
        fills = parse_fill(fill, results, entry.__qualname__)
        mask = None if where is None else parse_mask(where, entry.__qualname__)
        trees = template, results, fills
        callback = Callback.of(entry, trees, users_place(), group.options)
        return results.fill(make(callback, operands, mask))

    method.__name__, method.__qualname__ = name, entry.__qualname__
    return method
