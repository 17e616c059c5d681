"""Functions that prepare a row on the calling thread, and finish it there.

`HostCode.split` returns what to run elsewhere (on an executor, on the event loop), the
arguments for that, and a function that turns its value into the result on the calling
thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hostcall._core.host_code import own

Row = tuple[tuple[Any, ...], dict[str, Any]]


def same(value: Any) -> Any:
    """Finishes a row whose value is its result."""
    return value


def split(
    fn: Callable[..., Any], rows: list[Row]
) -> tuple[Callable[..., Any], list[Row], list[Callable[[Any], Any]]]:
    """The function and rows to run elsewhere, and for each row what finishes it."""
    mine = own(fn)
    split = []
    for row in rows:
        steps = None if mine is None else mine.split(*row)
        if steps is None:
            break
        split.append(steps)
    if not split:
        return fn, rows, [same] * len(rows)
    there: list[Row] = [((part, *args), {}) for part, args, _ in split]
    return apply, there, [finish for *_, finish in split]


def apply(part: Callable[..., Any], *args: Any) -> Any:
    return part(*args)
