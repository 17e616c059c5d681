"""What the equations of all kinds of calls and taps have in common.

An equation holds the user's function and its trees, and answers what lowering and
`make_plan` (_engine/plans.py) ask. All are hashable. Equal ones trace to equal
programs, so JAX's caches hit. Whatever belongs to one call site of one compiled program
is in `CallInfo` (_engine/info.py) instead.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from hostcall import _jax, _native
from hostcall._core.coroutines import is_coroutine_function
from hostcall._core.order import Order
from hostcall._core.source import Place, name_of, source_of
from hostcall._core.spec import Results, Static, Template

# "free" is for drop-ins: jax.Arrays that are not committed to a device.
Arrays = Literal["numpy", "jax", "free", "dlpack", "cuda"]
Fail = Literal["together", "alone"]
Lend = Literal[False, True, "out", "buffers"]


_WAIT = 0.002  # seconds that a call waits for others without `wait=`


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a function is run, wherever it is called (`hc.host`).

    Attributes:
        timeout: the limit in seconds, or None.
        executor: runs the rows of a parallel call; see _runtime/executors.py.
        concurrency: how many calls of a coroutine function wait at the same time, or
            None for the default.
        coalesce: (the most calls that are merged, seconds that one waits), or None.
        cache: where results are kept, a `Part` of _engine/caching.py; or None. It is
            not compared: it belongs to the function.
        owner: the HostFunction that has it, or None.
    """

    timeout: float | None = None
    executor: Static | None = None
    concurrency: int | None = None
    coalesce: tuple[int, float] | None = None
    cache: Any = field(default=None, compare=False)
    owner: Any = field(default=None, compare=False)

    @classmethod
    def of(cls, options: Mapping[str, Any], owner: Any = None) -> Policy:
        """The policy in options as `hc.host` takes them."""
        given = {
            each: options.get(each) for each in ("timeout", "concurrency", "cache")
        }
        executor, coalesce = options.get("executor"), options.get("coalesce")
        merged, wait = None, options.get("wait")
        if coalesce is not None:
            merged = coalesce, float(_WAIT if wait is None else wait)
        pool = None if executor is None else Static(executor)
        return cls(executor=pool, coalesce=merged, owner=owner, **given)

    @property
    def pool(self) -> Any:
        """The executor of its rows; None for the default."""
        return None if self.executor is None else self.executor.value


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
        policy: how the function is run.
        fail: as given to `hc.call`.
        tag: the name in statistics, `status()` and collectors; None for the function's
            name.
        traced: the settings of JAX under which it was traced, so that the function
            runs under them on any thread; None if they were the process's own.
        place: the user's line that wrote the call. It is not compared, so equal calls
            on two lines trace to equal programs.
    """

    fn: Static
    template: Template
    results: Results
    fills: tuple[bytes | None, ...]
    arrays: Arrays = "numpy"
    lend: Lend = False
    policy: Policy = Policy()
    fail: Fail | None = None
    tag: str | None = None
    traced: _jax.Traced | None = field(default_factory=_jax.traced_here)
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
        """Under which name its calls are counted; see `costs`."""
        return self.tag or source_of(self.function)

    def described(self) -> str:
        return f"`{self.name}`, called at {self.place}"

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True, repr=False)
class Equation(abc.ABC):
    """The parameters of one equation of a primitive of hostcall's.

    Attributes:
        callback: the user's function with its trees.
        order: as given to `hc.call` or `hc.tap`.
        masked: whether the first operand is the mask `where`.
        grid: the sizes of the batch axes that rows run over, outermost first.
        batched: for each operand, whether it has each of these axes.
        avals: the avals of one row's results.
        vmap_method: as given to `hc.call`.
        sharding: a sharding on the device that makes the call; None for the first.
        keep: of hc.watch: how many executions are kept.
        devices: of a sharded feed: the ordinals of the devices, in the order of the
            ring's lanes; empty if all devices take from one lane.
    """

    callback: Callback
    order: Order
    masked: bool
    grid: tuple[int, ...] = ()
    batched: tuple[tuple[bool, ...], ...] = ()
    avals: tuple[Any, ...] = ()
    vmap_method: Any = None
    sharding: Any = None
    keep: int | None = None
    devices: tuple[int, ...] = ()

    # --- What a kind may answer in another way. Some have a field for it. -------------

    is_tap = False
    literals = True  # whether the function may return Python numbers for 32-bit arrays

    @property
    def out_avals(self) -> list[Any]:
        """The avals of the equation's results."""
        return [a.update(shape=self.grid + a.shape) for a in self.avals]

    @property
    def levels(self) -> int:
        """The number of leading batch axes that the function itself sees."""
        return 0

    @property
    def transforms(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        """JAX's transformations that the function sees, in order of application."""
        return ()

    @property
    def runs_where_dispatched(self) -> bool:
        """Whether a program with this call runs on the thread that dispatches it."""
        return self.order != "pure" and not self.is_tap

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

    def read(self, operands: Sequence[Any]) -> Sequence[Any]:
        """The operands that Python reads: the mask, if any, and the arguments."""
        return operands

    def seen(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        """The function, after those that see its arguments first."""
        return whole

    @abc.abstractmethod
    def finish(
        self, whole: Callable[..., Any], info: Any, compressed: bool
    ) -> tuple[Callable[..., Any], _native.ResultForm]:
        """The function that the engine calls, and the form of what it returns.

        Args:
            whole: the user's function, of one array per leaf.
            info: the `CallInfo`.
            compressed: whether `whole` gets a batch without the rows that `where`
                drops.
        """

    def compresses(self, operands: Sequence[Any]) -> bool:
        """Whether the function gets a batch without the rows that `where` drops."""
        return self.masked and self.levels > 0 and operands[0].ndim > len(self.grid)

    def __repr__(self) -> str:
        return f"<{' '.join([self.callback.name, self.order, *self._details()])}>"

    def _details(self) -> list[str]:
        return ["where"] if self.masked else []
