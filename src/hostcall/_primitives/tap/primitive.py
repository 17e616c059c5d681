"""The tap primitive: copies of values leave the program, which goes on at once.

A tap without results carries an effect, which keeps it in the program. A tap that
returns its arguments (`through`) has no effect: the use of its results keeps it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax, _native
from hostcall._core import errors, process
from hostcall._core.errors import SpecError
from hostcall._core.order import effects_with
from hostcall._core.source import inspect_callable
from hostcall._engine import plans
from hostcall._engine.counters import costs
from hostcall._engine.params.tap import TapParams
from hostcall._engine.placement import Placement
from hostcall._engine.placing import alone, placed_through_jax
from hostcall._jax.types import Aval, Device, Effect, JaxprEquation, Sharding, Value
from hostcall._primitives.batching import Batched, Dims, Operands, in_front, size_of
from hostcall._primitives.chosen import chosen_here, chosen_in
from hostcall._primitives.eager import (
    Block,
    bind_or_call,
    first_device,
    plan_here,
    row_major,
    start,
)
from hostcall._primitives.kept_alive import refuse_export
from hostcall._primitives.lowering import EngineCall, make_slot, register
from hostcall._primitives.tap import repeated
from hostcall._primitives.through_jax import emit_through_jax
from hostcall._runtime import host_device

T = TypeVar("T")

tap_p = _jax.Primitive("host_tap")
tap_p.multiple_results = True


def bind(*operands: jax.Array, params: TapParams) -> list[jax.Array]:
    return bind_or_call(tap_p, operands, params=params)


# --- impl --------------------------------------------------------------------------


def _impl(*operands: jax.Array, params: TapParams) -> list[jax.Array]:
    """Queues the tap now. Compiles nothing, and leaves nothing behind."""
    start(params)
    results = list(params.arguments(operands)) if params.through else []
    if params.masked and np.size(operands[0]) == 1 and not row_major(operands[0]):
        return results
    # Nothing is brought to the host of what `every=` or `sample=` leave out.
    for home, block, values in _blocks(operands, params):
        if params.options.thinned and not _is_let(operands, params, home):
            continue  # `hc.monitor.stats()` counts it
        arrays = [row_major(value) for value in values]
        _, plan = plan_here(params, home, arrays, block)
        plan.push(arrays[params.python_operands])
        if block is None:
            repeated.keep(params, home, arrays)
    return results


tap_p.def_impl(_impl)


def _is_let(operands: Operands, params: TapParams, home: Device) -> bool:
    """Whether `every=` and `sample=` let this execution tap, which counts it."""
    callback = params.callback
    source = inspect_callable(callback.function).source
    device = (home.platform, home.id)
    with process.starting.lock:  # two threads may come to a new line at once
        throttles = _throttle(callback.place, source, device, params.options)
        if not throttles:
            throttles.append(_native.Throttle(params.native_kind(alone(home, None))))
    counters = costs.counters_of(callback)
    return throttles[0].lets(counters, params.flag_of(operands))


# A compiled program has native counters for every= and sample=, one for each tap and
# device. An eager tap is no part of a program, so its counter is found by the line that
# wrote it, with no function that it would keep alive. In a notebook each run of a cell
# makes new lines. Beyond this number the counter that was used longest ago is dropped,
# and its line starts counting anew.
@lru_cache(maxsize=4096)
def _throttle(*line: Hashable) -> list[_native.Throttle]:
    return []


def _blocks(
    operands: Operands, params: TapParams
) -> Iterable[tuple[Device, Block | None, Sequence[Any]]]:
    """The deliveries of an eager tap in this process: of each, the device, where each
    array's block lies (None: it is whole), and the operands.
    """
    arrays = [x for x in operands if isinstance(x, jax.Array)]
    if params.options.in_blocks:
        from hostcall._primitives.tap import partitioned  # most taps deliver no blocks

        return partitioned.blocks_here(operands, params)
    devices = _devices_with(arrays, params)
    home = params.options.device
    if home is None or home.process_index == _jax.process_of(home):
        home = chosen_here(params, devices)
    # Each process runs this line, and one of them delivers.
    is_here = home.process_index == _jax.process_of(home)
    return [(home, None, operands)] if is_here else []


def _devices_with(arrays: Sequence[jax.Array], params: TapParams) -> list[Device]:
    """The devices of the first array, the one with the smallest number in front; the
    default device if there is no array.
    """
    if len(arrays) == 1 and len(one := arrays[0].sharding.device_set) == 1:
        return list(one)  # as most often: the rest takes 2 us
    _refuse_parts(arrays, params)
    if not arrays:
        return [first_device(())]
    return sorted(arrays[0].devices(), key=lambda device: device.id)


def _refuse_parts(arrays: Sequence[jax.Array], params: TapParams) -> None:
    """Refuses values of which other processes hold parts: no program gathers them."""
    for x in arrays:
        if not (x.is_fully_addressable or x.is_fully_replicated):
            raise SpecError(
                f"hostcall: the tap `{params.callback.name}` was called outside of"
                f" jax.jit with an array of shape {list(x.shape)} that is sharded over"
                " several processes, so that this one has parts of it only. Tap in a"
                " function under jax.jit, which gathers it, or use on='shards' for the"
                " parts",
                code="hc-device",
            )


# --- abstract eval -----------------------------------------------------------------


def _abstract_eval(
    *operands: Aval, params: TapParams
) -> tuple[list[Aval], frozenset[Effect]]:
    avals = list(params.arguments(operands)) if params.through else []
    _jax.need(_jax.Part.LOOPS)  # also without an effect, it is not delivered twice
    return avals, effects_with(params.effect)


tap_p.def_effectful_abstract_eval(_abstract_eval)


def _would_run_twice(equation: dict[str, TapParams]) -> errors.DerivativeError:
    params = equation["params"]
    return errors.DerivativeError(
        f"hostcall: jax.linearize or jax.grad of a while_loop with {params.shown},"
        f" written at {params.callback.place}, whose derivative or condition needs a"
        " result of one of JAX's own callbacks. JAX would run the loop, the callback"
        " and the tap once more for the derivative. Use lax.scan: it keeps the results."
        " Or use jax.jvp, which runs the loop once. If the loop has no derivative, put"
        " jax.lax.stop_gradient around what it starts with"
    )


_jax.once_in_while_loops[tap_p] = _would_run_twice
_jax.passing_on_in_while_loops.add(tap_p)


# --- batching ----------------------------------------------------------------------


def batched(
    operands: Operands, dims: Dims, params: TapParams
) -> tuple[list[jax.Array], TapParams, tuple[int | None, ...]]:
    """The operands, the parameters and the arguments' axes under one more vmap."""
    if params.always and dims[-1] is not None:
        flag = _of_any_row(operands, dims, params)
        operands = [*operands[:-1], flag]
        dims = [*dims[:-1], None]
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
    them again, taps them a second time only with remat="repeat"; the second of two
    loops (_jax/while_loops.py) never does.

    Returns (known equation, staged equation, unknown outputs, instantiated outputs,
    residuals).
    """
    n = len(eqn.outvars)
    params = eqn.params["params"]
    variables = zip(eqn.invars, inst, strict=True)
    residuals = [var for var, is_there in variables if not is_there]
    if any(unknown):  # its values are computed in the backward pass, where it taps
        return None, eqn, [True] * n, [True] * n, residuals
    if saveable is _jax.in_second_loop and params.through:
        passed = _jax.passed_on(eqn, params.arguments(eqn.invars))
        return eqn, passed, [False] * n, [True] * n, residuals
    if saveable is not _jax.in_second_loop and params.options.remat == "repeat":
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
    if program.is_partitioned and params.options.in_blocks:
        from hostcall._primitives.tap import partitioned

        return partitioned.lower(program, operands, params)
    ctx = program.ctx
    avals = program.ctx.avals_in
    only: tuple[int, ...] = ()  # the ordinals of the devices that tap; empty for all
    prepare = None
    if program.is_exported:
        _refuse_device(params)
    else:
        chosen_in(program, params)  # refuses another device than the program's
    if program.size > 1 and program.mesh is None:  # all hold the same: one of them taps
        if program.is_exported:
            if not params.masked:
                avals = [_FLAG, *avals]
                params = params.with_mask()
            prepare = partial(_only_on_first, program, avals)
        elif program.local is not None:
            device = _tapping(program, params)
            only = (_jax.ordinal(device) if device in program.local else _NOT_HERE,)
    nested = host_device.nesting_level(program.client) > 0
    placement = Placement(
        devices=program.by_ordinal,
        mesh=program.mesh,
        program_devices=program.devices,
        only=only,
        nested=nested,
        blocks=params.blocks_of_whole(program.by_ordinal, program.mesh, avals),
    )
    first = int(params.masked)
    call = EngineCall(
        program,
        params.target,
        make_slot(program, params, placement, avals),
        has_side_effect=True,
        aliases={first + i: i for i in range(len(ctx.avals_out))},
        prepare=prepare,
    )
    with _jax.named(ctx, params.callback.label):
        return call.emit(operands, params.effect)


_NOT_HERE = -1  # no device has this ordinal


def _tapping(program: _jax.Program, params: TapParams) -> Device:
    """The device that taps, in a program that is partitioned over several."""
    device = chosen_in(program, params)
    assert device is not None
    return device


# --- The one device that taps, in an exported program over several devices ------------
#
# A compiled program names this device by its ordinal. An exported program may run on
# any devices, so each compares its own partition id with 0, and the result is part of
# the tap's mask. (So `hc.monitor.stats()` counts the other devices' executions as
# masked.)

_FLAG = _jax.ShapedArray((), np.dtype(np.bool_))


def _refuse_device(params: TapParams) -> None:
    if params.options.device is not None:
        refuse_export(
            params.callback,
            f"it has on={params.options.device}, and the program may run on other"
            " devices. Leave out on=: the first device of the program then taps",
        )


def _only_on_first(
    program: _jax.Program, avals: Sequence[Aval], operands: Sequence[Value]
) -> list[Value]:
    """The operands with a mask that is False on all devices but the first.

    Runs inside a region that is manual over all devices. The mask is new if there is
    none so far.
    """
    masks = len(operands) + 1 - len(avals)

    def both(device: jax.Array, *mask: jax.Array) -> list[jax.Array]:
        is_first = device == 0
        return [jnp.logical_and(mask[0], is_first) if mask else is_first]

    specs = (jax.ShapeDtypeStruct((), np.uint32), *avals[:masks])
    values = (_jax.partition_id(), *operands[:masks])
    mask = _jax.lower_traced(program.ctx, both, specs, values)
    return [*mask, *operands[masks:]]


def lower_through_jax(
    program: _jax.Program, *operands: Value, params: TapParams
) -> list[Value]:
    """The lowering on any platform that JAX's callback serves; see `register`.

    JAX's callback brings the values to the host, and there they are queued.
    """
    place = _place(program, params)
    counters = costs.counters_of(params.callback)
    plans_by_device: dict[Device | None, tuple[_native.Plan, _native.Throttle]] = {}

    def planned(device: Device | None) -> tuple[_native.Plan, _native.Throttle]:
        if device not in plans_by_device:
            placement = placed_through_jax(program, device)
            hooks = params.hooks(params, placement)
            plan = plans.make_plan(hooks, program.ctx.avals_in)
            # If two threads come with one device, both count by the first's throttle.
            throttle = _native.Throttle(params.native_kind(placement))
            plans_by_device.setdefault(device, (plan, throttle))
        return plans_by_device[device]

    planned(None)

    def run(device: Device | None, *arrays: jax.Array) -> list[np.ndarray]:
        plan, throttle = planned(device)
        hosts = [row_major(array) for array in arrays]
        masked = params.masked and hosts[0].size == 1 and not hosts[0]
        if not masked and throttle.lets(counters, params.flag_of(hosts)):
            plan.push(hosts[params.python_operands])
        return list(params.arguments(hosts)) if params.through else []

    return emit_through_jax(
        program, run, operands, params=params, sharding=place, has_side_effect=True
    )


def _place(program: _jax.Program, params: TapParams) -> Sharding | None:
    """The sharding by which JAX's callback gets the values from the tap's device; None
    if each device taps, or if there is one.
    """
    if not program.is_partitioned:
        return None
    if params.options.in_blocks:
        from hostcall._primitives.tap import partitioned

        partitioned.refuse_through_jax(program, params)
    return jax.sharding.SingleDeviceSharding(_tapping(program, params))


register(tap_p, lower_here, lower_through_jax)
