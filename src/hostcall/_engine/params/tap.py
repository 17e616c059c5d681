"""The parameters of a tap's equation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hostcall import _native
from hostcall._core.arguments import conflict
from hostcall._engine.params.equation import Equation

WhenFull = Literal["block", "drop_newest", "drop_oldest"]
Rows = Literal["batched", "each"]
Remat = Literal["once", "repeat"]
On = Literal["once", "process", "shards"]


@dataclass(frozen=True, kw_only=True, repr=False)
class TapParams(Equation):
    """The parameters of one equation of the tap primitive.

    Attributes:
        order: "unordered" or "ordered"; "pure" if the value passes through the tap
            (`hc.tap_through`).
        rows: under vmap, "batched" delivers the batch at once, "each" row by row.
        when_full, remat, every, sample, batch: as given to `hc.tap`.
        on: as given to `hc.tap`; "once" if that was a device.
        always: whether the last operand is the flag `always`, one bool for all rows.
        through: whether the equation returns its arguments.
        device: the device that taps a whole value in a program that is partitioned over
            devices; None for the program's first device.
        flags: with rows="batched", for each vmap in the order of application (the
            innermost first), whether each operand has its axis. The axis of a later
            vmap comes first in the operands.
        sizes: the size of each vmap in `flags`.
    """

    rows: Rows = "batched"
    when_full: WhenFull = "block"
    remat: Remat = "once"
    on: On = "once"
    every: int | float | None = None
    sample: float | None = None
    batch: int | None = None
    always: bool = False
    through: bool = False
    device: Any = None
    flags: tuple[tuple[bool, ...], ...] = ()
    sizes: tuple[int, ...] = ()

    is_tap = True

    @property
    def levels(self) -> int:
        return len(self.flags)

    @property
    def transforms(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        dims = [
            tuple(0 if flag else None for flag in self.arguments(flags))
            for flags in self.flags
        ]
        return tuple(("batch", {"batch_dims": each}) for each in dims)

    def settings(
        self,
        only: tuple[int, ...] = (),
        nested: bool = False,
        linked: bool = False,
        in_program: bool = True,
    ) -> _native.TapSettings:
        """The part of a native plan that describes a tap (native/plan/plan.h).

        Args:
            only: the ordinals of the devices that tap; empty for all.
            nested: whether host code runs the program, inside another callback.
            linked: whether the tap has a result that only says that it ran.
            in_program: whether the engine's handler gets the operands, and so the flag
                `always`; else Python reads the flag.
        """
        every = self.every
        return _native.TapSettings(
            when_full=_native.WhenFull[self.when_full.upper()],
            nested=nested,
            only=only,
            linked=linked,
            through=self.through,
            every_steps=every if isinstance(every, int) else 0,
            every_ns=int(every * 1e9) if isinstance(every, float) else 0,
            sample=1.0 if self.sample is None else self.sample,
            always=self.always and in_program,
            batch=self.batch or 0,
        )

    def arguments(self, operands: Any) -> Any:
        """The operands without the mask, which is first, and the flag, which is last.

        `operands` may be anything that is said of each operand.
        """
        return operands[int(self.masked) : len(operands) - self.always]

    def mask(self, operands: Any) -> Any:
        """Only the mask, if there is one."""
        return operands[: int(self.masked)]

    def read(self, operands: Sequence[Any]) -> Sequence[Any]:
        # The engine reads the flag `always`, and never queues it.
        return operands[:-1] if self.always else operands

    def compresses(self, operands: Sequence[Any]) -> bool:
        compressed = super().compresses(operands)
        if compressed and self.batch is not None:  # one delivery, without some rows
            raise conflict(
                f"the tap `{self.callback.name}`",
                "batch= and a where= that differs between the rows of a vmap, so its"
                " taps differ in size. Pass the mask as an argument instead of where=,"
                " or leave out batch=",
            )
        return compressed

    def axes(self) -> list[tuple[tuple[bool, ...], int]]:
        return list(zip(self.flags, self.sizes, strict=True))[::-1]

    def form(self) -> _native.ResultForm:
        return _native.ResultForm.IGNORED

    def _details(self) -> list[str]:
        parts = super()._details()
        if self.always:
            parts.append("always")
        if self.grid or self.sizes:
            parts.append(f"{self.rows}={self.grid or self.sizes}")
        return parts
