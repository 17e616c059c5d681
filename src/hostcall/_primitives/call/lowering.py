"""What the compiler gets: one custom call, and a slot that lives as long as it."""

from __future__ import annotations

from typing import Any

import numpy as np

from hostcall import _jax, _native, _targets
from hostcall._callback import CallInfo, CallParams
from hostcall._errors import HostcallError
from hostcall._primitives import emit
from hostcall._primitives.call.primitive import call_p, row_major


def _lower(ctx: Any, *operands: Any, params: CallParams) -> list[Any]:
    _targets.start()
    _native.bury()  # programs that died since the last call
    client = _jax.lowering_client(ctx)
    info = CallInfo(params, emit.by_ordinal(client), _jax.manual_mesh(ctx))
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
    slot, attributes = emit.take_slot(plan, signature)
    _jax.keep_alive(ctx, slot)
    return emit.emit(
        ctx,
        _targets.TARGET,
        operands,
        attributes,
        order=params.order,
        has_side_effect=params.order != "pure",
    )


def _team(
    ctx: Any, client: Any, params: CallParams, info: CallInfo
) -> tuple[int, int, int]:
    """(mode, size, leader's ordinal) of the devices that come to this call."""
    local = emit.local_devices(ctx, client)
    if local is None:
        return _targets.ALONE
    if info.mesh is not None:
        return (_targets.EACH, len(local), 0)
    leader = local[0]
    if params.sharding is not None:
        (leader,) = params.sharding.device_set
        if leader not in local:
            raise HostcallError(
                f"hostcall: `{info.name}` has sharding={params.sharding}, and its"
                f" device {leader} is not among those of the program:"
                f" {_jax.program_devices(ctx)}"
            )
    return (_targets.ONCE, len(local), leader.local_hardware_id)


# --- Platforms that the engine does not serve -----------------------------------------


def _lower_elsewhere(ctx: Any, *operands: Any, params: CallParams) -> list[Any]:
    """The same call through JAX's own callback: as slow as that, and as it is.

    Rows, masks, dtypes and errors are the engine's, which runs on the arrays that
    JAX brings to the host. Where JAX has no callback the call is refused.
    """
    emit.check_platform(ctx, f"`{params.callback.name}`")
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
        hosts = [row_major(array) for array in arrays]
        try:
            results: list[np.ndarray] = plan.invoke(hosts)
        except Exception as error:
            raise HostcallError(info.on_error(error, None, ())) from error
        return results

    return emit.emit_through_jax(
        ctx,
        run,
        operands,
        order=params.order,
        has_side_effect=params.order != "pure",
        sharding=params.sharding,
    )


_jax.register_default_lowering(call_p, _lower_elsewhere)
_jax.register_lowering(call_p, _lower, platform="cpu")
