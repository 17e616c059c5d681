"""A tap of shards: each device of a partitioned program taps its own block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from hostcall import _jax, _native
from hostcall._core.errors import SpecError
from hostcall._engine import targets
from hostcall._engine.info import TapInfo
from hostcall._engine.params.tap import TapParams
from hostcall._primitives.blocks import NUMBER, Equation, emit_block, lower_blocks
from hostcall._primitives.tap.primitive import arguments, block_index
from hostcall._runtime import delivery, host_device

# --- The tap of one device ------------------------------------------------------------


class Places:
    """Ordinal -> index of each array's block, for the devices that tap.

    An object rather than a dict, because a parameter of an equation must be hashable
    and slices have no hash before Python 3.12.
    """

    def __init__(self, by_ordinal: dict[int, Any]) -> None:
        self.by_ordinal = by_ordinal


block_tap_p = _jax.Primitive("host_block_tap")


def _block_abstract_eval(*operands: Any, equation: Equation, places: Any) -> Any:
    del operands, equation, places
    return NUMBER


def _lower_block(
    ctx: Any, number: Any, *operands: Any, equation: Equation, places: Places
) -> Any:
    info = TapInfo(equation.params, equation.by_ordinal, None)
    info.places = places.by_ordinal
    tap = equation.params.settings(
        tuple(places.by_ordinal),
        nested=host_device.is_host(equation.client),
        linked=True,
    )
    avals = ctx.avals_in[1:]
    return emit_block(
        ctx, targets.TAP_TARGET, [number, *operands], equation, info, avals, tap
    )


block_tap_p.def_abstract_eval(_block_abstract_eval)
_jax.register_lowering(block_tap_p, _lower_block)


# --- The whole tap --------------------------------------------------------------------


def lower(
    program: _jax.Program, operands: Sequence[Any], params: TapParams
) -> list[Any]:
    """The lowering of a tap with on="shards" in a partitioned program."""
    _refuse(params, program.ctx.avals_in)
    targets.start_on(program.client)
    delivery.start()
    _native.bury()
    equation = Equation(program, params)

    def block(everywhere: Any, shardings: Any, shapes: Any) -> Any:
        places = _places(equation, everywhere, shardings, shapes)
        return partial(_tap_block, equation=equation, places=places)

    nowhere = partial(_tap_block, equation=equation, places=Places({}))
    return lower_blocks(program, operands, equation, block, nowhere)


def _refuse(params: TapParams, avals: Sequence[Any]) -> None:
    if params.rows == "each" and params.grid:
        what, instead = "rows='each'", "rows='batched'"
    elif params.masked and avals[0].ndim > 0:
        what, instead = "a where= that differs between rows", "jnp.where on the values"
    else:
        return
    raise SpecError(
        f"hostcall: the tap `{params.callback.name}` has on='shards' and {what}."
        " A device has some of the rows only, or parts of them: use"
        f" {instead}, or on='once'"
    )


def _tap_block(number: Any, *blocks: Any, equation: Equation, places: Places) -> Any:
    return block_tap_p.bind(number, *blocks, equation=equation, places=places)


def _places(
    equation: Equation, everywhere: Any, shardings: Sequence[Any], shapes: Sequence[Any]
) -> Places:
    """The devices that tap, and their blocks.

    Among devices that hold identical blocks, only the first taps.
    """
    maps = [
        dict(sharding.devices_indices_map(shape))
        for sharding, shape in zip(shardings, shapes, strict=True)
    ]
    local = {d.id: n for n, d in equation.by_ordinal.items()}
    found: dict[str, tuple[int, Any]] = {}
    for device in sorted(everywhere.device_set, key=lambda d: d.id):
        if device.id not in local:
            continue
        indices = [
            block_index(of[device], shape)
            for of, shape in zip(maps, shapes, strict=True)
        ]
        place = tuple(arguments(indices, equation.params))
        found.setdefault(str(place), (local[device.id], place))
    return Places(dict(found.values()))
