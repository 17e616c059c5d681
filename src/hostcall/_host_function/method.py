"""A HostFunction that was defined in the body of a class, bound to an object."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from hostcall._core.host_code import Handle, TakesMask


class Method(Handle, TakesMask):
    """A bound method, equal to another for the same function and object, as Python's.

    The object is argument 0, and static unless it is a pytree.
    """

    def __init__(self, function: Any, instance: Any) -> None:
        self.__func__ = function
        self.__self__ = instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def _held(self) -> Any:
        return self.__func__._held()

    def _definition(self) -> Callable[..., Any]:
        return self.__func__.fn  # type: ignore[no-any-return]

    def _opened(self) -> tuple[Any, Callable[..., Any], dict[str, Any]]:
        function, fn, options = self.__func__._opened()
        return function, types.MethodType(fn, self.__self__), options

    def where(self, mask: Any, fill: Any = None) -> Callable[..., Any]:
        masked = self.__func__.where(mask, fill)
        return lambda *args, **kwargs: masked(self.__self__, *args, **kwargs)

    def difference_error(self, *args: Any) -> Any:
        return self.__func__.difference_error(self.__self__, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)

    def __repr__(self) -> str:
        return f"<bound {self.__func__!r} of {self.__self__!r}>"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Method)
            and other.__func__ is self.__func__
            and other.__self__ is self.__self__
        )

    def __hash__(self) -> int:
        return hash((Method, id(self.__func__), id(self.__self__)))

    def __reduce__(self) -> Any:
        return getattr, (self.__self__, self.__func__.__name__)
