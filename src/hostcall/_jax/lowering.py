"""What JAX knows while it lowers a program, and how to add lowering rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import sharding_impls as _sharding_impls
from jax._src import source_info_util as _source_info_util
from jax._src.interpreters import mlir as _mlir
from jax._src.lib import xla_client as _xla_client
from jax._src.lib.mlir import ir as _ir

SERVED = ("cpu", "cuda")  # where the engine has handlers


def register_lowering(
    primitive: Any,
    rule: Callable[..., Any],
    elsewhere: Callable[..., Any] | None = None,
    *,
    wants_devices: bool = True,
) -> None:
    """Registers a lowering rule that runs once for each equation.

    The rule is registered for all platforms at once. The engine's handlers have the
    same names on every platform that it serves, so a module that is lowered for
    several of them needs one call only, and JAX does not emit a copy for each.

    The rule is not cacheable: JAX turns a cached lowering into a function that several
    equations share, and calls in it could not be chained to their neighbours (`chain`).

    Args:
        primitive: the primitive.
        rule: lowers an equation for the platforms that the engine serves.
        elsewhere: lowers it for all others; None: `rule` does.
        wants_devices: the rule needs the program's devices, for `sharding=` and for
            mesh coordinates. JAX then allows only one mesh in that program.
    """

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        there = elsewhere is None or set(platforms(ctx)) <= set(SERVED)
        chosen = rule if there else elsewhere
        assert chosen is not None
        return chosen(ctx, *operands, **params)

    _mlir.register_lowering(primitive, lower, cacheable=False)
    if wants_devices:
        _dispatch.prim_requires_devices_during_lowering.add(primitive)


_CHAIN = "hostcall: last token of each block"


def chain(ctx: Any) -> tuple[Any | None, Callable[[Any], None]]:
    """The token of the previous chained call in the same block, and a setter.

    Calls in one MLIR block are straight-line code. Each takes the token of the call
    before it, so XLA sees that they depend on each other. The record is kept in a
    dictionary that JAX makes for the lowering of one module, and ends with it.
    """
    record = ctx.module_context.cached_primitive_lowerings.setdefault(_CHAIN, {})
    block = _ir.InsertionPoint.current.block

    def store(token: Any) -> None:
        record[block] = token

    return record.get(block), store


def ordered_token(ctx: Any, effect: Any) -> Any:
    return ctx.tokens_in.get(effect)


def set_ordered_token(ctx: Any, effect: Any, token: Any) -> None:
    tokens = _mlir.TokenSet({effect: token})
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(tokens))


def keep_alive(ctx: Any, thing: Any) -> None:
    """Keeps `thing` alive as long as the executable of this lowering.

    A module that is lowered for export has no executable here and may be called at any
    later time, so it keeps `thing` until the process ends.
    """
    if is_for_export(ctx):
        exported.append(thing)
    else:
        ctx.module_context.add_keepalive(thing)


exported: list[Any] = []


def is_for_export(ctx: Any) -> bool:
    return bool(ctx.module_context.lowering_parameters.for_export)


def executables_are_shared() -> bool:
    """Whether one process compiles for all, which then fetch its executable.

    JAX finds it by the module's text, so the text must be the same in all processes.
    """
    return bool(_config.share_binary_between_hosts.value)


def run_where_dispatched(ctx: Any) -> None:
    """Makes a CPU program run on the thread that dispatches it.

    XLA's CPU runtime does that with every program that was compiled with host
    callbacks, so programs with JAX's own callbacks run there. The list may hold any
    callable, since only JAX's own custom calls use it. An exported program must not
    have host callbacks.
    """
    module = ctx.module_context
    if is_for_export(ctx) or not is_for_cpu(ctx):
        return
    if _not_called not in module.host_callbacks:
        module.add_host_callback(_not_called)


def _not_called(*args: Any) -> Any:
    """The entry in the list of host callbacks.

    All programs share it: the list is part of the keys of JAX's caches of executables.
    """
    raise AssertionError("hostcall: a host callback that stands for none was called")


def host_callback_handler() -> Any | None:
    """JAX's handler of buffer callbacks on CPUs, or None if jaxlib does not show it.

    native/handlers/host_callback.h says what the engine needs it for.
    """
    targets = getattr(_xla_client, "custom_call_targets", None)
    if targets is None:
        return None
    return targets("cpu").get("xla_buffer_python_cpu_callback", {}).get("execute")


def lowering_client(ctx: Any) -> Any | None:
    """The client for which the program is lowered; None if its platform has none here,
    as when a program is exported for another platform.
    """
    try:
        return ctx.module_context.get_backend()
    except (RuntimeError, ValueError):
        return None


def manual_mesh(ctx: Any) -> Any | None:
    """The mesh of the enclosing shard_map or pmap, if any."""
    context = ctx.module_context.axis_context
    if isinstance(context, _sharding_impls.SPMDAxisContext):
        return context.mesh
    return None


def is_partitioned(ctx: Any) -> bool:
    """Whether the compiler splits this program over several devices."""
    return program_devices(ctx) is not None and manual_mesh(ctx) is None


def lower_by(ctx: Any, f: Callable[..., Any], *operands: Any) -> list[Any]:
    """Lowers an equation as the JAX function `f`, which returns a list of results."""
    return list(_mlir.lower_fun(f, multiple_results=True)(ctx, *operands))


def check_sharding(ctx: Any, sharding: Any, name: str) -> None:
    """Refuses a `sharding=` and a shard_map that the call can't work with."""
    context = ctx.module_context.axis_context
    if not isinstance(context, _sharding_impls.SPMDAxisContext):
        return
    automatic = frozenset(context.mesh.axis_names) - context.manual_axes
    if automatic:
        raise NotImplementedError(
            f"hostcall: `{name}` is called inside a shard_map that is manual over some"
            f" mesh axes only. Make it manual over {sorted(map(str, automatic))} too"
        )
    if sharding is not None:
        raise ValueError(
            f"hostcall: `{name}` has on=device inside shard_map or pmap, where each"
            " device makes its own call. Drop on="
        )


