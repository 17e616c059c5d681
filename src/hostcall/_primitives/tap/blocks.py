"""A tap of blocks in a partitioned program: of each device, or of each process.

With on="shards" each device taps its own block. With on="process" all devices of a
process are given the part of the value that they hold together (`parts.py`), and the
first of them taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hostcall import _jax
from hostcall._core.arguments import conflict
from hostcall._engine import targets
from hostcall._engine.info import CallInfo
from hostcall._engine.params.tap import TapParams
from hostcall._jax.types import Aval, Sharding, Value
from hostcall._primitives.blocks import Partitioned, Places, lower_blocks
from hostcall._primitives.tap import parts
from hostcall._runtime import host_device


class TapBlocks(Partitioned):
    """What the parts of a tap share."""

    target = targets.TAP_TARGET

    def __init__(self, program: _jax.Program, params: TapParams) -> None:
        self._nested = host_device.is_host(program.client)
        info = params.info(program.by_ordinal, None)
        info.tap = params.settings((), self._nested)
        super().__init__(program, info)

    def of_block(
        self, avals: list[Aval], places: Places
    ) -> tuple[CallInfo, list[Aval]]:
        """Among devices that hold identical blocks, only the first taps."""
        info = self.params.info(self.devices, None)
        ordinals = {device.id: n for n, device in info.devices.items()}
        first: dict[str, tuple[int, Any]] = {}
        for device, boxes in places:
            if device in ordinals:
                first.setdefault(str(boxes), (ordinals[device], parts.slices(boxes)))
        info.places = dict(first.values())
        info.tap = self.params.settings(tuple(info.places), self._nested, linked=True)
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
            boxes = [parts.box(of[device], shape) for of, shape in each]
            found.append((device.id, tuple(self.params.arguments(boxes))))
        return tuple(found)

    def regroup(
        self, sharding: Sharding, shape: Sequence[int], number: int
    ) -> Sharding:
        if self.params.options.on == "shards":
            return sharding
        return parts.regroup(self.params, sharding, shape, number)


# --- The whole tap --------------------------------------------------------------------


def serves(program: _jax.Program, params: TapParams) -> bool:
    """Whether the tap of this program is one of blocks."""
    if params.options.on == "process":  # within one process the part is the whole value
        return program.is_partitioned and program.across
    return params.options.on == "shards" and program.is_partitioned


def lower(
    program: _jax.Program, operands: Sequence[Value], params: TapParams
) -> list[Value]:
    """The lowering of a tap for which `serves` is true."""
    _refuse(params, program.ctx.avals_in)
    targets.start_lowering(program)
    return lower_blocks(program, operands, TapBlocks(program, params))


_HOLDER = {"shards": "device", "process": "process"}


def _refuse(params: TapParams, avals: Sequence[Aval]) -> None:
    on = params.options.on
    if params.grid:  # only rows="each" has one
        what, instead = "rows='each'", "rows='batched'"
    elif params.masked and avals[0].ndim > 0:
        what, instead = "a where= that differs between rows", "jnp.where on the values"
    else:
        return
    raise conflict(
        params.shown,
        f"on={on!r} and {what}. A {_HOLDER[on]} has some of the rows"
        f" only, or parts of them: use {instead}, or on='once'",
    )
