"""Says what to write instead of a keyword that a public function does not take."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from hostcall._core.errors import SpecError

F = TypeVar("F", bound=Callable[..., Any])


_NONE: Mapping[str, str] = types.MappingProxyType({})


def suggests(
    name: str, instead: Mapping[str, str] = _NONE, gone: Mapping[str, str] = _NONE
) -> Callable[[F], F]:
    """Makes a public function say what an unknown keyword was meant to be.

    A misspelt option is a TypeError, as Python's own since 3.13, in its words. An
    option that the function had once is a SpecError.

    Args:
        name: the function's public name.
        instead: keywords of other libraries' functions, and what to write here.
        gone: options that it had once, and what to write instead.
    """

    def decorate(function: F) -> F:
        options = [k for k in inspect.signature(function).parameters if k != "self"]

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for key in kwargs.keys() - options:
                if key in gone:
                    raise SpecError(
                        f"hostcall: {name} has no {key}= any more: {gone[key]}",
                        code="hc-arguments",
                    )
                near = get_close_matches(key, options, n=1)
                hint = f". Did you mean '{near[0]}'?" if near else ""
                if key in instead:
                    hint = f". {instead[key]}"
                raise TypeError(
                    f"{name}() got an unexpected keyword argument '{key}'{hint}"
                )
            return function(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate
