"""The user's function, with how it gets its arguments and how it is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from hostcall import _jax
from hostcall._core.coroutines import is_coroutine_function
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
        executor: runs the rows of a parallel call; see _policies/executors.py.
        concurrency: how many calls of a coroutine function wait at the same time, or
            None for the default.
        coalesce: (the most calls that are merged, seconds that one waits), or None.
        cache: where results are kept, a `Part` of _policies/stores.py; or None. It is
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
