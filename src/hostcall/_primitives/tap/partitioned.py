"""A tap of blocks in a partitioned program: of each device, or of each process.

With on="shards" each device taps its own block. With on="process" all devices of a
process are given the part of the value that they hold together, and the first of them
taps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from hostcall import _jax
from hostcall._core.errors import HostcallError, SpecError, conflict
from hostcall._engine import targets
from hostcall._engine.info import CallInfo
from hostcall._engine.params.tap import TapParams
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
    each = zip(index, shape, strict=True)
    return tuple(part.indices(size)[:2] for part, size in each)


def slices(boxes: Sequence[Box]) -> tuple[tuple[slice, ...], ...]:
    """For each array, its block as an index."""
    return tuple(tuple(slice(*ends) for ends in box) for box in boxes)


class TapBlocks(Partitioned):
    """What the parts of a tap share."""

    target = targets.TAP_TARGET

    def __init__(self, program: _jax.Program, params: TapParams) -> None:
        self._nested = host_device.level(program.client) > 0
        info = params.info(params, program.by_ordinal, None, nested=self._nested)
        super().__init__(program, info)

    def of_block(
        self, avals: list[Aval], places: Places
    ) -> tuple[CallInfo, list[Aval]]:
        """Among devices that hold identical blocks, only the first taps."""
        ordinals = {device.id: n for n, device in self.devices.items()}
        first: dict[str, tuple[int, Any]] = {}
        for device, boxes in places:
            if device in ordinals:
                first.setdefault(str(boxes), (ordinals[device], slices(boxes)))
        where = dict(first.values())
        how = {"only": tuple(where), "nested": self._nested, "linked": True}
        info = self.params.info(self.params, self.devices, None, **how)
        info.places = where
        return info, avals

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
        found = []
        for device in sorted(everywhere.device_set, key=lambda d: d.id):
            each = zip(maps, shapes, strict=True)
            boxes = [box(of[device], shape) for of, shape in each]
            found.append((device.id, tuple(self.params.arguments(boxes))))
        return tuple(found)

    def regroup(
        self, sharding: Sharding, shape: Sequence[int], number: int
    ) -> Sharding:
        if self.params.options.by_device:
            return sharding
        return tiles_of_processes(self.params, sharding, shape, number)


# --- The whole tap --------------------------------------------------------------------


_HOLDER = {"shards": "device", "process": "process"}


def lower(
    program: _jax.Program, operands: Sequence[Value], params: TapParams
) -> list[Value]:
    """The lowering of a tap that delivers blocks."""
    on, what = params.options.on, ""
    if params.grid:  # only rows="each" has one
        what, instead = "rows='each'", "rows='batched'"
    elif params.masked and program.ctx.avals_in[0].ndim > 0:
        what, instead = "a where= that differs between rows", "jnp.where on the values"
    if what:
        raise conflict(
            params.shown,
            f"on={on!r} and {what}. A {_HOLDER[on]} has some of the rows"
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


# --- The parts of processes -----------------------------------------------------------
#
# A tap with on="process" delivers the part of a value that the devices of one process
# hold together, once in each process. XLA has no words for it, but it can cut a value
# into equal tiles and give several devices the same tile. So the tap asks for the
# sharding whose tiles are the parts of the processes. The compiler then gathers each
# part among the devices of its process, and no data leave the process. One device a
# process needs no gathering at all.


def tiles_of_processes(
    params: TapParams, sharding: Sharding, shape: Sequence[int], number: int
) -> Sharding:
    """The sharding of an operand of a tap whose blocks are the parts."""
    devices = _jax.devices_of(sharding)
    if 0 in shape:  # no block lies apart from another
        return _jax.tiled(sharding, [], [])
    indices = dict(sharding.devices_indices_map(tuple(shape)))
    blocks = [box(indices[device], shape) for device in devices]
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
        what = f"the parts of {_name(params, number)}, of shape {list(shape)}, that"
        what += " the processes hold are no even division of it"
        raise _wrong(params, what, owners)
    return _jax.tiled(sharding, tiles, [owners[each] for each in sorted(owners)])


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
    if len({len(devices) for devices in owners.values()}) > 1:
        return None
    tiles = [len(set(ends)) for ends in zip(*owners, strict=True)]
    every = [
        [(i * whole // n, (i + 1) * whole // n) for i in range(n)]
        for whole, n in zip(shape, tiles, strict=True)
    ]
    even = all(whole % n == 0 for whole, n in zip(shape, tiles, strict=True))
    return tiles if even and set(owners) == set(itertools.product(*every)) else None


def blocks_here(operands: Operands, params: TapParams) -> Iterator[Block]:
    """The deliveries of an eager tap in this process."""
    arrays = [x for x in operands if isinstance(x, jax.Array)]
    sharded = [x for x in arrays if len(x.devices()) > 1]
    each = params.options.by_device and bool(sharded)
    if each:
        homes = [shard.device for shard in sharded[0].addressable_shards]
    else:
        devices = arrays[0].devices() if arrays else ()  # of any process
        here = [d for d in devices if d.process_index == _jax.process_of(d)]
        homes = [first_device(here)]
    seen = set()
    for home in homes:
        parts = []
        for number, x in enumerate(operands):
            part = _part(x, home if each else None)
            if part is None:
                raise _apart(params, number, x.shape, home.process_index)
            parts.append(part)
        place = params.arguments(tuple(box for _, box in parts))
        # Among devices that hold identical blocks, only the first taps.
        if place not in seen:
            seen.add(place)
            yield home, slices(place), [value for value, _ in parts]


def _part(x: Any, device: Device | None) -> tuple[Any, Box] | None:
    """(array, block) of what a device holds of an eager tap's operand; with None, of
    what all devices of this process hold together.

    None if their blocks make no single one.
    """
    blocks = {
        box(shard.index, x.shape): shard.data
        for shard in (x.addressable_shards if isinstance(x, jax.Array) else ())
        if device in (None, shard.device)
    }
    if not blocks and (not isinstance(x, jax.Array) or x.is_fully_addressable):
        return x, tuple((0, size) for size in np.shape(x))
    part = hull(set(blocks))
    if part is None:
        return None
    if len(blocks) == 1:
        return blocks[part], part
    out = np.empty([stop - start for start, stop in part], x.dtype)
    for block, data in blocks.items():
        each = zip(block, part, strict=True)
        at = tuple(slice(a - first, b - first) for (a, b), (first, _) in each)
        out[at] = _jax.to_numpy(data)
    return out, part


# --- What can go wrong ----------------------------------------------------------------


def _name(params: TapParams, number: int) -> str:
    """How messages call an operand."""
    first = int(params.masked)
    if number < first:
        return "where="
    paths = params.callback.template.paths()
    return paths[number - first] if number - first < len(paths) else "always="


def _apart(
    params: TapParams,
    number: int,
    shape: Sequence[int],
    process: int,
    blocks: Iterable[Box] = (),
) -> SpecError:
    """The error for an operand of which a process holds no single block."""
    what = f"of {_name(params, number)}, of shape {list(shape)}, that process {process}"
    return _wrong(params, f"the blocks {what} holds do not make one array", blocks)


def _wrong(params: TapParams, what: str, blocks: Iterable[Box]) -> SpecError:
    said = ", ".join(
        "[" + ", ".join(f"{start}:{stop}" for start, stop in block) + "]"
        for block in sorted(set(blocks))[:4]
    )
    return SpecError(
        f"hostcall: {params.shown} has on={params.options.on!r}, but {what}"
        f"{': ' * bool(said)}{said}. Use on='shards' to tap each device's block, or a"
        " mesh in which each process's devices are neighbours along the sharded axes"
        " (jax.devices() in their own order is one for an axis that is sharded alone),"
        " or give the value a sharding over processes alone"
        " (jax.lax.with_sharding_constraint)",
        code="hc-device",
    )
