"""The parameters of a call's equation. They hold the user's function and its trees.

All of them are hashable. Equal callbacks trace to equal programs, so JAX's caches hit.
Whatever belongs to one call site of one compiled program is in `CallInfo`
(_engine/info.py) instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from hostcall import _jax, _native
from hostcall._core.coroutines import is_coroutine_function
from hostcall._core.order import Order
from hostcall._core.source import Place, name_of, source_of
from hostcall._core.spec import Results, Static, Template

logger = logging.getLogger("hostcall")

# "free" is for drop-ins: jax.Arrays that are not committed to a device.
Arrays = Literal["numpy", "jax", "free", "dlpack", "cuda"]
Fail = Literal["together", "alone"]
Lend = Literal[False, True, "out", "buffers"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Callback:
    """A function, how it gets its arguments, and what it returns.

    Attributes:
        fn: the function, compared as `Static` compares.
        template: how to rebuild (args, kwargs) from arrays.
        results: the structure, shapes and dtypes of what it returns.
        fills: for each result, the bytes that a masked row gets, or None for zeros.
        arrays: the kind of array that the function gets.
        lend: whether it gets views of XLA's memory, or Buffers of it.
        timeout: the limit in seconds, or None.
        executor: runs the rows of a parallel call; see _runtime/executors.py.
        concurrency: how many calls of a coroutine function wait at the same time, or
            None for the default.
        coalesce: (the most calls that are merged, seconds that one waits), or None.
        fail: as given to `hc.call`.
        tag: the name in statistics, `status()` and collectors; None for the function's
            name.
        traced: the settings of JAX under which it was traced, so that the function
            runs under them on any thread; None if they were the process's own.
        cache: where results are kept, a `Part` of _engine/caching.py; or None. It is
            not compared: it belongs to the function.
        place: the user's line that wrote the call. It is not compared, so equal calls
            on two lines trace to equal programs.
    """

    fn: Static
    template: Template
    results: Results
    fills: tuple[bytes | None, ...]
    arrays: Arrays = "numpy"
    lend: Lend = False
    timeout: float | None = None
    executor: Static | None = None
    concurrency: int | None = None
    coalesce: tuple[int, float] | None = None
    fail: Fail | None = None
    tag: str | None = None
    traced: _jax.Traced | None = field(default_factory=_jax.traced_here)
    cache: Any = field(default=None, compare=False)
    place: Place = field(compare=False)

    @cached_property
    def function(self) -> Callable[..., Any]:
        return self.fn.value  # type: ignore[no-any-return]

    @cached_property
    def awaits(self) -> bool:
        """Whether the function is a coroutine function."""
        return is_coroutine_function(self.function)

    @cached_property
    def name(self) -> str:
        return name_of(self.function)

    @cached_property
    def counted_as(self) -> str:
        """Under which name its calls are counted; see `counters_of`."""
        return self.tag or source_of(self.function)

    def described(self) -> str:
        return f"`{self.name}`, called at {self.place}"

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, repr=False)
class CallParams:
    """The parameters of one equation of the call primitive.

    Attributes:
        callback: the user's function with its trees.
        avals: the avals of one row's results.
        order, vmap_method: as given to `hc.call`.
        sharding: a sharding on the device that makes the call; None for the program's
            first device.
        masked: whether the first operand is the mask `where`.
        grid: the sizes of the batch axes that rows run over, outermost first.
        batched: for each operand, whether it has each of these axes.
        levels: the number of leading batch axes that the function itself sees.
        results_as: "tree": the function returns the structure of `result`. "leaves": it
            returns the same leaves in any containers. "nothing": its return value is
            ignored.
        keep: of hc.watch: how many executions are kept (`_api.call.call_kept`).
        literals: whether the function may return Python numbers for 32-bit arrays.
    """

    callback: Callback
    avals: tuple[Any, ...]
    order: Order
    vmap_method: Any
    sharding: Any
    masked: bool
    grid: tuple[int, ...] = ()
    batched: tuple[tuple[bool, ...], ...] = ()
    levels: int = 0
    results_as: Literal["tree", "leaves", "nothing"] = "tree"
    literals: bool = True
    keep: int | None = None

    @property
    def out_avals(self) -> list[Any]:
        return [a.update(shape=self.grid + a.shape) for a in self.avals]

    @property
    def runs_where_dispatched(self) -> bool:
        """Whether a program with this call runs on the thread that dispatches it."""
        return self.order != "pure"

    @property
    def is_jaxs_own(self) -> bool:
        """Whether the function is one that JAX itself calls back."""
        return False

    def in_place(self) -> tuple[Callable[..., Any], _native.BufferSettings] | None:
        """(function, settings) of a call that works on XLA's buffers, else None."""
        return None

    def fed(self) -> _native.FeedSettings | None:
        """The ring whose items are the results, for a feed; else None."""
        return None

    def __repr__(self) -> str:
        parts = [self.callback.name, self.order]
        if self.masked:
            parts.append("where")
        if self.grid:
            parts.append(f"rows={self.grid}")
        return f"<{' '.join(parts)}>"


def executor_of(callback: Callback) -> Any:
    return None if callback.executor is None else callback.executor.value
