"""What the runs of a function share, wherever its rows run.

`limit.run_with_timeout`, `rows.run_rows` and `tasks.run_tasks` run rows on other
threads than that of the call, which waits for them. Each takes a `Bound`, the rows, and
what answers `hc.current()` in each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from hostcall import _native
from hostcall._core.dlpack import DLPackArray
from hostcall._core.errors import CallTimeoutError
from hostcall._core.host_code import own
from hostcall._core.source import name_of
from hostcall._runtime import flights
from hostcall._runtime.workers import Settings

Row = tuple[tuple[Any, ...], dict[str, Any]]  # its args and kwargs
Current = Callable[[int], Any]  # what `hc.current()` answers in a row, by its number


class Bound(NamedTuple):
    """A function, and what all its runs share.

    Attributes:
        fn: the function.
        settings: the settings of JAX that it runs with.
        timeout: seconds for all rows of a run together, or None.
        name: what messages call it; "" for the function's own name.
    """

    fn: Callable[..., Any]
    settings: Settings
    timeout: float | None = None
    name: str = ""

    def late(self, row: Row, stuck: str) -> CallTimeoutError:
        """The error of a run that takes too long; has the shapes of one of its rows."""
        flights.tell("a call takes longer than its timeout")
        kinds = (np.ndarray, np.generic, jax.Array, DLPackArray)
        arrays = [x for x in jax.tree.leaves(row) if issubclass(type(x), kinds)]
        shapes = ", ".join(f"{a.dtype}{list(a.shape)}" for a in arrays)
        return CallTimeoutError(
            f"hostcall: `{self.name or name_of(self.fn)}`({shapes}) took longer than"
            f" timeout={self.timeout} s; {stuck}"
        )


def place_here() -> int:
    """The number of the place of this thread's call, for traces."""
    call = _native.current()
    return 0 if call is None else call[0].number  # type: ignore[no-any-return]


# --- What of a row runs elsewhere -----------------------------------------------------


def same(value: Any) -> Any:
    """Finishes a row whose value is its result."""
    return value


def apply(part: Callable[..., Any], *args: Any) -> Any:
    return part(*args)


def split(
    fn: Callable[..., Any], rows: Sequence[Row]
) -> tuple[Callable[..., Any], Sequence[Row], list[Callable[[Any], Any]]]:
    """The function and rows to run elsewhere, and for each row what finishes it here.

    See `HostCode.split`; a user's function runs elsewhere as it is.
    """
    mine = own(fn)
    steps = [None if mine is None else mine.split(*row) for row in rows]
    found = [step for step in steps if step is not None]
    if not found:
        return fn, rows, [same] * len(rows)
    there: list[Row] = [((part, *args), {}) for part, args, _ in found]
    return apply, there, [finish for *_, finish in found]
