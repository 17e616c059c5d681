"""What programs call: the methods of an `hc.Object`.

Each declared method is two things: the function that the user calls while a program is
traced (`traced_method`), and the `Entry` that this function puts into the program,
which the engine calls when the program runs.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn

from jax.typing import ArrayLike

from hostcall._api.object.groups import Group, RowIndex
from hostcall._core import mistakes
from hostcall._core.callback import CallSpec
from hostcall._core.errors import HostcallError, SpecError
from hostcall._core.host_code import HostCode
from hostcall._core.mistakes import parse_mask
from hostcall._core.options import CallOptions, Policy
from hostcall._core.source import inspect_callable, name_of, users_place
from hostcall._core.spec import Opaque, flatten_arguments, parse_fill
from hostcall._primitives.make import bind_call
from hostcall._runtime import context
from hostcall._runtime.context import Current


class Entry(HostCode):
    """The function that programs call for one method.

    It calls the method of the object that belongs to the calling row and device.

    Attributes:
        group: the objects.
        name: the method's.
        caller: how messages write the call.
    """

    travels_as = "object"

    def __init__(self, group: Group, method: str) -> None:
        self.group = group
        self.name = method
        self.caller = f"{method}()"
        self._awaits = inspect_callable(group.definition(method)).awaits
        self.__qualname__ = f"{group.name}.{method}"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        def call_method(value: Any) -> Any:
            return getattr(value, self.name)(*args, **kwargs)

        return self.group.call(self._row(None), self.caller, call_method)

    def enter(
        self, current: Current | None, locks: ExitStack, args: Any, kwargs: Any
    ) -> Callable[..., Any] | None:
        # As `Group.call`, but the object stays locked until `locks` is closed, while
        # the coroutine that the method makes runs on the event loop.
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


def traced_method(group: Group, name: str) -> Callable[..., Any]:
    """The function that an `Object` has under the name of a method.

    Whatever does not depend on the arguments is made here, once, and not in each call.
    """
    entry = Entry(group, name)
    results = group.methods[name]
    face = mistakes.Face(
        name=f"the object `{group.name}`",
        form=f"{name}({{args}})",
        options={"where": None, "fill": None},
        jaxs={"ordered": 'order="ordered" of hc.Object, the default'},
    )
    options = CallOptions.of(group.options)
    policy = Policy.of(group.options)
    takes_arguments = _takes_arguments(group, name)

    def method(
        *args: Any, where: ArrayLike | None = None, fill: Any = None, **kwargs: Any
    ) -> Any:
        group.check_open(entry.caller)
        if takes_arguments is not None:
            mistakes.check(face, takes_arguments, args, kwargs)
        operands, template = flatten_arguments(args, kwargs)
        callback = CallSpec(
            fn=Opaque(entry),
            template=template,
            results=results,
            fills=parse_fill(fill, results, entry.__qualname__),
            options=options,
            place=users_place(),
            policy=policy,
        )
        mask = None if where is None else parse_mask(where, entry.__qualname__)
        return results.unflatten(bind_call(callback, operands, mask))

    method.__name__ = name
    method.__qualname__ = entry.__qualname__
    return method


def _takes_arguments(group: Group, name: str) -> Callable[..., Any] | None:
    """What takes the arguments that the user passes; None if that is not known.

    Only its signature is used.
    """
    definition = group.definition(name)
    if not isinstance(definition, types.FunctionType):
        return None
    # `definition` is the function itself for static methods too, which get no object.
    attribute = inspect.getattr_static(group.factory, name)
    if isinstance(attribute, staticmethod):
        return definition
    # Any object does for `self`: no argument is bound to a value.
    return types.MethodType(definition, group.factory)
