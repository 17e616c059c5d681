"""The lowering of a tap: one custom call that only copies, and a slot for its plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax, _native
from hostcall._core.errors import HostcallError
from hostcall._engine import plans, targets
from hostcall._engine.counters import costs
from hostcall._engine.params.tap import TapParams
from hostcall._engine.plans import Entrance
from hostcall._jax.types import Aval, Device, Sharding, Value
from hostcall._primitives import once, slots
from hostcall._primitives.eager import row_major
from hostcall._primitives.emit import emit, emit_through_jax
from hostcall._primitives.tap import blocks
from hostcall._primitives.tap.primitive import tap_p
from hostcall._runtime import host_device


def lower_here(
    program: _jax.Program, *operands: Value, params: TapParams
) -> list[Value]:
    ctx = program.ctx
    if blocks.serves(program, params):
        return blocks.lower(program, operands, params)
    targets.start_lowering(program)
    flagged, avals, prepare = _is_flagged(program, params), list(ctx.avals_in), None
    if flagged:
        if not params.masked:
            avals, params = [_FLAG, *avals], params.with_mask()
        prepare = partial(_only_on_first, program, avals)
    info = params.info(program.by_ordinal, program.mesh, avals)
    nested = host_device.is_host(program.client)
    only = () if flagged else _leader(program, params)
    tap = params.settings(only, nested)
    attributes = slots.put(program, info, avals, only=only, entry=Entrance(tap=tap))
    first = 1 if params.masked else 0
    with _jax.named(ctx, info.label):
        return emit(
            program,
            params.target,
            operands,
            attributes=attributes,
            effect=params.effect,
            has_side_effect=True,
            aliases={first + i: i for i in range(len(ctx.avals_out))},
            prepare=prepare,
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


def _tapping(program: _jax.Program, params: TapParams) -> Device:
    """The device that taps, in a program that is partitioned over several."""
    devices = program.devices
    assert devices is not None
    device = params.options.device or devices[0]
    if device not in devices:
        raise HostcallError(
            f"hostcall: {params.shown} has on={device}, which is not"
            f" among the devices of the program: {devices}",
            code="hc-device",
        )
    return device


# --- The one device that taps, in an exported program over several devices ------------
#
# A compiled program names this device by its ordinal. An exported program may run on
# any devices, so each compares its own partition id with 0, and the result is part of
# the tap's mask. (So `hc.monitor.stats()` counts the other devices' executions as
# masked.)

_FLAG = _jax.ShapedArray((), np.dtype(np.bool_))


def _is_flagged(program: _jax.Program, params: TapParams) -> bool:
    """Whether a mask says which device taps. Else the engine knows it by its ordinal,
    or all devices tap.
    """
    if not program.is_exported or program.mesh is not None or program.size == 1:
        return False
    if params.options.device is not None:
        slots.refuse_export(
            params.callback,
            f"it has on={params.options.device}, and the program may run on other"
            " devices. Leave out on=: the first device of the program then taps",
        )
    return True


def _only_on_first(
    program: _jax.Program, avals: Sequence[Aval], operands: Sequence[Value]
) -> tuple[list[Value], Sequence[Aval]]:
    """The operands with a mask that is False on all devices but the first; their avals.

    Runs inside a region that is manual over all devices. The mask is new if there is
    none so far.
    """
    masks = len(operands) + 1 - len(avals)

    def both(device: jax.Array, *mask: jax.Array) -> list[jax.Array]:
        here = device == 0
        return [jnp.logical_and(mask[0], here) if mask else here]

    given = (jax.ShapeDtypeStruct((), np.uint32), *avals[:masks])
    values = (_jax.partition_id(), *operands[:masks])
    mask = _jax.lower_traced(program.ctx, both, given, values)
    return [*mask, *operands[masks:]], avals


# --- Platforms that the engine does not serve -----------------------------------------


def lower_through_jax(
    program: _jax.Program, *operands: Value, params: TapParams
) -> list[Value]:
    """The lowering on any platform that JAX's callback serves.

    JAX's callback brings the values to the host, and there they are queued.
    """
    targets.start()
    ctx = program.ctx
    place = _place(program, params)
    info = params.info({-1: None}, program.mesh)
    tap = params.settings(in_program=False)
    entry = Entrance(device=host_device.above(None), tap=tap)
    plan = plans.make_plan(params, ctx.avals_in, info, entry)

    # JAX's callback knows neither device nor run, so all share one throttle.
    own = _native.Throttle(params.settings())
    counters = costs.counters_of(params.callback)

    def run(*arrays: jax.Array) -> list[np.ndarray]:
        hosts = [row_major(array) for array in arrays]
        masked = params.masked and hosts[0].size == 1 and not hosts[0]
        if not masked and own.lets(counters, params.flag_of(hosts)):
            plan.push(list(params.read(hosts)))
        return list(params.arguments(hosts)) if params.through else []

    how = {"has_side_effect": True, "sharding": place}
    return emit_through_jax(ctx, run, operands, effect=params.effect, **how)


def _place(program: _jax.Program, params: TapParams) -> Sharding | None:
    """The sharding by which JAX's callback gets the values from the tap's device; None
    if each device taps, or if there is one.
    """
    if not program.is_partitioned:
        return None
    if blocks.serves(program, params):
        raise HostcallError(
            f"hostcall: {params.shown} has on={params.options.on!r}, and is"
            f" lowered for {', '.join(program.platforms)}, where JAX's callbacks get"
            " only the whole value. Put the tap into a jax.shard_map, where each device"
            " taps its own block, or leave out on=",
            code="hc-device",
        )
    return jax.sharding.SingleDeviceSharding(_tapping(program, params))


once.register(tap_p, lower_here, lower_through_jax)
