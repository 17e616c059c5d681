"""The tap primitive: copies of values leave the program, which goes on at once.

A tap without results carries an effect, which keeps it in the program. A tap that
returns its arguments (`through`) has no effect: the use of its results keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax, _native
from hostcall._core import errors, process
from hostcall._core.errors import HostcallError, SpecError
from hostcall._core.options import TapOptions
from hostcall._core.source import Place, source_of
from hostcall._engine import plans, targets
from hostcall._engine.counters import costs
from hostcall._engine.params.tap import TapParams
from hostcall._jax.types import Aval, Device, Effect, JaxprEquation, Sharding, Value
from hostcall._primitives.batching import Batched, Dims, Operands, in_front, size_of
from hostcall._primitives.eager import first_device, go_on_after_failures, row_major
from hostcall._primitives.lowering import (
    EngineCall,
    emit_through_jax,
    info_through_jax,
    put,
    refuse_export,
    register,
)
from hostcall._primitives.tap import partitioned
from hostcall._primitives.tap.partitioned import Box
from hostcall._runtime import host_device

T = TypeVar("T")

tap_p = _jax.Primitive("host_tap")
tap_p.multiple_results = True
bind: Callable[..., list[jax.Array]] = tap_p.bind


# --- impl --------------------------------------------------------------------------


def _impl(*operands: jax.Array, params: TapParams) -> list[jax.Array]:
    """Queues the tap now. Compiles nothing, and leaves nothing behind."""
    targets.start()
    process.refuse(f"`{params.callback.name}` is tapped")
    results = list(params.arguments(operands)) if params.through else []
    if params.masked and np.size(operands[0]) == 1 and not row_major(operands[0]):
        return results
    go_on_after_failures(params)
    tap, always = params.settings(in_program=False), params.flag_of(operands)
    for home, place, values in _blocks(operands, params):
        if params.options.thinned and not _lets(params, home, tap, always):
            continue
        arrays = [row_major(value) for value in values]
        info = params.info({-1: home}, None)
        info.places = None if place is None else {-1: partitioned.slices(place)}
        info.tap, info.device = tap, host_device.above_here()
        plans.make_plan(info, arrays).push(list(params.read(arrays)))
    return results


tap_p.def_impl(_impl)


# (device, block of each array, operands) of one delivery.
Block = tuple[Device, Sequence[Box] | None, list[jax.Array]]


def _blocks(operands: Operands, params: TapParams) -> list[Block]:
    """The deliveries of an eager tap in this process."""
    sharded = [x for x in operands if isinstance(x, jax.Array) and len(x.devices()) > 1]
    on = params.options.on
    if on == "shards" and sharded:
        return _of_each_device(operands, sharded[0], params)
    home = params.options.device or first_device(_devices(operands))
    if on == "once":
        _refuse_parts(operands, params)
        # Each process runs this line, and one of them delivers.
        if home.process_index != _jax.process_of(home):
            return []
        return [(home, None, list(operands))]
    found, boxes = [], []
    for number, x in enumerate(operands):
        box = partitioned.whole(np.shape(x))
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            part = partitioned.assembled(x.addressable_shards, x.shape)
            if part is None:
                raise partitioned.apart(params, number, x.shape, _jax.process_of(home))
            x, box = part
        found.append(x)
        boxes.append(box)
    local = [d for d in _devices(operands) if d.process_index == _jax.process_of(d)]
    home = first_device(local) if local else home
    return [(home, params.arguments(boxes), found)]


def _of_each_device(
    operands: Operands, sharded: jax.Array, params: TapParams
) -> list[Block]:
    """Among devices that hold identical blocks, only the first taps."""
    found: dict[tuple[Box, ...], Block] = {}
    for device in (shard.device for shard in sharded.addressable_shards):
        values, boxes = [], []
        for x in operands:
            shards = x.addressable_shards if isinstance(x, jax.Array) else ()
            here = [shard for shard in shards if shard.device == device]
            values.append(here[0].data if here else x)
            shape = np.shape(x)
            boxes.append(
                partitioned.box(here[0].index, shape)
                if here
                else partitioned.whole(shape)
            )
        place = tuple(params.arguments(boxes))
        found.setdefault(place, (device, place, values))
    return list(found.values())


def _refuse_parts(operands: Operands, params: TapParams) -> None:
    """Refuses values of which other processes hold parts: no program gathers them."""
    for x in operands:
        is_part = isinstance(x, jax.Array) and not x.is_fully_addressable
        if is_part and not x.is_fully_replicated:
            raise SpecError(
                f"hostcall: the tap `{params.callback.name}` was called outside of"
                f" jax.jit with an array of shape {list(x.shape)} that is sharded over"
                " several processes, so that this one has parts of it only. Tap in a"
                " function under jax.jit, which gathers it, or use on='process' or"
                " on='shards' for the parts",
                code="hc-device",
            )


def _devices(operands: Operands) -> list[Device]:
    """Those of the first array, which may be another process's."""
    arrays = [operand for operand in operands if isinstance(operand, jax.Array)]
    return [device for array in arrays[:1] for device in array.devices()]


