"""The equation of a tap, and the hooks for its deliveries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np

from hostcall import _native
from hostcall._core import failures
from hostcall._core.errors import conflict
from hostcall._core.options import HERE, TapOptions
from hostcall._engine import targets
from hostcall._engine.info import CallInfo
from hostcall._engine.params.equation import Equation, Transforms
from hostcall._jax.types import Aval, Device, Mesh
from hostcall._runtime import delivery

_BATCHED = (
    "hostcall: under vmap this tap gets the values of all rows at once, with the batch"
    ' in front. For one call per row write hc.tap(..., rows="each")'
)


_TOGETHER = (
    "hostcall: with batch= this tap gets the values of several executions at once,"
    " along a new axis in front. For one call each leave out batch="
)


class TapInfo(CallInfo):
    """The description of one tap, with the hooks that native code calls."""

    tap: _native.TapSettings

    def __init__(
        self,
        params: TapParams,
        devices: dict[int, Device],
        mesh: Mesh | None,
        avals: Sequence[Aval] = (),
        only: Sequence[int] = (),
        nested: bool = False,
        linked: bool = False,
    ) -> None:
        """As `CallInfo`; see native/plan/plan.h.

        `linked`: whether the tap has a result that only says that it ran.
        """
        super().__init__(params, devices, mesh)
        delivery.start()
        if params.options.in_blocks and mesh is None and avals:
            whole = (a.shape for a in params.arguments(avals))
            place = tuple(tuple(slice(0, n) for n in shape) for shape in whole)
            self.places = dict.fromkeys(devices, place)
        self.tap = _native.TapSettings(
            **params.options.native,
            nested=nested,
            only=only,
            linked=linked,
            through=params.through,
            # Outside of the engine's programs, Python reads the flag.
            always=params.always and -1 not in devices,
        )

    def on_error(self, error: BaseException, _: object, row: tuple[int, ...]) -> str:
        """Logs the failure and keeps it for the next barrier(); the program goes on."""
        if issubclass(type(error), (TypeError, ValueError)):
            if self.params.transforms:
                failures.add_note(error, _BATCHED)
            if self.params.options.batch:
                failures.add_note(error, _TOGETHER)
        delivery.failed(self.name, self.place, error, row)
        return ""


@dataclass(frozen=True, kw_only=True, repr=False)
class TapParams(Equation):
    """The parameters of one equation of the tap primitive.

    Attributes:
        always: whether the last operand is the flag `always`, one bool for all rows.
        through: whether the equation returns its arguments.
        flags: with rows="batched", for each vmap in the order of application (the
            innermost first), whether each operand has its axis. The axis of a later
            vmap comes first in the operands.
        sizes: the size of each vmap in `flags`.
    """

    options: TapOptions = field(init=False, compare=False, metadata=HERE)
    always: bool = False
    through: bool = False
    flags: tuple[tuple[bool, ...], ...] = ()
    sizes: tuple[int, ...] = ()

    takes: ClassVar[type[TapOptions]] = TapOptions
    info = TapInfo
    name = "tap"
    word = "tap"
    delivers = True
    target = targets.TAP_TARGET
    kept = True

    def __post_init__(self) -> None:
        super().__post_init__()
        how = self.options
        vars(self).update(
            counts=how.thinned or how.batch is not None,
            levels=len(self.flags),
            read=slice(-1 if self.always else None),
        )

    @property
    def shown(self) -> str:
        return f"the tap `{self.callback.name}`"

    @property
    def transforms(self) -> Transforms:  # type: ignore[override]
        dims = [
            tuple(0 if flag else None for flag in self.arguments(flags))
            for flags in self.flags
        ]
        return tuple(("batch", {"batch_dims": each}) for each in dims)

    def compresses(self, mask: Any) -> bool:
        compressed = super().compresses(mask)
        # It would be one delivery, without some rows.
        if compressed and self.options.batch is not None:
            raise conflict(
                self.shown,
                "batch= and a where= that differs between the rows of a vmap, so its"
                " taps differ in size. Pass the mask as an argument instead of where=,"
                " or leave out batch=",
            )
        return compressed

    @property
    def axes(self) -> list[tuple[tuple[bool, ...], int]]:  # type: ignore[override]
        return list(zip(self.flags, self.sizes, strict=True))[::-1]

    def flag_of(self, operands: Sequence[np.ndarray]) -> bool:
        """The flag `always` of operands on the host; False if there is none."""
        return self.always and bool(np.asarray(operands[-1]))

    # --- Under vmap ------------------------------------------------------------------

    def with_axis(self, flags: Sequence[bool], size: int) -> Self:
        """The same under one more vmap; its axis is first in the flagged operands."""
        if self.options.rows == "each":
            before = self.batched or ((),) * len(flags)
            new = tuple((f, *b) for f, b in zip(flags, before, strict=True))
            return replace(self, grid=(size, *self.grid), batched=new)
        return replace(
            self, flags=(*self.flags, tuple(flags)), sizes=(*self.sizes, size)
        )

    def with_mask(self) -> Self:
        flags = tuple((False, *flags) for flags in self.flags)
        return replace(super().with_mask(), flags=flags)

    def _details(self) -> list[str]:
        parts = super()._details()
        if self.always:
            parts.append("always")
        if self.grid or self.sizes:
            parts.append(f"{self.options.rows}={self.grid or self.sizes}")
        return parts
