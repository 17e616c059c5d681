"""The function that programs call for one method of an `hc.Object`."""

from __future__ import annotations

import functools
import operator
from typing import Any, NoReturn

from hostcall._api.object.group import Group
from hostcall._core.coroutines import is_coroutine_function
from hostcall._core.errors import HostcallError, SpecError
from hostcall._core.host_code import HostCode
from hostcall._core.source import name_of
from hostcall._runtime import context


def definition(group: Group, method: str) -> Any:
    """The method as its class defines it; None if the factory is not a class."""
    factory = group.declared["factory"]
    return getattr(factory, method, None) if isinstance(factory, type) else None


class Entry(HostCode):
    """The function that programs call for one method.

    It calls the method of the object that belongs to the calling row and device.
    """

    travels_as = "object"

    def __init__(self, group: Group, method: str, named: bool) -> None:
        self.group, self.name, self.named = group, method, named
        self._awaits = is_coroutine_function(definition(group, method))
        self.who, self.method = f"{method}()", operator.attrgetter(method)
        self.__qualname__ = f"{group.name}.{method}"

    def __call__(self, *args: Any) -> Any:
        args, kwargs = args if self.named else (args, {})
        place = self._place(context.place_in_batch())
        return self.group.enter(place, self.who, self.method, args, kwargs)

    def awaits(self) -> bool:
        """Whether the method is known to be a coroutine function."""
        return self._awaits

    def no_derivative(self) -> str:
        made = name_of(self.group.declared["factory"])
        return (
            f"It is a method of the hc.Object `{self.group.name}`, made by `{made}`,"
            " and objects' methods have no derivatives, since a call may change the"
            " object. Write what needs one as a function: hc.host(f, result=...), with"
            " a rule."
        )

    def lane(self) -> Any:  # all methods of the object are one
        return self.group

    def enter(self, here: Any, held: Any, args: Any) -> Any:
        """Locks the row's object until `held` is closed; returns what to await."""
        args, kwargs = args if self.named else (args, {})
        place = self._place(context.place_in_batch(here))
        value = self.group.take(place, self.who, held)
        return functools.partial(self.method(value), *args, **kwargs)

    def _place(self, found: Any) -> Any:
        if found is None:
            raise HostcallError(
                f"hostcall: {self.who} of `{self.group.name}` can't tell which object"
                " is meant: the program was lowered for a mesh without devices, or the"
                " executor runs rows on the thread that waits for them",
                code="hc-object",
            )
        return found

    def __reduce__(self) -> NoReturn:
        raise SpecError(
            f"hostcall: the objects of `{self.group.name}` are in this process, but its"
            " executor= runs rows in other processes. Pass a pool of threads",
            code="hc-conflict",
        )
