"""The lowering of a call: one custom call, and a slot for its plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from hostcall import _jax
from hostcall._core import config
from hostcall._core.errors import HostcallError
from hostcall._engine import plans, targets
from hostcall._engine.info import CallInfo
from hostcall._engine.params.call import CallParams
from hostcall._engine.plans import Entrance, Team
from hostcall._jax.types import Aval, Device, Value
from hostcall._native import Plan
from hostcall._primitives import across, once, slots, together
from hostcall._primitives.across import Reach
from hostcall._primitives.call.primitive import call_p
from hostcall._primitives.eager import row_major
from hostcall._primitives.emit import emit, emit_through_jax
from hostcall._runtime import host_device


def lower(
    program: _jax.Program,
    operands: Sequence[Value],
    avals: Sequence[Aval],
    params: CallParams,
) -> list[Value]:
    """Emits the call.

    Args:
        program: the program.
        operands: the values.
        avals: their avals; for a typed key, the aval of its uint32 block.
        params: the parameters of the call.
    """
    info = params.info(program.by_ordinal, program.mesh)
    leader = params.options.device if program.is_partitioned else None
    attributes, source = prepare(program, info, avals, leader)
    with _jax.named(program.ctx, info.label):
        return emit(
            program,
            params.target,
            operands,
            effect=params.effect,
            attributes=attributes,
            aliases=dict(params.aliases),
            has_side_effect=params.effect is not None,
            source=source,
        )


def prepare(
    program: _jax.Program, info: CallInfo, avals: Sequence[Aval], leader: Device | None
) -> tuple[dict[str, str | np.uint64], Reach | None]:
    """Puts the call's plan into a slot that lives as long as the program.

    Returns the attributes by which the program finds the slot, and how the outcome of
    the call reaches all processes: from the device whose results they take, or from
    every device. None if it stays where it is.
    `leader` is the device that calls; None stands for the program's first.
    """
    info.job = targets.start_lowering(program)
    team, source, elsewhere = _team(program, info, leader)
    reaches = source
    if source is None and _fails_together(program, info):
        reaches = Reach(True, partial(together.share, devices=_size(program)))
        info.origins = [device.process_index for device in program.devices or ()]
    info.tells = reaches is not None and reaches.tells
    attributes = slots.put(
        program,
        info,
        avals,
        entry=Entrance(team=team, tells=info.tells, elsewhere=elsewhere),
    )
    if info.params.runs_where_dispatched:
        _jax.run_where_dispatched(program)
    return attributes, reaches


def lower_here(
    program: _jax.Program, *operands: Value, params: CallParams
) -> list[Value]:
    """The lowering for the platforms that the engine serves."""
    return lower(program, operands, program.ctx.avals_in, params)


def _fails_together(program: _jax.Program, info: CallInfo) -> bool:
    """Whether a failure of this call should raise in all processes of its program."""
    params: CallParams = info.params
    # A call that works in place in GPU memory has no host memory to write the outcome
    # to, and a sharded feed has no call.
    if program.platforms != ("cpu",) and params.on_buffers:
        return False
    if not program.across or params.devices:
        return False
    return (params.options.fail or config.settings.fail) == "together"


def _size(program: _jax.Program) -> int:
    return program.size if program.mesh is None else int(program.mesh.size)


def _team(
    program: _jax.Program, info: CallInfo, leader: Device | None
) -> tuple[Team | None, Reach | None, bool]:
    """How the devices of the program make the call together.

    Returns (settings of this process's team or None, how all processes take the
    results of one device or None, whether that device belongs to another process).
    """
    if info.params.devices:  # a sharded feed: each takes its part
        return None, None, False
    local, mesh = program.local, program.mesh
    if local is None:
        # A lowering that does not know the program's devices (an export, or a jit
        # with an abstract mesh): the first device that arrives makes the call. With
        # several processes, nothing says how many of the devices are in this one.
        n = _size(program)
        if n <= 1 or jax.process_count() > 1:
            return None, None, False
        # A mesh is an abstract one here, without devices.
        return Team("ONCE" if mesh is None else "EACH", n, None), None, False
    if mesh is not None:
        return Team("EACH", len(local), None), None, False
    devices = program.devices
    assert devices is not None
    if leader is None:
        leader = devices[0]
    if leader not in devices:
        raise HostcallError(
            f"hostcall: `{info.name}` has on={leader}, which is not among the devices"
            f" of the program: {devices}",
            code="hc-device",
        )
    source = None
    has_results = bool(info.params.avals)
    if len(local) < len(devices) and (has_results or _fails_together(program, info)):
        # A call that works in place in GPU memory has no host memory to write the
        # outcome to.
        on_host = program.platforms == ("cpu",) or not info.params.on_buffers
        share = partial(
            across.share,
            number=devices.index(leader),
            devices=len(devices),
            tells=on_host,
        )
        source = Reach(on_host, share)
        info.caller = leader.process_index
    elsewhere = leader not in local
    caller = _jax.ordinal(local[0] if elsewhere else leader)
    team = Team("ONCE", len(local), caller)
    return team, source, elsewhere


# --- Platforms that the engine does not serve -----------------------------------------


def lower_through_jax(
    program: _jax.Program,
    *operands: Value,
    params: CallParams,
    partitioned: bool = False,
) -> list[Value]:
    """The lowering for any platform that JAX's callback serves; see `once.register`."""
    targets.start()
    ctx = program.ctx
    info = params.info({}, program.mesh)
    info.job = targets.failures_over(program.across)
    avals = _jax.physical_avals(ctx.avals_in)
    device = host_device.above(None)
    made: dict[tuple[tuple[int, ...], ...], Plan] = {}

    def plan_of(operands: Sequence[Aval | np.ndarray]) -> Plan:
        shapes = tuple(operand.shape for operand in operands)  # blocks differ in them
        if shapes not in made:
            entry = Entrance(device=device)
            made[shapes] = plans.make_plan(params, operands, info, entry)
        return made[shapes]

    plan_of(avals)

    def run(*arrays: jax.Array) -> list[np.ndarray]:
        hosts = [row_major(array) for array in arrays]
        try:
            results: list[np.ndarray] = plan_of(hosts).invoke(hosts)
        except Exception as error:
            text = info.on_error(error, None, ())
            code = error.code if isinstance(error, HostcallError) else None
            raise HostcallError(text, code=code) from error
        return results

    return emit_through_jax(
        ctx,
        run,
        operands,
        effect=params.effect,
        has_side_effect=params.effect is not None,
        sharding=params.options.sharding,
        partitioned=partitioned,
    )


once.register(call_p, lower_here, lower_through_jax)
