"""A tap of shards: each device of a partitioned program taps its own block.

Which block that is, only the compiler knows, and it says so where it partitions: there
`jax.experimental.custom_partitioning` asks for the program of one device. What stands
there has no effect that JAX knows, and would be dropped if nobody used it. So the tap
becomes three parts, held together by a number that means nothing:

    before = link(0)           the effect: after what came before
    ran    = shards(before, x) custom-partitioned: each device taps its block
    link(ran)                  the effect: what comes after, comes after this

No part moves data between devices: the number is the same everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from hostcall import _delivery, _jax, _native, _targets
from hostcall._errors import SpecError
from hostcall._order import Order, effects_of
from hostcall._primitives import emit
from hostcall._primitives.tap.primitive import arguments, block_index
from hostcall._tap_info import TapInfo, TapParams

_NUMBER = _jax.ShapedArray((), np.dtype(np.int32))

# --- A link in the order of effects, as a value --------------------------------------

link_p = _jax.Primitive("host_link")


def _link_abstract_eval(
    number: Any, *, order: Order, mark: int
) -> tuple[Any, set[Any]]:
    del number, mark
    return _NUMBER, effects_of(order)


def _lower_link(ctx: Any, number: Any, *, order: Order, mark: int) -> list[Any]:
    return emit.emit(
        ctx,
        _targets.LINK_TARGET,
        [number],
        {"mark": np.uint64(mark)},
        order=order,
        has_side_effect=True,
    )


_jax.def_effectful_abstract_eval(link_p, _link_abstract_eval)
_jax.register_lowering(link_p, _lower_link, platform="cpu")


# --- The tap of one device ------------------------------------------------------------


class Site:
    """What the parts of one tap share. Parameters are compared by its identity."""

    def __init__(self, params: TapParams, client: Any) -> None:
        self.params = params
        self.client = client
        self.slots: list[Any] = []  # they live as long as the executable
        # In the program's text. JAX's compilation cache must not know the program
        # from elsewhere: its slots are taken where it is compiled.
        self.mark = int.from_bytes(os.urandom(7), "little")


class Places:
    """Ordinal -> index of each array's block, of the devices that tap.

    In an object: slices have no hash before Python 3.12.
    """

    def __init__(self, by_ordinal: dict[int, Any]) -> None:
        self.by_ordinal = by_ordinal


block_tap_p = _jax.Primitive("host_block_tap")


def _block_abstract_eval(*operands: Any, site: Site, places: Any) -> Any:
    del operands, site, places
    return _NUMBER


def _lower_block(
    ctx: Any, number: Any, *operands: Any, site: Site, places: Places
) -> Any:
    params = site.params
    info = TapInfo(params, emit.by_ordinal(site.client), None)
    info.places = places.by_ordinal
    avals = ctx.avals_in[1:]
    signature = _targets.signature(params, avals)
    plan = _targets.make_plan(
        params,
        avals,
        info,
        _targets.host_device(site.client),
        packed=True,
        number=signature,
        tap=params.settings(
            tuple(places.by_ordinal),
            nested=_targets.is_host_client(site.client),
            linked=True,
        ),
    )
    slot, attributes = emit.take_slot(plan, signature)
    site.slots.append(slot)
    return emit.emit(
        ctx,
        _targets.TAP_TARGET,
        [number, *operands],
        attributes,
        order="pure",  # the links have the order
        has_side_effect=True,
    )


block_tap_p.def_abstract_eval(_block_abstract_eval)
_jax.register_lowering(block_tap_p, _lower_block, platform="cpu")


# --- The whole ------------------------------------------------------------------------


def lower(ctx: Any, *operands: Any, params: TapParams) -> list[Any]:
    """The lowering of a tap with sharding="shards" in a partitioned program."""
    _refuse(params, ctx.avals_in)
    _targets.start()
    _delivery.start()
    _native.bury()
    site = Site(params, _jax.lowering_client(ctx))
    _jax.keep_alive(ctx, site)

    def tap(*arrays: Any) -> list[Any]:
        before = link_p.bind(jnp.int32(0), order=params.order, mark=site.mark)
        ran = _partitioned(site)(before, *arrays)
        link_p.bind(ran, order=params.order, mark=0)
        return []

    return _jax.lower_by(ctx, tap, *operands)


def _refuse(params: TapParams, avals: Sequence[Any]) -> None:
    if params.rows == "each" and params.grid:
        what, instead = "rows='each'", "rows='batched'"
    elif params.masked and avals[0].ndim > 0:
        what, instead = "a where= that differs between rows", "jnp.where on the values"
    else:
        return
    raise SpecError(
        f"hostcall: the tap `{params.callback.name}` has sharding='shards' and {what}."
        " A device has some of the rows only, or parts of them: use"
        f" {instead}, or sharding='whole'"
    )


def _partitioned(site: Site) -> Any:
    # Here, since importing it takes 10 ms that most programs need not pay.
    from jax.experimental.custom_partitioning import (
        SdyShardingRule,
        custom_partitioning,
    )

    @custom_partitioning
    def tap(number: Any, *arrays: Any) -> Any:
        return block_tap_p.bind(number, *arrays, site=site, places=Places({}))

    def partition(mesh: Any, args: Any, result: Any) -> Any:
        everywhere = args[0].sharding
        shardings = [everywhere]
        shardings += [_even(arg, everywhere) for arg in args[1:]]
        shapes = [arg.shape for arg in args[1:]]
        places = _places(site, everywhere, shardings[1:], shapes)
        one = partial(_tap_block, site=site, places=places)
        return mesh, one, result.sharding, tuple(shardings)

    def rule(mesh: Any, values: Any, results: Any) -> Any:
        """No two dimensions have to do with each other."""
        del mesh, results
        names = (f"d{i}" for i in range(10_000))
        return SdyShardingRule(
            tuple(tuple(next(names) for _ in value.shape) for value in values), ((),)
        )

    tap.def_partition(
        partition,
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        decode_shardings=False,
        sharding_rule=rule,
    )
    return tap


def _tap_block(number: Any, *blocks: Any, site: Site, places: Places) -> Any:
    return block_tap_p.bind(number, *blocks, site=site, places=places)


def _even(arg: Any, everywhere: Any) -> Any:
    """Its sharding; whole where its blocks differ in size, and the last is padded."""
    try:
        arg.sharding.devices_indices_map(arg.shape)
    except (AssertionError, ValueError):
        return everywhere
    return arg.sharding


def _places(
    site: Site, everywhere: Any, shardings: Sequence[Any], shapes: Sequence[Any]
) -> Places:
    """Of devices whose blocks are all equal the first taps."""
    maps = [
        dict(sharding.devices_indices_map(shape))
        for sharding, shape in zip(shardings, shapes, strict=True)
    ]
    local = {d.id: d.local_hardware_id for d in site.client.local_devices()}
    found: dict[str, tuple[int, Any]] = {}
    for device in sorted(everywhere.device_set, key=lambda d: d.id):
        if device.id not in local:
            continue
        indices = [
            block_index(of[device], shape)
            for of, shape in zip(maps, shapes, strict=True)
        ]
        place = tuple(arguments(indices, site.params))
        found.setdefault(str(place), (local[device.id], place))
    return Places(dict(found.values()))
