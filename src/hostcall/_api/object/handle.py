"""`hc.Object`: a host object whose methods compiled programs call.

`Object` is what the user holds: the checks, and a function for each method. The objects
are in a `Group` (`_object_group`), which programs hold too.
"""

from __future__ import annotations

import functools
import logging
import operator
import pickle
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

from hostcall import _jax, _native
from hostcall._api.object.declaration import check, hook, maker
from hostcall._api.object.group import CLOSED, Group
from hostcall._core import failures, mistakes
from hostcall._core.arguments import check_function, parse_mask
from hostcall._core.errors import HostcallError, SpecError
from hostcall._core.source import users_place
from hostcall._core.spec import Static, flatten_arguments, parse_fill, parse_result
from hostcall._engine.params.call import Callback
from hostcall._primitives.call.make import as_tree, make
from hostcall._primitives.call.options import check_options
from hostcall._runtime import context

logger = logging.getLogger("hostcall")


class Object:
    """A host object with state (a simulator, a cursor) for compiled programs.

    ::

        env = hc.Object(Walk, methods={"reset": obs, "step": (obs, reward)})
        place, reward = env.step(action)     # anywhere in JAX code: Walk().step(action)

    The object is made on the host at the first call, not before. Under vmap each row
    has an object of its own, in each call and each program the same.

    Args:
        factory: makes an object. One with a required argument gets the object's index,
            a tuple: of its row along each batch axis, the outermost vmap first; inside
            shard_map and pmap the device's mesh coordinates come before. Without them
            it is (). Any other factory is called without arguments.
        methods: name -> what the method returns, as `result=` of `hc.call`. Each is an
            attribute, a function `(*args, where=None, fill=None, **kwargs)`. The
            object's method gets the arguments as `hc.call` hands them over: NumPy
            arrays, of shape () for numbers; everything else as it is.
        order: "ordered": each call exactly once, after the ordered call before it.
            "unordered": exactly once, in program order within straight-line code.
        name: for messages; default the factory's.
        vmap_method: "sequential": rows in row order. "parallel": all at once.
        executor: a pool of threads for "parallel", as in `hc.call`.
        close: ends an object: the name of its method, called where it has one, or a
            function of it; None for nothing.
        save: gives an object's state: a method's name, or a function of it. Default:
            the object itself, pickled.
        restore: puts such a state into an object: a method's name, or a function
            `restore(object, state)`.

    A thread that calls an object waits while another is in it. Objects are closed by
    `close()`, on leaving `with env:`, at the end of the process, and some time after
    this `Object` and every program that calls it are gone. A forked child has no
    objects: a call there is an error, and those of its parent are left alone.

    Raises:
        SpecError: the object is declared wrong.
        AttributeError: a method that is not declared.
        HostcallError: a call after `close()`; where a program calls, one with another
            batch than before, or of an object that lacks a declared method.
        jax.errors.JaxRuntimeError: when the program runs and a method, or the factory,
            fails; `hostcall.reraise()` gives its exception. An eager call raises it
            directly. Rows after the failing one are not called; objects keep the state
            they have. A factory that failed is asked again by the next call.

    Under transformations:
        jit, scan, while_loop, cond, map: one object, entered each time the place is
            reached. remat: not again in the backward pass.
        vmap: an object for each row; nested, for each tuple of indices. The first call
            says how many there are, until `renew()`. A call of which no argument
            depends on the row is made once, of another batch: give it one that does.
        vmap of cond, of while_loop: JAX computes every branch for every row. Give the
            condition as `where=` too.
        jvp, grad, transposition: refused, as by `hc.call`.
        shard_map, pmap: an object for each device of the mesh, and each row there.
        jit over sharded arrays: as without: one call, on the whole value.

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
        executor: Any = None,
        close: str | Callable[[Any], Any] | None = "close",
        save: str | Callable[[Any], Any] | None = None,
        restore: str | Callable[[Any, Any], Any] | None = None,
    ) -> None:
        said = check_function(factory, "hc.Object(factory, methods={...})")
        said = said.rpartition("<locals>.")[2]
        name = name or ("object" if said == "<lambda>" else said)
        check(name, methods, order, vmap_method)
        check_options(name, order, vmap_method, "numpy", False, None, executor)
        if (save is None) != (restore is None):
            raise SpecError(f"hostcall: `{name}` needs both of save= and restore=")
        make = maker(factory, name)
        end = hook(name, "close", close, optional=True)
        self._group = Group(name, make, tuple(methods), end)
        self._save = hook(name, "save", save)
        self._restore = hook(name, "restore", restore)
        how = {"order": order, "vmap_method": vmap_method}
        pool = None if executor is None else Static(executor)
        kind = factory if isinstance(factory, type) else None
        for method, result in methods.items():
            self.__dict__[method] = _method(
                self._group, method, result, how, pool, kind
            )

    def __getattr__(self, name: str) -> Any:  # what is declared is found before
        group = self.__dict__.get("_group")
        if group is None or name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"hostcall: `{group.name}` has no declared method `{name}`. Declared are"
            f" {', '.join(group.methods)}; for another write"
            f" hc.Object(..., methods={{{name!r}: result}})"
        )

    def __repr__(self) -> str:
        group = self._group
        state = "closed" if group.ended else f"{len(group.members)} objects"
        return f"<hc.Object {group.name} ({', '.join(group.methods)}): {state}>"

    def __reduce__(self) -> NoReturn:
        raise SpecError(
            f"hostcall: the hc.Object `{self._group.name}` can't be pickled or copied:"
            " programs hold it. Its save() gives a snapshot that can"
        )

    def __del__(self) -> None:
        _native.bury()  # calls that have ended, which hold the group

    def __enter__(self) -> Object:
        self._group.check_open("`with`")
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Closes all objects, for good; after the first time it does nothing.

        Waits for what this thread has dispatched, and for methods under way. A program
        that failed meanwhile is logged.

        Raises:
            Exception: what closing an object raised, after all were closed; of several
                an ExceptionGroup.
            HostcallError: called from inside a callback.
        """
        if not self._group.ended:
            self._wait("close")
            _raise(self._group.drop(ended=CLOSED))

    def renew(self) -> None:
        """Closes all objects, as `close` does; the next call makes them anew.

        They may be of another batch then.
        """
        self._wait("renew")
        _raise(self._group.drop())

    def save(self) -> dict[str, Any]:
        """A snapshot of all objects, which pickle can write: for a checkpoint.

        Waits for what this thread has dispatched; programs of other threads are between
        two methods of an object. Each object is pickled by itself (by `save=`, its
        state): what two of them share is there twice.

        Raises:
            jax.errors.JaxRuntimeError: a program failed, and nobody was told.
            HostcallError: an object does not pickle; called from inside a callback, or
                after close().
        """
        failures = self._wait("save", log=False)
        if failures:
            raise failures[0]
        return self._group.snapshot(self._save)

    def restore(self, state: dict[str, Any]) -> None:
        """Goes back to a snapshot that `save` gave, in this process or another.

        The objects are those of the snapshot, however many there were. With `restore=`
        its states are put into the objects that there are, and into new ones where one
        is missing; without, objects are replaced. Those without a place are closed.

        The snapshot is unpickled: take none from strangers.

        Raises:
            SpecError: `state` is something else.
            Exception: what `restore=` or closing an object raised.
        """
        if not isinstance(state, dict) or set(state) != {"batch", "objects"}:
            raise SpecError(
                f"hostcall: restore() of `{self._group.name}` takes what save() gave,"
                f" got {type(state).__name__}"
            )
        self._wait("restore")
        states = {
            (state["batch"], index): pickle.loads(pickled)
            for index, pickled in state["objects"].items()
        }
        group, put = self._group, self._restore
        failures = group.drop(keep=states if put else ())
        if put is None:
            group.put(states)
        else:
            into = functools.partial(functools.partial, put)  # as if it were a method
            for place, value in states.items():
                group.enter(place, "restore()", into, (value,), {})
        _raise(failures)

    def _wait(self, what: str, log: bool = True) -> list[BaseException]:
        """For programs of this thread; gives what they failed with."""
        name = self._group.name
        if context.current() is not None:
            raise HostcallError(
                f"hostcall: {what}() of `{name}` inside a callback would wait for the"
                " program that calls. Use it where the program is called"
            )
        self._group.check_open(f"{what}()")
        ended = failures.failures_of_effects() if log else _jax.wait_for_effects()
        for failure in ended if log else ():
            logger.error("%s() of `%s` goes on after: %s", what, name, failure)
        return ended