# --- every= and sample= outside any program ------------------------------------------
#
# A compiled program has native counters for its taps, one for each tap and device. An
# eager tap is no part of a program, so its counter is found by the line that wrote it.


@dataclass(frozen=True)
class _TappedLine:
    """A user's line that taps, on one device. It keeps no function alive."""

    place: Place
    source: str
    device: tuple[str, int]
    options: TapOptions
    tap: _native.TapSettings = field(compare=False)


# How many lines keep a counter. In a notebook each run of a cell makes new lines.
# Beyond this number the counter that was used longest ago is dropped, and its line
# starts counting anew.
@lru_cache(maxsize=4096)
def _throttle(line: _TappedLine) -> _native.Throttle:
    return _native.Throttle(line.tap)


def _lets(
    params: TapParams, device: Device, tap: _native.TapSettings, always: bool
) -> bool:
    """Whether an eager tap is delivered, on this device; `always` is its flag.

    If not, `hc.monitor.stats()` counts it.
    """
    callback, number = params.callback, (device.platform, device.id)
    source = source_of(callback.function)
    line = _TappedLine(callback.place, source, number, params.options, tap)
    with process.starting.lock:  # two threads may come to a new line at once
        throttle = _throttle(line)
    return throttle.lets(costs.counters_of(callback), always)


# --- abstract eval -----------------------------------------------------------------


def _abstract_eval(
    *operands: Aval, params: TapParams
) -> tuple[list[Aval], set[Effect]]:
    avals = list(params.arguments(operands)) if params.through else []
    return avals, params.effects


tap_p.def_effectful_abstract_eval(_abstract_eval)


def _passed(operands: Sequence[T], equation: dict[str, TapParams]) -> Sequence[T]:
    """The operands that are the results of a tap."""
    params = equation["params"]
    return params.arguments(operands) if params.through else ()


_jax.run_once_in_while_loops(tap_p, passes=_passed)


# --- batching ----------------------------------------------------------------------


def batched(
    operands: Operands, dims: Dims, params: TapParams
) -> tuple[list[jax.Array], TapParams, tuple[int | None, ...]]:
    """The operands, the parameters and the arguments' axes under one more vmap."""
    if params.always and dims[-1] is not None:
        flag = _of_any_row(operands, dims, params)
        operands, dims = [*operands[:-1], flag], [*dims[:-1], None]
        if all(dim is None for dim in dims):  # the rows differ in the flag only
            return operands, params, tuple(params.arguments(dims))
    flags = [d is not None for d in dims]
    axes = tuple(0 if flag else None for flag in params.arguments(flags))
    params = params.with_axis(flags, size_of(operands, dims))
    return in_front(operands, dims), params, axes


def _of_any_row(operands: Operands, dims: Dims, params: TapParams) -> jax.Array:
    """The flag `always` of a batch: whether that of any row that is tapped is True."""
    first, *_, flag = in_front(operands, dims)
    if params.masked and dims[0] is not None:
        # The axes of inner vmaps are behind this one. Their rows share the flag.
        mask = first
        flag &= mask.reshape(len(mask), -1).any(1)
    return flag.any()  # type: ignore[no-any-return]


def _batch(operands: Operands, dims: Dims, *, params: TapParams) -> Batched:
    moved, params, axes = batched(operands, dims, params)
    outs = tap_p.bind(*moved, params=params)
    return outs, axes[: len(outs)]


_jax.batchers[tap_p] = _batch


# --- JVP, transpose ----------------------------------------------------------------


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array], *, params: TapParams
) -> tuple[list[jax.Array], list[jax.Array]]:
    """A tap sees primals. The tangents of its results are those of its arguments."""
    outs = tap_p.bind(*primals, params=params)
    return outs, list(params.arguments(tangents))[: len(outs)]


def _transpose(
    cotangents: Sequence[jax.Array], *operands: object, params: TapParams
) -> list[None]:
    """Drops a tap of tangents: a program of the transpose alone has no tangents."""
    del params
    if cotangents:
        raise errors.DerivativeError(
            "hostcall: tap_through of a tangent can't be transposed; use"
            " hc.derivatives.tap_tangent, or hc.derivatives.tap_cotangent for the"
            " cotangent"
        )
    return [None] * len(operands)


