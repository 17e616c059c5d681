"""What a tap's equation carries, and what the engine asks of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from hostcall import _collectors, _context, _tap_failures
from hostcall._callback import Callback, CallInfo
from hostcall._order import Order

WhenFull = Literal["block", "drop_newest", "drop_oldest"]
Rows = Literal["batched", "each"]
Remat = Literal["once", "repeat"]
Sharding = Literal["whole", "shards"]
WHEN_FULL: tuple[WhenFull, ...] = ("block", "drop_newest", "drop_oldest")


@dataclass(frozen=True)
class TapParams:
    """The parameters of one equation of the tap primitive.

    Attributes:
        callback: the function with its trees; it has no results.
        order: "unordered" or "ordered"; "pure" for one whose value is threaded.
        masked: the first operand is `where`.
        rows: under vmap, one delivery of the batch or one a row.
        when_full, remat, sharding, name, every, sample: as given to `hc.tap`.
        through: the arguments are results too.
        leader: in a program that is split over devices, the number of the one that
            taps a whole value; None for this process's first.
        grid: sizes of the batch axes that rows run over, outermost first.
        batched: for each operand, whether it has each of those axes.
        flags: of rows="batched", for each vmap in the order they were applied (the
            inner first), whether each operand has its axis. A later one's axis is
            in front.
        sizes: of those axes.
    """

    callback: Callback
    order: Order
    masked: bool
    rows: Rows
    when_full: WhenFull
    remat: Remat
    sharding: Sharding
    name: str | None
    every: int | float | None
    sample: float | None
    through: bool = False
    leader: int | None = None
    grid: tuple[int, ...] = ()
    batched: tuple[tuple[bool, ...], ...] = ()
    flags: tuple[tuple[bool, ...], ...] = ()
    sizes: tuple[int, ...] = ()

    # What the engine's plan asks of any call (_targets.make_plan).
    avals = ()
    vmap_method = "sequential"
    runs_where_dispatched = is_jaxs_own = False

    @property
    def levels(self) -> int:
        return len(self.flags)

    @property
    def transforms(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        """What JAX has made of the tap, in the order it did."""
        first = 1 if self.masked else 0
        return tuple(
            ("batch", {"batch_dims": tuple(0 if f else None for f in flags[first:])})
            for flags in self.flags
        )

    def settings(
        self, only: tuple[int, ...] = (), nested: bool = False, linked: bool = False
    ) -> tuple[Any, ...]:
        """What the native plan is told (native/tap_bindings.cc).

        Args:
            only: ordinals of the devices that tap; empty for all.
            nested: the program is one that host code runs.
            linked: the tap has a result that only says that it ran.
        """
        steps, seconds = 0, 0.0
        if isinstance(self.every, int):
            steps = self.every
        elif self.every is not None:
            seconds = self.every
        return (
            WHEN_FULL.index(self.when_full),
            nested,
            only,
            self.through,
            steps,
            int(seconds * 1e9),
            1.0 if self.sample is None else self.sample,
            linked,
        )

    def function(
        self,
        whole: Callable[..., Any],
        converters: Sequence[Callable[[Any], Any] | None] | None,
    ) -> Callable[..., Any]:
        """What the engine calls with one array a leaf.

        Args:
            whole: the user's function, taking one array a leaf.
            converters: of the leaves, where the mask differs between rows of a batch
                that is delivered whole; else None.
        """
        if self.name is not None:
            whole = _collectors.seen_by(self.name, self.callback.template, whole)
        if converters is None:
            return whole
        return CompressedTap(self, whole, converters)

    def __repr__(self) -> str:
        parts = [self.callback.name, self.order]
        if self.masked:
            parts.append("where")
        if self.grid or self.sizes:
            parts.append(f"{self.rows}={self.grid or self.sizes}")
        return f"<{' '.join(parts)}>"


class TapInfo(CallInfo):
    """One tap's description, with the hooks that native code calls.

    `places`: of a tap of shards, for each device ordinal the global index of each
    array's block.
    """

    places: dict[int, tuple[Any, ...]] | None = None

    def on_error(self, error: BaseException, _: Any, row: tuple[int, ...]) -> str:
        """The computation goes on: the log says it, and the next barrier() raises."""
        _tap_failures.failed(self.name, self.place, error, row)
        return ""

    def __repr__(self) -> str:
        return f"<tap of {self.name} at {self.place}>"


class CompressedTap:
    """A batch whose mask differs between rows: the False rows are taken out.

    Called with (mask, *arrays). What has a batch axis arrives with one axis in front,
    the rows that are left in row order; what has none arrives as it is.
    """

    def __init__(
        self,
        params: TapParams,
        whole: Callable[..., Any],
        converters: Sequence[Callable[[Any], Any] | None],
    ) -> None:
        self._params = params
        self._whole = whole
        self._converters = converters

    def __call__(self, mask: np.ndarray, *arrays: np.ndarray) -> None:
        rows = np.nonzero(self._full(0, mask))
        if not len(rows[0]):
            return
        leaves = []
        for i, (array, convert) in enumerate(
            zip(arrays, self._converters, strict=True), start=1
        ):
            if any(flags[i] for flags in self._params.flags):
                array = self._full(i, array)[rows]
            leaves.append(array if convert is None else convert(array))
        with _context.only_rows(rows):
            self._whole(*leaves)

    def _full(self, number: int, array: np.ndarray) -> np.ndarray:
        """With all batch axes, the outermost first."""
        params = self._params
        levels = list(zip(params.flags, params.sizes, strict=True))[::-1]
        has = [flags[number] for flags, _ in levels]
        rest = array.shape[sum(has) :]
        lead = tuple(size if f else 1 for f, (_, size) in zip(has, levels, strict=True))
        batch = tuple(size for _, size in levels)
        return np.broadcast_to(array.reshape(lead + rest), batch + rest)


def with_axis(params: TapParams, flags: Sequence[bool], size: int) -> TapParams:
    """Under one more vmap, whose axis is in front of the flagged operands."""
    if params.rows == "each":
        before = params.batched or ((),) * len(flags)
        batched = tuple((f, *b) for f, b in zip(flags, before, strict=True))
        return replace(params, grid=(size, *params.grid), batched=batched)
    return replace(
        params, flags=(*params.flags, tuple(flags)), sizes=(*params.sizes, size)
    )
