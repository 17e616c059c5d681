"""A feed with `sharding=`: which part of an item each device takes.

The source of each process gives the process's own block, as
jax.make_array_from_process_local_data wants it. The feed's thread cuts that block into
the blocks of the process's devices, and each device takes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core.errors import SpecError, wrong
from hostcall._core.spec import Results
from hostcall._jax.types import Aval, Device

Slices = tuple[slice, ...]
# Makes the arrays of an item's leaves, from the item and its number.
Reader = Callable[[Any, int], list[np.ndarray]]


class Shards:
    """How the items of a feed lie on the devices of a mesh.

    Attributes:
        devices: the ordinals of this process's devices, one for each lane of the ring.
        blocks: the avals of one device's part of each leaf.
    """

    def __init__(self, sharding: Any, items: Results, name: str) -> None:
        if not isinstance(sharding, jax.NamedSharding) or not isinstance(
            sharding.mesh, jax.sharding.Mesh
        ):
            wanted = "a jax.NamedSharding on a mesh of devices"
            raise wrong("sharding", f"the feed `{name}`", wanted, sharding)
        # A key's block has an axis of uint32 more, which the sharding does not know.
        if any(key is not None for key in items.keys):
            raise SpecError(
                f"hostcall: the feed `{name}` has sharding= and items with typed PRNG"
                " keys. Feed their jax.random.key_data, and wrap it in the program",
                code="hc-device",
            )
        self.sharding = sharding
        self._name = name
        process = jax.process_index()
        devices: list[Device] = [
            device
            for device in sharding.mesh.devices.flat
            if device.process_index == process
        ]
        self.devices = tuple(_jax.ordinal(device) for device in devices)
        self.blocks: list[Aval] = []
        self._cuts: list[list[Slices]] = []  # for each leaf, the part of each device
        for aval, path in zip(items.avals, items.paths(), strict=True):
            cuts = self._cuts_of(aval.shape, devices, path.removeprefix("result"))
            shape = tuple(part.stop - part.start for part in cuts[0])
            self.blocks.append(aval.update(shape=shape))
            self._cuts.append(cuts)

    def _cuts_of(
        self, shape: tuple[int, ...], devices: Sequence[Device], path: str
    ) -> list[Slices]:
        """Which part of a leaf of this process's item each of its devices has.

        The sharding says which part of the whole array a device has. The item is the
        part of the process, and its devices need not begin at 0. So along each axis the
        parts of the process are numbered in the order in which they begin. Devices that
        begin at 4, 6, 4, 6 of 8 rows have the parts 0, 1, 0, 1 of 2; an item of 10 rows
        is then cut into 0:5 and 5:10.
        """
        of = f"item{path} of the feed `{self._name}` has the shape {list(shape)}"
        if len(self.sharding.spec) > len(shape):
            raise SpecError(
                f"hostcall: {of}, which has no axis for {self.sharding.spec}. Give it"
                " one, or feed it by another hc.feed without sharding=",
                code="hc-device",
            )
        # Each axis of a shape like this can be cut, whatever the mesh and the spec.
        divisible = (self.sharding.mesh.size,) * len(shape)
        slices_by_device = self.sharding.devices_indices_map(divisible)
        cuts: list[Slices] = [()] * len(devices)
        for axis, size in enumerate(shape):
            # None: from the beginning, where an axis is not cut.
            starts = [slices_by_device[device][axis].start or 0 for device in devices]
            parts = sorted(set(starts))
            length, rest = divmod(size, len(parts))
            if rest:
                raise SpecError(
                    f"hostcall: {of}, and axis {axis} can't be cut into {len(parts)}"
                    f" equal parts, as {self.sharding.spec} wants",
                    code="hc-device",
                )
            for i, start in enumerate(starts):
                begin = length * parts.index(start)
                cuts[i] = (*cuts[i], slice(begin, begin + length))
        return cuts

    def reader(self, read: Reader) -> Reader:
        """As `read`, but returns the blocks of one device after the other."""

        def read_blocks(value: Any, item: int) -> list[np.ndarray]:
            leaves = read(value, item)
            arrays = []
            for lane in range(len(self.devices)):
                for leaf, cuts, block in zip(
                    leaves, self._cuts, self.blocks, strict=True
                ):
                    array = np.ascontiguousarray(leaf[cuts[lane]])
                    arrays.append(array.reshape(block.shape))  # of a scalar it made [1]
            return arrays

        return read_blocks

    def over(
        self, bind: Callable[..., list[Any]], operands: Sequence[Any]
    ) -> list[Any]:
        """Runs `bind` on each device of the mesh, and puts its blocks together.

        With several processes, an item is there only if all have one: sources that
        end at different items then stop all processes at the same step. Blocks of
        processes that had an item are not zeroed there: XLA's CPU compiler aborts on a
        constant behind such a collective in a loop (hlo_cse.cc, jaxlib 0.12.0.1).
        """
        mesh = self.sharding.mesh
        spec = self.sharding.spec
        # A device there knows its own part only, and shard_map can't be nested over
        # the same axes.
        if jax.sharding.get_abstract_mesh().manual_axes:
            raise SpecError(
                f"hostcall: the feed `{self._name}` has sharding=, and is called inside"
                " shard_map, which has only one device's part of the mesh. Call it"
                " outside, and pass the item in with in_specs=",
                code="hc-device",
            )

        def take_blocks(*operands: Any) -> list[Any]:
            *leaves, ok = bind(*operands)
            if jax.process_count() > 1:
                ok_everywhere = jax.lax.pmin(ok.astype(jnp.int32), mesh.axis_names)
                ok = ok_everywhere != 0
            return [*leaves, ok]

        take_on_all = jax.shard_map(
            take_blocks,
            mesh=mesh,
            in_specs=(jax.P(),) * len(operands),
            out_specs=[*[spec] * len(self.blocks), jax.P()],
            # Values are the same on all devices that hold the same part, which
            # shard_map can't see.
            check_vma=False,
        )
        return list(take_on_all(*operands))
