"""The lowering of a tap: one custom call that only copies, and a slot for its plan."""

from __future__ import annotations

from typing import Any

import numpy as np

from hostcall import _jax, _native
from hostcall._engine import plans, targets, throttle
from hostcall._engine.info import TapInfo
from hostcall._engine.params.tap import TapParams
from hostcall._primitives import emit
from hostcall._primitives.eager import row_major
from hostcall._primitives.tap import blocks
from hostcall._primitives.tap.primitive import arguments, tap_p, whole
from hostcall._runtime import delivery, host_device


def _lower(ctx: Any, *operands: Any, params: TapParams) -> list[Any]:
    if params.on == "shards" and _jax.is_partitioned(ctx):
        return blocks.lower(ctx, *operands, params=params)
    client = _jax.lowering_client(ctx)
    targets.start_on(client)
    delivery.start()
    _native.bury()  # frees the slots of programs that died since the last lowering
    devices = emit.by_ordinal(client)
    info = TapInfo(params, devices, _jax.manual_mesh(ctx))
    _jax.check_sharding(ctx, None, info.name)
    if params.on == "shards" and info.mesh is None:
        place = tuple(whole(aval.shape) for aval in arguments(ctx.avals_in, params))
        info.places = dict.fromkeys(devices, place)
    signature = emit.signature_of(ctx, params, ctx.avals_in)
    plan = plans.make_plan(
        params,
        ctx.avals_in,
        info,
        host_device.above(client),
        packed=True,
        number=signature,
        tap=params.settings(
            _leader(ctx, client, info, params.leader),
            nested=host_device.is_host(client),
        ),
    )
    slot, attributes = emit.take_slot(plan, signature, _jax.spans_processes(ctx))
    emit.keep(ctx, slot, info.name)
    first = 1 if params.masked else 0
    return emit.emit(
        ctx,
        targets.TAP_TARGET,
        operands,
        attributes,
        order=params.order,
        has_side_effect=True,
        aliases={first + i: i for i in range(len(ctx.avals_out))},
    )


_NONE_HERE = (-1,)  # no device has this ordinal


def _leader(
    ctx: Any, client: Any, info: TapInfo, leader: int | None
) -> tuple[int, ...]:
    """Ordinals of the devices that tap; empty if all do.

    If all devices of the program hold the same values, one of them taps: number
    `leader` of the program, or this process's first.
    """
    local = emit.local_devices(ctx, client)
    if local is None or info.mesh is not None:
        return ()
    if leader is None:
        return (emit.ordinal(local[0]),)
    devices = _jax.program_devices(ctx)
    assert devices is not None
    device = devices[leader]
    return (emit.ordinal(device),) if device in local else _NONE_HERE


# --- Platforms that the engine does not serve -----------------------------------------


def _lower_elsewhere(ctx: Any, *operands: Any, params: TapParams) -> list[Any]:
    emit.check_platform(ctx, f"the tap `{params.callback.name}`")
    return lower_through_jax(ctx, *operands, params=params)


def lower_through_jax(ctx: Any, *operands: Any, params: TapParams) -> list[Any]:
    """The lowering on any platform that JAX's callback serves.

    JAX's callback brings the values to the host, and there they are queued.
    """
    targets.start()
    delivery.start()
    info = TapInfo(params, {-1: None}, _jax.manual_mesh(ctx))
    plan = plans.make_plan(
        params,
        ctx.avals_in,
        info,
        host_device.above(None),
        packed=False,
        number=0,
        tap=params.settings(),
    )

    # JAX's callback knows neither device nor run, so all share one throttle.
    own = throttle.Throttle(params)

    def run(*arrays: Any) -> list[np.ndarray]:
        hosts = [row_major(array) for array in arrays]
        masked = params.masked and hosts[0].size == 1 and not hosts[0]
        if not masked and own.lets(params):
            plan.push(hosts)
        return list(arguments(hosts, params)) if params.through else []

    return emit.emit_through_jax(
        ctx, run, operands, order=params.order, has_side_effect=True, sharding=None
    )


_jax.register_lowering(tap_p, _lower, _lower_elsewhere)
