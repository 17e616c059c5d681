"""What JAX knows, while it lowers an equation, about the program around it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jaxlib
from jax.interpreters import mlir as _mlir
from jaxlib.mlir import ir as _ir

from hostcall._jax.door import lax as _lax
from hostcall._jax.door import slicing as _slicing
from hostcall._jax.door import version_of
from hostcall._jax.door import windowed_reductions as _windowed_reductions
from hostcall._jax.types import Client, Device, LoweringContext, Mesh

SERVED = ("cpu", "cuda")  # where the engine has handlers
# In a shard_map that is manual over some mesh axes only, a token as a program's result
# aborts the process before (seen in 0.10.2, not in 0.11.2).
SHARDS_TOKENS_OVER_SOME_AXES = version_of(jaxlib.__version__) >= (0, 11, 2)


class Program(NamedTuple):
    """One look at the program whose equation is being lowered.

    Attributes:
        ctx: JAX's lowering context of the equation.
        name: its name, which JAX makes of that of the jitted function.
        platforms: the platforms that it is lowered for.
        client: the client for which it is lowered; None if its platform has none here,
            as when a program is exported for another platform.
        mesh: the mesh of the enclosing shard_map or pmap, if any.
        automatic: the axes of that mesh over which the shard_map is not manual.
        devices: its devices, in its order; None if there is one; empty if they are not
            known, as in a nested manual region, or are those of a mesh of one.
        home: its device, if it has one and JAX says which.
        size: how many devices it has, which is known even if these are not.
        local: those of its devices that belong to this process; None if it has no
            `devices`, or `client` is None, or if the engine does not serve a platform.
        by_ordinal: this process's devices, by `ordinal`; empty in a cross-lowering, and
            on platforms that the engine does not serve.
        is_partitioned: whether the compiler splits it over several devices.
        is_exported: whether it is lowered for export, so that it may run at any later
            time and in any process.
        across: whether other processes run it too. Where the devices are not known,
            any program over several devices in a job of several processes counts.
        is_symbolic: whether sizes of its shapes may have names.
        in_reducer: whether the equation is in the function of a reduction or a scatter.
            XLA's compiler aborts the process for a custom call there. Not seen if an
            inner jit there is one that JAX has lowered outside before.
        keep_alive: keeps what it gets alive as long as the executable of the program.
        equal_calls: how many calls of each kind it has so far.
    """

    ctx: LoweringContext
    name: str
    platforms: tuple[str, ...]
    client: Client | None
    mesh: Mesh | None
    automatic: frozenset[object]
    devices: tuple[Device, ...] | None
    home: Device | None
    size: int
    local: list[Device] | None
    by_ordinal: dict[int, Device]
    is_partitioned: bool
    is_exported: bool
    across: bool
    is_symbolic: bool
    in_reducer: bool
    keep_alive: Callable[[object], None]
    equal_calls: dict[Any, int]


def program_of(ctx: LoweringContext) -> Program:
    """Looks at the program once, for all that lowers an equation of it."""
    module = ctx.module_context
    platforms = tuple(module.platforms)
    try:
        client = module.get_backend()
    except (RuntimeError, ValueError):
        client = None
    mesh, automatic, size, devices = _over(module.axis_context)
    if devices:
        across = len({device.process_index for device in devices}) > 1
    else:
        across = size > 1 and jax.process_count() > 1
    local = None
    by_ordinal = {}
    # Devices of other platforms may have no number (`local_hardware_id`).
    if client is not None and set(platforms) <= set(SERVED):
        by_ordinal = {ordinal(device): device for device in client.local_devices()}
        if devices:
            this_process = client.process_index()
            local = [d for d in devices if d.process_index == this_process]
    attributes = module.module.operation.attributes
    return Program(
        ctx=ctx,
        name=str(_ir.StringAttr(attributes["sym_name"]).value),
        platforms=platforms,
        client=client,
        mesh=mesh,
        automatic=automatic,
        devices=devices,
        home=_only_device(module.axis_context),
        size=size,
        local=local,
        by_ordinal=by_ordinal,
        is_partitioned=bool(devices) and mesh is None,
        is_exported=bool(module.lowering_parameters.for_export),
        across=across,
        is_symbolic=bool(module.shape_poly_state.dim_vars),
        in_reducer=_is_in_reducer(),
        keep_alive=module.add_keepalive,
        equal_calls=record_of(ctx, "equal calls"),
    )


def _over(
    context: object,
) -> tuple[Mesh | None, frozenset[object], int, tuple[Device, ...] | None]:
    """(mesh, automatic, size, devices) of a program, as `Program` says."""
    if isinstance(context, _mlir.SPMDAxisContext):
        mesh = context.mesh
        size = int(mesh.size)
        automatic = frozenset[object](mesh.axis_names) - context.manual_axes
        devices: tuple[Device, ...] = ()
        # An abstract mesh, of a nested manual region, has no devices.
        if size > 1 and not isinstance(mesh, jax.sharding.AbstractMesh):
            devices = tuple(mesh.devices.flat)
        return mesh, automatic, size, devices
    if not isinstance(context, _mlir.ShardingContext) or context.num_devices == 1:
        return None, frozenset(), 1, None
    assigned = tuple(context.device_assignment or ())
    return None, frozenset(), int(context.num_devices), assigned


def _only_device(context: object) -> Device | None:
    if not isinstance(context, _mlir.ShardingContext):
        return None
    known = tuple(context.device_assignment or ())
    return known[0] if len(known) == 1 else None


def ordinal(device: Device) -> int:
    """The number that XLA gives a handler for this device.

    On CPUs it is the device's id, and ids count on from process to process.
    """
    return int(device.id if device.platform == "cpu" else device.local_hardware_id)


def is_served(ctx: LoweringContext) -> bool:
    """Whether the program is for one platform that the engine serves."""
    return is_one_served(ctx.module_context.platforms)


def is_one_served(platforms: Sequence[object]) -> bool:
    """Whether they are one platform, which the engine serves."""
    return len(platforms) == 1 and platforms[0] in SERVED


def _is_in_reducer() -> bool:
    """By who lowers now: JAX makes functions of their own of inner jits, conds and
    loops, and nothing in those says what calls them.
    """
    frame = inspect.currentframe()
    while frame is not None and (caller := frame.f_back) is not None:
        lowers = frame.f_code is _mlir.jaxpr_subcomp.__code__
        if lowers and id(caller.f_globals) in _OF_REDUCERS:
            return True
        frame = caller
    return False


# JAX's modules, by their names, that lower what XLA applies to single elements.
_OF_REDUCERS = {id(vars(m)) for m in (_lax, _slicing, _windowed_reductions)}


def record_of(ctx: LoweringContext, name: str) -> dict[Any, Any]:
    """What is noted under this name about the module that is being lowered.

    It is kept in a dictionary that JAX makes for the module, and ends with it.
    """
    records = ctx.module_context.cached_primitive_lowerings
    return records.setdefault(f"hostcall: {name}", {})  # type: ignore[no-any-return]


def run_where_dispatched(program: Program) -> None:
    """Makes a CPU program run on the thread that dispatches it.

    XLA's CPU runtime does that with every program that was compiled with host
    callbacks, so programs with JAX's own callbacks run there. The list may hold any
    callable, since only JAX's own custom calls use it. An exported program must not
    have host callbacks, nor one that is compiled for devices that are not here.

    On GPUs each program runs so. There the list says of a program without effects that
    `jax.effects_barrier` waits for it and raises its failure, as with JAX's callbacks.
    """
    module = program.ctx.module_context
    if program.is_exported or program.client is None:
        return
    if program.platforms not in (("cpu",), ("cuda",)):
        return
    if _not_called not in module.host_callbacks:
        module.add_host_callback(_not_called)


def are_host_callbacks_ours(host_callbacks: Sequence[object]) -> bool:
    """Whether a lowered program has host callbacks, and none of JAX's own."""
    return list(host_callbacks) == [_not_called]


def _not_called(*args: object) -> NoReturn:
    """The entry in the list of host callbacks.

    All programs share it: the list is part of the keys of JAX's caches of executables.
    """
    raise AssertionError("hostcall: a host callback that stands for none was called")