_jax.jvps[tap_p] = _jvp
_jax.transposes[tap_p] = _transpose


# --- Partial evaluation under remat --------------------------------------------------


def _partial_eval(
    saveable: object, unknown: Sequence[bool], inst: Sequence[bool], eqn: JaxprEquation
) -> tuple[
    JaxprEquation | None, JaxprEquation | None, list[bool], list[bool], list[object]
]:
    """Known values are tapped in the forward pass. The backward pass, which computes
    them again, taps them a second time only with remat="repeat".

    Returns (known equation, staged equation, unknown outputs, instantiated outputs,
    residuals).
    """
    del saveable
    n = len(eqn.outvars)
    residuals = [v for v, here in zip(eqn.invars, inst, strict=True) if not here]
    if any(unknown):
        return None, eqn, [True] * n, [True] * n, residuals
    if eqn.params["params"].options.remat == "repeat":
        return eqn, eqn, [False] * n, [True] * n, residuals
    return eqn, None, [False] * n, [False] * n, []


_jax.partial_eval_rules[tap_p] = _partial_eval


# --- lowering ----------------------------------------------------------------------


def lower_here(
    program: _jax.Program, *operands: Value, params: TapParams
) -> list[Value]:
    """The lowering for the platforms that the engine serves: a custom call that only
    copies, and a slot for its plan.
    """
    ctx = program.ctx
    if partitioned.serves(program, params):
        return partitioned.lower(program, operands, params)
    targets.start_lowering(program)
    flagged, avals, prepare = _is_flagged(program, params), list(ctx.avals_in), None
    if flagged:
        if not params.masked:
            avals, params = [_FLAG, *avals], params.with_mask()
        prepare = partial(_only_on_first, program, avals)
    info = params.info(program.by_ordinal, program.mesh, avals)
    only = () if flagged else _leader(program, params)
    info.tap = params.settings(only, host_device.is_host(program.client))
    first = int(params.masked)
    call = EngineCall(
        program,
        params.target,
        put(program, info, avals, only=only),
        has_side_effect=True,
        aliases={first + i: i for i in range(len(ctx.avals_out))},
        prepare=prepare,
    )
    with _jax.named(ctx, info.label):
        return call.emit(operands, params.effect)


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
        refuse_export(
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


def lower_through_jax(
    program: _jax.Program, *operands: Value, params: TapParams
) -> list[Value]:
    """The lowering on any platform that JAX's callback serves; see `register`.

    JAX's callback brings the values to the host, and there they are queued.
    """
    targets.start()
    place, settings = _place(program, params), params.settings(in_program=False)
    counters = costs.counters_of(params.callback)
    made: dict[Device | None, tuple[_native.Plan, _native.Throttle]] = {}

    def planned(device: Device | None) -> tuple[_native.Plan, _native.Throttle]:
        if device not in made:
            info = info_through_jax(program, params, device)
            info.tap = settings
            plan = plans.make_plan(info, program.ctx.avals_in)
            # If two threads come with one device, both count by the first's throttle.
            made.setdefault(device, (plan, _native.Throttle(settings)))
        return made[device]

    planned(None)

    def run(device: Device | None, *arrays: jax.Array) -> list[np.ndarray]:
        plan, own = planned(device)
        hosts = [row_major(array) for array in arrays]
        masked = params.masked and hosts[0].size == 1 and not hosts[0]
        if not masked and own.lets(counters, params.flag_of(hosts)):
            plan.push(list(params.read(hosts)))
        return list(params.arguments(hosts)) if params.through else []

    how = {"has_side_effect": True, "sharding": place}
    return emit_through_jax(program, run, operands, params=params, **how)


def _place(program: _jax.Program, params: TapParams) -> Sharding | None:
    """The sharding by which JAX's callback gets the values from the tap's device; None
    if each device taps, or if there is one.
    """
    if not program.is_partitioned:
        return None
    if partitioned.serves(program, params):
        raise HostcallError(
            f"hostcall: {params.shown} has on={params.options.on!r}, and is"
            f" lowered for {', '.join(program.platforms)}, where JAX's callbacks get"
            " only the whole value. Put the tap into a jax.shard_map, where each device"
            " taps its own block, or leave out on=",
            code="hc-device",
        )
    return jax.sharding.SingleDeviceSharding(_tapping(program, params))


register(tap_p, lower_here, lower_through_jax)
