"""What the compiler gets: one custom call that only copies, and a slot for the plan."""

from __future__ import annotations

from typing import Any

import numpy as np

from hostcall import _delivery, _jax, _native, _targets
from hostcall._errors import HostcallError
from hostcall._order import ORDERED
from hostcall._primitives.tap import shards
from hostcall._primitives.tap.primitive import arguments, row_major, tap_p, whole
from hostcall._tap_info import TapInfo, TapParams


def _lower(ctx: Any, *operands: Any, params: TapParams) -> list[Any]:
    if params.sharding == "shards" and _jax.is_partitioned(ctx):
        return shards.lower(ctx, *operands, params=params)
    _targets.start()
    _delivery.start()
    _native.bury()  # programs that died since the last call
    client = _jax.lowering_client(ctx)
    devices: dict[int, Any] = {}
    if client is not None:
        devices = {d.local_hardware_id: d for d in client.local_devices()}
    info = TapInfo(params, devices, _jax.manual_mesh(ctx))
    _jax.check_sharding(ctx, None, info.name)
    if params.sharding == "shards" and info.mesh is None:
        place = tuple(whole(aval.shape) for aval in arguments(ctx.avals_in, params))
        info.places = dict.fromkeys(devices, place)
    signature = _targets.signature(params, ctx.avals_in)
    plan = _targets.make_plan(
        params,
        ctx.avals_in,
        info,
        _targets.host_device(client),
        packed=True,
        number=signature,
        tap=params.settings(
            _leader(ctx, client, info), nested=_targets.is_host_client(client)
        ),
    )
    slot = _native.Slot(plan)
    _jax.keep_alive(ctx, slot)

    token, store = None, None
    if params.order == "ordered":
        token = _jax.ordered_token(ctx, ORDERED)
    elif params.order == "unordered":
        token, store = _jax.chain(ctx)
    first = 1 if params.masked else 0
    results, token_out = _jax.emit_custom_call(
        ctx,
        _targets.TAP_TARGET,
        operands,
        token=token,
        returns_token=params.order != "pure",
        has_side_effect=True,
        attributes={
            "slot": np.uint64(slot.number),
            "signature": np.uint64(signature),
        },
        aliases={first + i: i for i in range(len(ctx.avals_out))},
    )
    if params.order == "ordered":
        _jax.set_ordered_token(ctx, ORDERED, token_out)
    elif store is not None:
        store(token_out)
    return results


def _leader(ctx: Any, client: Any, info: TapInfo) -> tuple[int, ...]:
    """Ordinal of the one device that taps, where all hold the same; else none."""
    devices = _jax.program_devices(ctx)
    if devices is None or client is None or info.mesh is not None:
        return ()
    local = [d for d in devices if d.process_index == client.process_index()]
    return (int(local[0].local_hardware_id),)


_jax.register_lowering(tap_p, _lower, platform="cpu")


# --- Platforms that the engine does not serve -----------------------------------------

_JAXS_OWN = ("cuda", "rocm", "tpu")


def _lower_elsewhere(ctx: Any, *operands: Any, params: TapParams) -> list[Any]:
    platforms = tuple(ctx.module_context.platforms)
    if len(platforms) != 1 or platforms[0] not in _JAXS_OWN:
        raise HostcallError(
            f"hostcall: the tap `{params.callback.name}` is lowered for"
            f" {', '.join(platforms)}. The engine of this version serves one platform"
            " at a time: cpu, and cuda, rocm and tpu through JAX's own callback. Run"
            ' that part on the CPU: jax.jit(f, device=jax.devices("cpu")[0])'
        )
    return lower_through_jax(ctx, *operands, params=params)


def lower_through_jax(ctx: Any, *operands: Any, params: TapParams) -> list[Any]:
    """The lowering on any platform that JAX's callback serves: it brings the values
    to the host, and there they are queued.
    """
    _targets.start()
    _delivery.start()
    info = TapInfo(params, {-1: None}, _jax.manual_mesh(ctx))
    plan = _targets.make_plan(
        params,
        ctx.avals_in,
        info,
        _targets.host_device(None),
        packed=False,
        number=0,
        tap=params.settings(),
    )

    def run(*arrays: Any) -> list[np.ndarray]:
        hosts = [row_major(array) for array in arrays]
        if not params.masked or hosts[0].size != 1 or hosts[0]:
            plan.push(hosts)
        return list(arguments(hosts, params)) if params.through else []

    ordered = params.order == "ordered"
    results, token = _jax.emit_jax_callback(
        ctx,
        run,
        operands,
        token=_jax.ordered_token(ctx, ORDERED) if ordered else None,
        has_side_effect=True,
        sharding=None,
    )
    if ordered:
        _jax.set_ordered_token(ctx, ORDERED, token)
    return results


_jax.register_default_lowering(tap_p, _lower_elsewhere)
