"""What the compiler gets: one custom call, and a slot that lives as long as it."""

from __future__ import annotations

from typing import Any

import numpy as np

from hostcall import _jax, _native, _targets
from hostcall._callback import CallInfo, CallParams
from hostcall._errors import HostcallError
from hostcall._order import ORDERED
from hostcall._primitives.call.primitive import call_p


def _lower(ctx: Any, *operands: Any, params: CallParams) -> list[Any]:
    _targets.start()
    _native.bury()  # programs that died since the last call
    client = _jax.lowering_client(ctx)
    devices = {} if client is None else _by_ordinal(client)
    info = CallInfo(params, devices, _jax.manual_mesh(ctx))
    _jax.check_sharding(ctx, params.sharding, info.name)
    signature = _targets.signature(params, ctx.avals_in)
    plan = _targets.make_plan(
        params,
        ctx.avals_in,
        info,
        _targets.host_device(client),
        packed=True,
        number=signature,
        team=_team(ctx, client, params, info),
    )
    slot = _native.Slot(plan)
    _jax.keep_alive(ctx, slot)

    token, store = None, None
    if params.order == "ordered":
        token = _jax.ordered_token(ctx, ORDERED)
    elif params.order == "unordered":
        token, store = _jax.chain(ctx)
    results, token_out = _jax.emit_custom_call(
        ctx,
        _targets.TARGET,
        operands,
        token=token,
        returns_token=params.order != "pure",
        has_side_effect=params.order != "pure",
        attributes={
            "slot": np.uint64(slot.number),
            "signature": np.uint64(signature),
        },
    )
    if params.order == "ordered":
        _jax.set_ordered_token(ctx, ORDERED, token_out)
    elif store is not None:
        store(token_out)
    return results


def _by_ordinal(client: Any) -> dict[int, Any]:
    return {device.local_hardware_id: device for device in client.local_devices()}


def _team(
    ctx: Any, client: Any, params: CallParams, info: CallInfo
) -> tuple[int, int, int]:
    """(mode, size, leader's ordinal) of the devices that come to this call."""
    devices = _jax.program_devices(ctx)
    if devices is None or client is None:
        return _targets.ALONE
    local = [d for d in devices if d.process_index == client.process_index()]
    if info.mesh is not None:
        return (_targets.EACH, len(local), 0)
    leader = local[0]
    if params.sharding is not None:
        (leader,) = params.sharding.device_set
        if leader not in local:
            raise HostcallError(
                f"hostcall: `{info.name}` has sharding={params.sharding}, and its"
                f" device {leader} is not among those of the program: {devices}"
            )
    return (_targets.ONCE, len(local), leader.local_hardware_id)


# --- Platforms that the engine does not serve -----------------------------------------

_JAXS_OWN = ("cuda", "rocm", "tpu")


def _lower_elsewhere(ctx: Any, *operands: Any, params: CallParams) -> list[Any]:
    """The same call through JAX's own callback: as slow as that, and as it is.

    Rows, masks, dtypes and errors are the engine's, which runs on the arrays that
    JAX brings to the host. Where JAX has no callback the call is refused.
    """
    platforms = tuple(ctx.module_context.platforms)
    if len(platforms) != 1 or platforms[0] not in _JAXS_OWN:
        raise HostcallError(
            f"hostcall: `{params.callback.name}` is lowered for"
            f" {', '.join(platforms)}. The engine of this version serves one platform"
            " at a time: cpu, and cuda, rocm and tpu through JAX's own callback. Run"
            ' that part on the CPU: jax.jit(f, device=jax.devices("cpu")[0])'
        )
    return lower_through_jax(ctx, *operands, params=params)


def lower_through_jax(ctx: Any, *operands: Any, params: CallParams) -> list[Any]:
    """The lowering itself, on any platform that JAX's callback serves."""
    _targets.start()
    info = CallInfo(params, {}, _jax.manual_mesh(ctx))
    device = _targets.host_device(None)
    plan = _targets.make_plan(
        params, ctx.avals_in, info, device, packed=False, number=0
    )

    def run(*arrays: Any) -> list[np.ndarray]:
        hosts = [np.ascontiguousarray(a).reshape(np.shape(a)) for a in arrays]
        try:
            results: list[np.ndarray] = plan.invoke(hosts)
        except Exception as error:
            raise HostcallError(info.on_error(error, None, ())) from error
        return results

    ordered = params.order == "ordered"
    results, token = _jax.emit_jax_callback(
        ctx,
        run,
        operands,
        token=_jax.ordered_token(ctx, ORDERED) if ordered else None,
        has_side_effect=params.order != "pure",
        sharding=params.sharding,
    )
    if ordered:
        _jax.set_ordered_token(ctx, ORDERED, token)
    return results


_jax.register_default_lowering(call_p, _lower_elsewhere)
_jax.register_lowering(call_p, _lower, platform="cpu")
