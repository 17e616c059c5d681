"""The equation of a tap, and the hooks for its deliveries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Self

import numpy as np

from hostcall import _native
from hostcall._core import failures
from hostcall._core.errors import conflict
from hostcall._core.options import TapOptions, WhenFull
from hostcall._engine import targets
from hostcall._engine.hooks import CallHooks
from hostcall._engine.params.equation import Equation, Transforms
from hostcall._engine.placement import Placement
from hostcall._jax.types import Aval, Mesh
from hostcall._runtime import delivery

_BATCHED = (
    "hostcall: under vmap this tap gets the values of all rows at once, with the batch"
    ' in front. For one call per row write hc.tap(..., rows="each")'
)


_TOGETHER = (
    "hostcall: with batch= this tap gets the values of several executions at once,"
    " along a new axis in front. For one call each leave out batch="
)


# A plan copies its kind, so one is enough for all plans. Eager taps ask each time. By
# type too: 2 are executions, and 2.0 seconds.
@lru_cache(maxsize=256, typed=True)
def _kind(
    when_full: WhenFull,
    every: int | float | None,
    sample: float | None,
    batch: int | None,
    *,
    nested: bool,
    only: tuple[int, ...],
    linked: bool,
    through: bool,
    always: bool,
) -> _native.TapKind:
    """What the engine does with a tap of these options in such a place."""
    # For the engine, 0 is "not thinned".
    every_steps = every if isinstance(every, int) else 0
    every_ns = int(every * 1e9) if isinstance(every, float) else 0
    return _native.TapKind(
        when_full=_native.WhenFull[when_full.upper()],
        every_steps=every_steps,
        every_ns=every_ns,
        sample=1.0 if sample is None else sample,
        batch=batch or 0,
        nested=nested,
        only=only,
        linked=linked,
        through=through,
        always=always,
    )


class DeliveryHooks(CallHooks):
    """The hooks of a tap's deliveries."""

    equation: TapParams

    def __init__(self, equation: Equation, placement: Placement) -> None:
        super().__init__(equation, placement)
        delivery.start()

    def on_error(self, error: BaseException, row: tuple[int, ...]) -> str:
        """Logs the failure and keeps it for the next barrier(); the program goes on."""
        if issubclass(type(error), (TypeError, ValueError)):
            if self.equation.transforms:
                failures.add_note(error, _BATCHED)
            if self.equation.options.batch:
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

    always: bool = False
    through: bool = False
    flags: tuple[tuple[bool, ...], ...] = ()
    sizes: tuple[int, ...] = ()

    takes: ClassVar[type[TapOptions]] = TapOptions
    hooks = DeliveryHooks
    name = "tap"
    word = "tap"
    participle = "tapped"
    ignores_results = True
    target = targets.TAP_TARGET
    keep_if_pure = True

    @cached_property
    def options(self) -> TapOptions:
        options = self.callback.options
        assert isinstance(options, TapOptions), "a tap's place has options of a tap"
        return options

    @cached_property
    def is_stateful(self) -> bool:  # type: ignore[override]
        return self.options.thinned or self.options.batch is not None

    @property
    def levels(self) -> int:  # type: ignore[override]
        return len(self.flags)

    @property
    def python_operands(self) -> slice:  # type: ignore[override]
        return slice(-1 if self.always else None)

    def native_kind(self, placement: Placement) -> _native.TapKind:
        options = self.options
        return _kind(
            options.when_full,
            options.every,
            options.sample,
            options.batch,
            nested=placement.nested,
            only=placement.only,
            linked=placement.linked,
            through=self.through,
            # Outside of the engine's programs, Python reads the flag.
            always=self.always and -1 not in placement.devices,
        )

    def blocks_of_whole(
        self, devices: Iterable[int], mesh: Mesh | None, avals: Sequence[Aval]
    ) -> dict[int, tuple[Any, ...]] | None:
        if not self.options.in_blocks or mesh is not None or not avals:
            return None
        shapes = [aval.shape for aval in self.arguments(avals)]
        block = tuple(tuple(slice(0, size) for size in shape) for shape in shapes)
        return dict.fromkeys(devices, block)

    @property
    def shown(self) -> str:
        return f"the tap `{self.callback.name}`"

    @property
    def transforms(self) -> Transforms:  # type: ignore[override]
        transforms: list[tuple[str, dict[str, Any]]] = []
        for flags in self.flags:
            dims = tuple(0 if flag else None for flag in self.arguments(flags))
            transforms.append(("batch", {"batch_dims": dims}))
        return tuple(transforms)

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
            inner = self.batched or ((),) * len(flags)
            batched = tuple(
                (flag, *axes) for flag, axes in zip(flags, inner, strict=True)
            )
            return replace(self, grid=(size, *self.grid), batched=batched)
        return replace(
            self, flags=(*self.flags, tuple(flags)), sizes=(*self.sizes, size)
        )

    def with_mask(self) -> Self:
        flags = tuple((False, *flags) for flags in self.flags)
        return replace(super().with_mask(), flags=flags)

    def _details(self) -> list[str]:
        details = super()._details()
        if self.always:
            details.append("always")
        if self.grid or self.sizes:
            details.append(f"{self.options.rows}={self.grid or self.sizes}")
        return details
