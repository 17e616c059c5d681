"""The function that programs call for one method of an `hc.Object`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn

from hostcall._api.object.group import Group, Place
from hostcall._core.coroutines import is_coroutine_function
from hostcall._core.errors import HostcallError, SpecError
from hostcall._core.host_code import HostCode
from hostcall._core.source import name_of
from hostcall._runtime import context
from hostcall._runtime.context import Current


class Entry(HostCode):
    """The function that programs call for one method.

    It calls the method of the object that belongs to the calling row and device.
    """

    travels_as = "object"

    def __init__(self, group: Group, method: str) -> None:
        self.group, self.name, self.who = group, method, f"{method}()"
        self._awaits = is_coroutine_function(group.declared.definition(method))
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
        while True:
            member = self.group.member(self._place(here), self.who)
            held.enter_context(member.lock)
            if member.made:
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
        made = name_of(self.group.declared.factory)
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
