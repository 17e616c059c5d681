"""What a tap's equation carries, and what the engine asks of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hostcall._core.order import Order
from hostcall._engine.params.call import Callback

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
        """What the native plan is told (native/bindings/tap_bindings.cc).

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

    def __repr__(self) -> str:
        parts = [self.callback.name, self.order]
        if self.masked:
            parts.append("where")
        if self.grid or self.sizes:
            parts.append(f"{self.rows}={self.grid or self.sizes}")
        return f"<{' '.join(parts)}>"
