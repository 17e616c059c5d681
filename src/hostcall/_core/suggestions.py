"""Says which option of a public function an unknown keyword was meant to be."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def suggests(
    name: str, instead: Mapping[str, str] = types.MappingProxyType({})
) -> Callable[[F], F]:
    """Makes a public function say which option an unknown keyword was meant to be.

    Python itself says so since 3.13, in these words.

    Args:
        name: the function's public name.
        instead: keywords of other libraries' functions, and what to write here.
    """

    def decorate(function: F) -> F:
        options = [k for k in inspect.signature(function).parameters if k != "self"]

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for key in kwargs.keys() - options:
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
