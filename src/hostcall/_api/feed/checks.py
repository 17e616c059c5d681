"""Checks of what `hc.feed` and a call of a feed are given."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from hostcall import _jax
from hostcall._core import mistakes
from hostcall._core.errors import SpecError
from hostcall._core.spec import is_array_like

_ENDS = ("mask", "raise", "repeat")


def check_options(name: str, prefetch: Any, on_end: Any, timeout: Any) -> None:
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 1:
        raise SpecError(
            f"hostcall: prefetch= of the feed `{name}` should be a number of items, an"
            f" int of 1 or more, got {prefetch!r}",
            code="hc-option",
        )
    if on_end not in _ENDS:
        raise SpecError(
            f"hostcall: on_end= of the feed `{name}` should be one of"
            f" {', '.join(map(repr, _ENDS))}, got {on_end!r}",
            code="hc-option",
        )
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise SpecError(
            f"hostcall: timeout= of the feed `{name}` should be a number of seconds"
            f" above 0, got {timeout!r}",
            code="hc-option",
        )


def refuse_traced(source: Any) -> None:
    """Refuses a source that would use traced values of the program around it."""
    if _jax.is_tracing():
        mistakes.refuse_traced(
            source,
            lambda _, value: (
                "Make the feed before the program, and compute with its items and"
                f" {value} in the program: item, ok = feed()"
            ),
        )


def marker(leaf: Any, name: str) -> Any:
    """An array without elements and derivatives, that has the rows of `leaf`."""
    if not isinstance(leaf, jax.Array) and not is_array_like(leaf):
        raise SpecError(
            f"hostcall: rows= of a call of the feed `{name}` should be an array of the"
            f" vmapped function, which differs between the rows, got {leaf!r}. Write"
            " feed(rows=x), which takes an item for each row of x",
            code="hc-option",
        )
    if isinstance(leaf, jax.Array) and _jax.is_key_dtype(leaf.dtype):
        leaf = jax.random.key_data(leaf)
    return jnp.ravel(jax.lax.stop_gradient(leaf))[:0].astype(bool)
