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

Slices = tuple[slice, ...]


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
        if any(key is not None for key in items.keys):
            raise SpecError(
                f"hostcall: the feed `{name}` has sharding= and items with typed PRNG"
                " keys. Feed their jax.random.key_data, and wrap it in the program",
                code="hc-device",
            )
        self.sharding = sharding
        self._name = name
        me = jax.process_index()
        own_devices = [d for d in sharding.mesh.devices.flat if d.process_index == me]
        self.devices = tuple(_jax.ordinal(device) for device in own_devices)
        self.blocks: list[Any] = []
        self._cuts: list[list[Slices]] = []  # for each leaf, the part of each device
        for aval, path in zip(items.avals, items.paths(), strict=True):
            shape, cuts = self._cut(
                aval.shape, own_devices, path.removeprefix("result")
            )
            self.blocks.append(aval.update(shape=shape))
            self._cuts.append(cuts)

    def _cut(
        self, shape: tuple[int, ...], own_devices: list[Any], path: str
    ) -> tuple[tuple[int, ...], list[Slices]]:
        """(the shape of a device's block, the part of this process's item for each)."""
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
        block: list[int] = []
        cuts: list[list[slice]] = []  # for each axis, that of each device
        for axis, size in enumerate(shape):
            starts = [
                slices_by_device[device][axis].indices(divisible[axis])[0]
                for device in own_devices
            ]
            # Which of the process's parts along this axis each device has.
            own_starts, at = np.unique(starts, return_inverse=True)
            n, rest = divmod(size, len(own_starts))
            if rest:
                raise SpecError(
                    f"hostcall: {of}, and axis {axis} can't be cut into"
                    f" {len(own_starts)}"
                    f" equal parts, as {self.sharding.spec} wants",
                    code="hc-device",
                )
            block.append(n)
            cuts.append([slice(i, i + n) for i in (n * at).tolist()])
        return tuple(block), [*zip(*cuts, strict=True)] or [()] * len(own_devices)

    def cut(self, leaves: list[np.ndarray]) -> list[np.ndarray]:
        """The parts of an item's leaves, of one device after the other."""
        return [
            np.ascontiguousarray(leaf[cuts[lane]]).reshape(block.shape)
            for lane in range(len(self.devices))
            for leaf, cuts, block in zip(leaves, self._cuts, self.blocks, strict=True)
        ]

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
        if jax.sharding.get_abstract_mesh().manual_axes:
            raise SpecError(
                f"hostcall: the feed `{self._name}` has sharding=, and is called inside"
                " shard_map, which has only one device's part of the mesh. Call it"
                " outside, and pass the item in with in_specs=",
                code="hc-device",
            )

        def block(*operands: Any) -> list[Any]:
            *leaves, ok = bind(*operands)
            if jax.process_count() > 1:
                ok = jax.lax.pmin(ok.astype(jnp.int32), mesh.axis_names) != 0
            return [*leaves, ok]

        # Their values are the same on all devices that hold the same part, which
        # shard_map can't see.
        outs = jax.shard_map(
            block,
            mesh=mesh,
            in_specs=(jax.P(),) * len(operands),
            out_specs=[*[spec] * len(self.blocks), jax.P()],
            check_vma=False,
        )(*operands)
        return list(outs)
