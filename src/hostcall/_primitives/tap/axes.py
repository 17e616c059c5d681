"""The batch axes of a tap's operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hostcall._engine.params.tap import TapParams


def with_axis(params: TapParams, flags: Sequence[bool], size: int) -> TapParams:
    """The parameters under one more vmap; its axis is first in the flagged operands."""
    if params.rows == "each":
        before = params.batched or ((),) * len(flags)
        batched = tuple((f, *b) for f, b in zip(flags, before, strict=True))
        return replace(params, grid=(size, *params.grid), batched=batched)
    return replace(
        params, flags=(*params.flags, tuple(flags)), sizes=(*params.sizes, size)
    )
