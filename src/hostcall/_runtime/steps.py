"""Functions that prepare a row on the calling thread, and finish it there.

A function may have a method `hostcall_steps(*args, **kwargs)`. It returns what to run
elsewhere (on an executor, on the event loop), the arguments for that, and a function
that turns its value into the result on the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = tuple[tuple[Any, ...], dict[str, Any]]


def same(value: Any) -> Any:
    """Finishes a row whose value is its result."""
    return value


def split(
    fn: Callable[..., Any], rows: list[Row]
) -> tuple[Callable[..., Any], list[Row], list[Callable[[Any], Any]]]:
    """The function and rows to run elsewhere, and for each row what finishes it."""
    steps = getattr(fn, "hostcall_steps", None)
    if steps is None:
        return fn, rows, [same] * len(rows)
    split = [steps(*args, **kwargs) for args, kwargs in rows]
    there: list[Row] = [((part, *args), {}) for part, args, _ in split]
    return apply, there, [finish for *_, finish in split]


def apply(part: Callable[..., Any], *args: Any) -> Any:
    return part(*args)
