"""A HostFunction in the body of a class, bound to an object of the class."""

from __future__ import annotations

import functools
import types
from typing import Any

from hostcall._core.host_code import Callee, Handle, TakesMask
from hostcall._host_function.ruled import Ruled
from hostcall._host_function.rules import Function, Tree


class Method(Handle, TakesMask):
    """A HostFunction of a class, bound to an object.

    Equal to another for the same function and object, as Python's bound methods are.
    The object is argument 0, and static unless it is a pytree.
    """

    def __init__(self, function: Any, instance: object) -> None:
        # A HostFunction, whose file imports this one.
        self.__func__: Ruled = function
        self.__self__ = instance
        self._bound = types.MethodType(function, instance)

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        return self._bound(*args, **kwargs)

    def _held(self) -> Any:
        return self.__func__._held()

    def _definition(self) -> Function:
        return self.__func__.fn

    def _callee(self) -> Callee | None:
        callee = self.__func__._callee()
        return callee and callee._replace(bound=(self.__self__,))

    def _why_not(self) -> str:
        return self.__func__._why_not()

    def where(self, mask: Any, fill: Any = None) -> Function:
        masked = self._bound.__func__.where(mask, fill)  # type: ignore[attr-defined]
        return functools.partial(masked, self.__self__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)

    def __repr__(self) -> str:
        return f"<bound {self.__func__!r} of {self.__self__!r}>"

    def __eq__(self, method: object) -> bool:
        return isinstance(method, Method) and method._bound == self._bound

    def __hash__(self) -> int:
        return hash(self._bound)

    def __reduce__(self) -> tuple[object, ...]:
        return self._bound.__reduce__()  # type: ignore[return-value]