def program_devices(ctx: Any) -> list[Any] | None:
    """The devices of the program, in its order.

    None if there is one device, or if a nested manual region hides them.
    """
    context = ctx.module_context.axis_context
    if isinstance(context, _sharding_impls.SPMDAxisContext):
        if isinstance(context.mesh, jax.sharding.AbstractMesh):
            return None
        devices = list(context.mesh.devices.flat)
    elif isinstance(context, _sharding_impls.ShardingContext):
        devices = list(context.device_assignment or ())
    else:
        return None
    return devices if len(devices) > 1 else None


def number_of_devices(ctx: Any) -> int:
    """How many devices the program has. Outside manual regions this is known even if
    the devices themselves are not.
    """
    context = ctx.module_context.axis_context
    if isinstance(context, _sharding_impls.ShardingContext):
        return int(context.num_devices)
    return len(program_devices(ctx) or (None,))


def spans_processes(ctx: Any) -> bool:
    """Whether other processes run the program too.

    Where the devices are not known, any program over several devices in a job of
    several processes counts.
    """
    devices = program_devices(ctx)
    if devices is not None:
        return len({device.process_index for device in devices}) > 1
    mesh = manual_mesh(ctx)
    n = number_of_devices(ctx) if mesh is None else mesh.size
    return n > 1 and jax.process_count() > 1


def lower_traced(
    ctx: Any, f: Callable[..., Any], avals: Sequence[Any], values: Sequence[Any]
) -> list[Any]:
    """Emits the JAX function `f` on values of these avals; returns its results."""
    avals = [_core.ShapedArray(aval.shape, aval.dtype) for aval in avals]
    inner = ctx.replace(primitive=None, avals_in=avals, avals_out=None)
    results = _mlir.lower_fun(f)(inner, *values)
    return list(_mlir.ir_tree_registry.flatten(results)[0])


def automatic_axes(ctx: Any) -> set[Any]:
    """Mesh axes over which the enclosing shard_map is not manual."""
    context = ctx.module_context.axis_context
    if not isinstance(context, _sharding_impls.SPMDAxisContext):
        return set()
    return set(context.mesh.axis_names) - set(context.manual_axes)


def platforms(ctx: Any) -> tuple[str, ...]:
    return tuple(ctx.module_context.platforms)


def is_for_cpu(ctx: Any) -> bool:
    return platforms(ctx) == ("cpu",)


def is_served(ctx: Any) -> bool:
    """Whether the program is for one platform that the engine serves."""
    of = platforms(ctx)
    return len(of) == 1 and of[0] in SERVED


def line_of(ctx: Any) -> tuple[str, int, str] | None:
    """(file, line, function) of the user's line behind an equation being lowered."""
    frame = _source_info_util.user_frame(ctx.traceback)
    if frame is None:
        return None
    return frame.file_name, frame.start_line, frame.function_name
