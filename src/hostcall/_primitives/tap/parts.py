"""The part of a sharded value that the devices of one process hold together.

A tap with on="process" delivers this part, once in each process. XLA has no words for
it, but it can cut a value into equal tiles and give several devices the same tile. So
the tap asks for the sharding whose tiles are the parts of the processes. The compiler
then gathers each part among the devices of its process, and no data leave the process.
One device a process needs no gathering at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hostcall import _jax
from hostcall._core.errors import SpecError
from hostcall._engine.params.tap import TapParams
from hostcall._primitives.blocks import Regroup

Box = tuple[tuple[int, int], ...]  # (start, stop) along each axis


# --- Where a block lies in the whole array: a slice for each axis, with both ends -----


def whole(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def block_index(index: Any, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The index with both ends of each slice, which JAX omits at the array's ends."""
    return tuple(
        slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True)
    )


# --- The parts of processes -----------------------------------------------------------


def grouping(params: TapParams) -> Regroup:
    """Chooses, for each operand of a tap, the sharding whose blocks are the parts."""

    def regroup(sharding: Any, shape: Sequence[int], number: int) -> Any:
        devices = _jax.devices_of(sharding)
        if 0 in shape:  # no block lies apart from another
            return _jax.tiled(sharding, [], [])
        indices = dict(sharding.devices_indices_map(tuple(shape)))
        blocks = [_box(indices[device], shape) for device in devices]
        owners: dict[Box, list[int]] = {}
        for process in sorted({device.process_index for device in devices}):
            here = [n for n, d in enumerate(devices) if d.process_index == process]
            part = hull({blocks[n] for n in here})
            if part is None:
                raise _apart(params, number, shape, process, [blocks[n] for n in here])
            owners.setdefault(part, []).extend(here)
        if len(owners) == 1:
            return _jax.tiled(sharding, [], [])
        tiles = grid(owners, shape)
        if tiles is None:
            raise _unequal(params, number, shape, owners)
        return _jax.tiled(sharding, tiles, [owners[box] for box in sorted(owners)])

    return regroup


def hull(blocks: set[Box]) -> Box | None:
    """The one block that these blocks make together; None if they make none."""
    sizes = [math.prod(stop - start for start, stop in block) for block in blocks]
    whole = tuple(
        (min(start for start, _ in ends), max(stop for _, stop in ends))
        for ends in zip(*blocks, strict=True)
    )
    size = math.prod(stop - start for start, stop in whole)
    return whole if size == sum(sizes) or len(blocks) == 1 else None


def grid(owners: Mapping[Box, Sequence[int]], shape: Sequence[int]) -> list[int] | None:
    """How many parts lie along each axis; None if they do not tile the value evenly.

    XLA's tiles are equal, and each is on equally many devices.
    """
    sizes = {tuple(stop - start for start, stop in box) for box in owners}
    if len(sizes) > 1 or len({len(devices) for devices in owners.values()}) > 1:
        return None
    (size,) = sizes
    if any(
        start % n for box in owners for (start, _), n in zip(box, size, strict=True)
    ):
        return None
    tiles = [whole // n for whole, n in zip(shape, size, strict=True)]
    return tiles if math.prod(tiles) == len(owners) else None


def assembled(shards: Sequence[Any], shape: Sequence[int]) -> tuple[Any, Any] | None:
    """(array, index) of the part of an array that this process's shards make.

    None if they make no single block.
    """
    blocks = {_box(shard.index, shape): shard.data for shard in shards}
    whole = hull(set(blocks))
    if whole is None:
        return None
    begin = [start for start, _ in whole]
    out = np.empty([stop - start for start, stop in whole], shards[0].data.dtype)
    for block, data in blocks.items():
        at = tuple(
            slice(start - first, stop - first)
            for (start, stop), first in zip(block, begin, strict=True)
        )
        out[at] = _jax.to_numpy(data)
    return out, tuple(slice(*ends) for ends in whole)


def _box(index: Any, shape: Sequence[int]) -> Box:
    parts = block_index(index, tuple(shape))
    return tuple((part.start, part.stop) for part in parts)


# --- What can go wrong ----------------------------------------------------------------


def _name(params: TapParams, number: int) -> str:
    """How messages call an operand."""
    first = int(params.masked)
    if number < first:
        return "where="
    paths = params.callback.template.paths()
    return paths[number - first] if number - first < len(paths) else "always="


def apart_text(params: TapParams, number: int, shape: Any, process: int) -> str:
    return (
        f"hostcall: the tap `{params.callback.name}` has on='process', but the blocks"
        f" of {_name(params, number)}, of shape {list(shape)}, that process {process}"
        " holds do not make one array"
    )


INSTEAD = (
    " Use on='shards' to tap each device's block, or a mesh in which each process's"
    " devices are neighbours along the sharded axes (jax.devices() in their own order"
    " is one for an axis that is sharded alone), or give the value a sharding over"
    " processes alone (jax.lax.with_sharding_constraint)"
)


def _apart(
    params: TapParams,
    number: int,
    shape: Sequence[int],
    process: int,
    blocks: Sequence[Box],
) -> Exception:
    said = ", ".join(map(_said, sorted(set(blocks))[:4]))
    return SpecError(
        f"{apart_text(params, number, shape, process)}: {said}.{INSTEAD}",
        code="hc-device",
    )


def _unequal(
    params: TapParams, number: int, shape: Sequence[int], owners: Mapping[Box, Any]
) -> Exception:
    said = ", ".join(map(_said, sorted(owners)[:4]))
    return SpecError(
        f"hostcall: the tap `{params.callback.name}` has on='process', but the parts of"
        f" {_name(params, number)}, of shape {list(shape)}, that the processes hold are"
        f" no even division of it: {said}.{INSTEAD}",
        code="hc-device",
    )


def _said(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
