"""The batch axis of the operands of a batching rule."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from hostcall import _jax

Operands = Sequence[jax.Array]
Dims = Sequence[int | None]  # for each operand the index of its batch axis, if any
# What a batching rule returns: the results, and for each its batch axis.
Batched = tuple[Sequence[jax.Array], Sequence[int | None]]


def size_of(operands: Operands, dims: Dims) -> int:
    """The number of rows; symbolic in an export with symbolic shapes."""
    (size,) = {x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None}
    return size  # type: ignore[no-any-return]


def in_front(operands: Operands, dims: Dims) -> list[jax.Array]:
    """The operands with their batch axes moved to the front."""
    return [
        x if d is None else _jax.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
    ]
