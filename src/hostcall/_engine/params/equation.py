"""What the equations of all kinds of calls and taps have in common.

An equation holds the user's function and its trees, and answers what lowering and
`make_plan` (_engine/plans.py) ask. All are hashable. Equal ones trace to equal
programs, so JAX's caches hit. Whatever belongs to one call site of one compiled program
is in `CallInfo` (_engine/info.py) instead.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hostcall import _native
from hostcall._core.callback import Callback
from hostcall._core.order import Order


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

    @abc.abstractmethod
    def form(self) -> _native.ResultForm:
        """The form of what the function returns."""

    def axes(self) -> list[tuple[tuple[bool, ...], int]]:
        """For each batch axis that a tap sees, the outermost first: whether each
        operand has it, and its size. Empty for a call, whose function has them all.
        """
        return []

    def compresses(self, operands: Sequence[Any]) -> bool:
        """Whether the function gets a batch without the rows that `where` drops."""
        return self.masked and self.levels > 0 and operands[0].ndim > len(self.grid)

    def __repr__(self) -> str:
        return f"<{' '.join([self.callback.name, self.order, *self._details()])}>"

    def _details(self) -> list[str]:
        return ["where"] if self.masked else []
