"""The lowering of a tap: one custom call that only copies, and a slot for its plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from hostcall import _jax, _native
from hostcall._core.errors import HostcallError
from hostcall._engine import plans, targets, throttle
from hostcall._engine.info import TapInfo
from hostcall._engine.params.tap import TapParams
from hostcall._engine.plans import Entrance
from hostcall._primitives import once, slots
from hostcall._primitives.eager import row_major
from hostcall._primitives.emit import (
    check_place,
    check_platform,
    emit,
    emit_through_jax,
)
from hostcall._primitives.tap import blocks, chosen
from hostcall._primitives.tap.description import arguments, describe
from hostcall._primitives.tap.primitive import (
    bind,
    flag_of,
    queued,
    tap_p,
)
from hostcall._runtime import delivery, host_device


def _lower(ctx: Any, *given: Any, params: TapParams) -> list[Any]:
    operands: Sequence[Any] = given
    program = _jax.program_of(ctx)
    check_place(program, params.device, params.callback.name)
    if program.automatic:
        return once.lower(program, operands, params, bind)
    if blocks.serves(program, params):
        return blocks.lower(program, operands, params)
    targets.start_on(program.client)
    targets.failures_over(program.across)
    delivery.start()
    _native.bury()  # frees the slots of programs that died since the last lowering
    number, avals = chosen.chosen(program, params), list(ctx.avals_in)
    if number is not None:
        operands, avals, params = chosen.with_mask(program, operands, avals, params)
    info = describe(params, program.by_ordinal, program.mesh, avals)
    nested = host_device.is_host(program.client)
    only = () if number is not None else _leader(program, params)
    tap = params.settings(only, nested)
    attributes = slots.put(program, info, avals, only=only, entry=Entrance(tap=tap))
    first = 1 if params.masked else 0
    with _jax.named(ctx, info.label):
        return emit(
            program,
            targets.TAP_TARGET,
            operands,
            attributes,
            order=params.order,
            has_side_effect=True,
            aliases={first + i: i for i in range(len(ctx.avals_out))},
            avals_in=avals,
            in_region=None
            if number is None
            else lambda inner: chosen.only_on(program, number, inner, avals),
        )


_NONE_HERE = (-1,)  # no device has this ordinal


def _leader(program: _jax.Program, params: TapParams) -> tuple[int, ...]:
    """Ordinals of the devices here that tap; empty if all do.

    If all devices of the program hold the same values, one of them taps. It belongs to
    one of the processes that run the program, and in the others no device taps.
    """
    local, devices = program.local, program.devices
    if local is None or devices is None or program.mesh is not None:
        return ()
    device = _tapping(program, params)
    return (_jax.ordinal(device),) if device in local else _NONE_HERE


def _tapping(program: _jax.Program, params: TapParams) -> Any:
    """The device that taps, in a program that is partitioned over several."""
    devices = program.devices
    assert devices is not None
    device = params.device or devices[params.leader or 0]
    if device not in devices:
        raise HostcallError(
            f"hostcall: the tap `{params.callback.name}` has on={device}, which is not"
            f" among the devices of the program: {devices}",
            code="hc-device",
        )
    return device


# --- Platforms that the engine does not serve -----------------------------------------


def _lower_elsewhere(ctx: Any, *operands: Any, params: TapParams) -> list[Any]:
    check_platform(ctx, f"the tap `{params.callback.name}`")
    return lower_through_jax(ctx, *operands, params=params)


def lower_through_jax(ctx: Any, *operands: Any, params: TapParams) -> list[Any]:
    """The lowering on any platform that JAX's callback serves.

    JAX's callback brings the values to the host, and there they are queued.
    """
    targets.start()
    delivery.start()
    program = _jax.program_of(ctx)
    check_place(program, params.device, params.callback.name)
    if program.automatic:
        return once.lower(program, operands, params, bind)
    place = _place(program, params)
    info = TapInfo(params, {-1: None}, program.mesh)
    plan = plans.make_plan(
        params,
        ctx.avals_in,
        info,
        Entrance(device=host_device.above(None), tap=params.settings(in_program=False)),
    )

    # JAX's callback knows neither device nor run, so all share one throttle.
    own = throttle.Throttle(params)

    def run(*arrays: Any) -> list[np.ndarray]:
        hosts = [row_major(array) for array in arrays]
        masked = params.masked and hosts[0].size == 1 and not hosts[0]
        if not masked and own.lets(params, flag_of(hosts, params)):
            plan.push(queued(hosts, params))
        return list(arguments(hosts, params)) if params.through else []

    return emit_through_jax(
        ctx, run, operands, order=params.order, has_side_effect=True, sharding=place
    )


def _place(program: _jax.Program, params: TapParams) -> Any:
    """The sharding by which JAX's callback gets the values from the tap's device; None
    if each device taps, or if there is one.
    """
    if not program.is_partitioned:
        return None
    if blocks.serves(program, params):
        raise HostcallError(
            f"hostcall: the tap `{params.callback.name}` has on={params.on!r}, and is"
            f" lowered for {', '.join(program.platforms)}, where JAX's callbacks get"
            " only the whole value. Put the tap into a jax.shard_map, where each device"
            " taps its own block, or leave out on=",
            code="hc-device",
        )
    return jax.sharding.SingleDeviceSharding(_tapping(program, params))


_jax.register_lowering(tap_p, _lower, _lower_elsewhere)
