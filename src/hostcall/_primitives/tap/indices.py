"""Where a block lies in the whole array: a slice for each axis, with both ends."""

from __future__ import annotations

from typing import Any


def whole(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def block_index(index: Any, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The index with both ends of each slice, which JAX omits at the array's ends."""
    return tuple(
        slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True)
    )
