"""A tap with on="shards" in a partitioned program: each device taps its own block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import jax
import numpy as np

from hostcall import _jax
from hostcall._core.errors import HostcallError, SpecError, conflict
from hostcall._engine import targets
from hostcall._engine.params.equation import Equation
from hostcall._engine.params.tap import TapParams
from hostcall._engine.placement import Placement
from hostcall._jax.types import Aval, Device, Sharding, Value
from hostcall._primitives.batching import Operands
from hostcall._primitives.blocks import Partitioned, Places, lower_blocks
from hostcall._primitives.eager import first_device
from hostcall._runtime import host_device

# Where a block lies in the whole array: (start, stop) along each axis.
Box = tuple[tuple[int, int], ...]
# (device, the index of each array's block, operands) of one delivery of an eager tap.
Block = tuple[Device, tuple[tuple[slice, ...], ...], Sequence[Any]]


def box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The block of an index as JAX writes it, without ends that are the array's."""
    axes = zip(index, shape, strict=True)
    return tuple(part.indices(size)[:2] for part, size in axes)


def slices(boxes: Sequence[Box]) -> tuple[tuple[slice, ...], ...]:
    """For each array, its block as an index."""
    return tuple(tuple(slice(*ends) for ends in box) for box in boxes)


class TapBlocks(Partitioned):
    """What the parts of a tap share."""

    target = targets.TAP_TARGET

    def __init__(self, program: _jax.Program, params: TapParams) -> None:
        nested = host_device.nesting_level(program.client) > 0
        super().__init__(program, params, nested=nested)

    def of_block(
        self, avals: list[Aval], places: Places
    ) -> tuple[Equation, Placement, list[Aval]]:
        """Among devices that hold identical blocks, only the first taps."""
        devices = self.placement.devices
        ordinals = {device.id: n for n, device in devices.items() if device}
        first: dict[str, tuple[int, Any]] = {}
        for device, boxes in places:
            if device in ordinals:
                first.setdefault(str(boxes), (ordinals[device], slices(boxes)))
        blocks = dict(first.values())
        placement = replace(
            self.placement, only=tuple(blocks), linked=True, blocks=blocks
        )
        return self.params, placement, avals

    def places(
        self,
        everywhere: Sharding,
        shardings: Sequence[Sharding],
        shapes: Sequence[tuple[int, ...]],
    ) -> Places:
        """For each device of the program its id, and for each array (start, stop) of
        each axis of its block.
        """
        maps = [
            dict(sharding.devices_indices_map(shape))
            for sharding, shape in zip(shardings, shapes, strict=True)
        ]
        places = []
        for device in sorted(everywhere.device_set, key=lambda d: d.id):
            arrays = zip(maps, shapes, strict=True)
            boxes = [box(indices[device], shape) for indices, shape in arrays]
            places.append((device.id, tuple(self.params.arguments(boxes))))
        return tuple(places)


# --- The whole tap --------------------------------------------------------------------


def lower(
    program: _jax.Program, operands: Sequence[Value], params: TapParams
) -> list[Value]:
    """The lowering of a tap that delivers blocks."""
    refused = ""
    if params.grid:  # only rows="each" has one
        refused = "rows='each'"
        instead = "rows='batched'"
    elif params.masked and program.ctx.avals_in[0].ndim > 0:
        refused = "a where= that differs between rows"
        instead = "jnp.where on the values"
    if refused:
        raise conflict(
            params.shown,
            f"on='shards' and {refused}. A device has some of the rows"
            f" only, or parts of them: use {instead}, or on='once'",
        )
    return lower_blocks(program, operands, TapBlocks(program, params))


def refuse_through_jax(program: _jax.Program, params: TapParams) -> NoReturn:
    raise HostcallError(
        f"hostcall: {params.shown} has on={params.options.on!r}, and is lowered for"
        f" {', '.join(program.platforms)}, where JAX's callbacks get only the whole"
        " value. Put the tap into a jax.shard_map, where each device taps its own"
        " block, or leave out on=",
        code="hc-device",
    )


def blocks_here(operands: Operands, params: TapParams) -> Iterator[Block]:
    """The deliveries of an eager tap in this process."""
    arrays = [x for x in operands if isinstance(x, jax.Array)]
    sharded = [x for x in arrays if len(x.devices()) > 1]
    if sharded:
        homes = [shard.device for shard in sharded[0].addressable_shards]
    else:
        devices = arrays[0].devices() if arrays else ()  # of any process
        addressable = [d for d in devices if d.process_index == _jax.process_of(d)]
        homes = [first_device(addressable)]
    tapped = set()
    for home in homes:
        blocks = []
        for number, x in enumerate(operands):
            part = _part(x, home if sharded else None)
            if part is None:
                raise _elsewhere(params, number, x.shape, home)
            blocks.append(part)
        place = params.arguments(tuple(box for _, box in blocks))
        # Among devices that hold identical blocks, only the first taps.
        if place not in tapped:
            tapped.add(place)
            yield home, slices(place), [value for value, _ in blocks]


def _part(x: Any, device: Device | None) -> tuple[Any, Box] | None:
    """(array, block) of what a device, or with None this process, holds of an operand;
    None if it holds none.
    """
    for shard in x.addressable_shards if isinstance(x, jax.Array) else ():
        if device in (None, shard.device):
            return shard.data, box(shard.index, x.shape)
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return x, tuple((0, size) for size in np.shape(x))
    return None


def _elsewhere(
    params: TapParams, number: int, shape: Sequence[int], device: Device
) -> SpecError:
    """The error for an operand of an eager tap of which a device holds no block."""
    first = int(params.masked)
    paths = params.callback.template.paths()
    name = paths[number - first] if number - first < len(paths) else "always="
    if number < first:
        name = "where="
    return SpecError(
        f"hostcall: {params.shown} has on='shards', but {device} holds no block of"
        f" {name}, of shape {list(shape)}. Tap the values in a jitted program, or give"
        " them one sharding",
        code="hc-device",
    )