def _raise(failures: Sequence[BaseException]) -> None:
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise BaseExceptionGroup(f"closing {len(failures)} objects failed", failures)


# --- Calls ---------------------------------------------------------------------------


class _Entry:
    """What a program calls: one method, of the object that the call's place means."""

    def __init__(self, group: Group, method: str, named: bool) -> None:
        self.group, self.named = group, named
        self.who, self.method = f"{method}()", operator.attrgetter(method)
        self.__qualname__ = f"{group.name}.{method}"

    def __call__(self, *args: Any) -> Any:
        args, kwargs = args if self.named else (args, {})
        place = context.place_in_batch()
        if place is None:
            raise HostcallError(
                f"hostcall: {self.who} of `{self.group.name}` can't tell which object"
                " is meant: the program was lowered for a mesh without devices, or the"
                " executor runs rows on the thread that waits for them"
            )
        return self.group.enter(place, self.who, self.method, args, kwargs)

    def __reduce__(self) -> NoReturn:
        raise SpecError(
            f"hostcall: the objects of `{self.group.name}` are in this process, and its"
            " executor= would call them in another. Give it a pool of threads"
        )


_OPTIONS = frozenset({"where", "fill"})
_JAXS = {"ordered": 'order="ordered" of hc.Object, as it is by default'}


def _method(
    group: Group,
    name: str,
    result: Any,
    how: dict[str, Any],
    executor: Static | None,
    kind: type | None,
) -> Callable[..., Any]:
    positional, named = _Entry(group, name, False), _Entry(group, name, True)

    face = mistakes.Face(
        f"the object `{group.name}`", f"{name}({{args}})", _OPTIONS, _JAXS
    )
    called = getattr(kind, name, None)  # what a factory makes is not known
    bound = isinstance(called, types.FunctionType) and types.MethodType(called, kind)

    def method(*args: Any, where: Any = None, fill: Any = None, **kwargs: Any) -> Any:
        group.check_open(f"{name}()")
        if bound:
            mistakes.check(face, bound, args, kwargs)
        operands, template = flatten_arguments((args, kwargs) if kwargs else args, {})
        entry = named if kwargs else positional
        results = parse_result(result, entry.__qualname__)
        callback = Callback(
            fn=Static(entry),
            template=template,
            results=results,
            fills=parse_fill(fill, results, entry.__qualname__),
            place=users_place(),
            executor=executor,
        )
        mask = None if where is None else parse_mask(where, entry.__qualname__)
        return as_tree(results, make(callback, operands, mask=mask, **how))

    method.__name__, method.__qualname__ = name, f"{group.name}.{name}"
    return method
