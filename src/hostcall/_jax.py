"""The one door to JAX's private parts.

No other module names anything under `jax._src` (tests/test_layers.py reads the
imports). Each entry says what needs it; all were read and run in 0.10.2 and
0.12.0.1. Where the two differ, the branch asks for the name, not for the version.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import callback as _callback
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import dtypes as _dtypes
from jax._src import effects as _effects
from jax._src import ffi as _ffi
from jax._src import mesh as _mesh
from jax._src import sharding_impls as _sharding_impls
from jax._src import util as _util
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _pe
from jax._src.lib import xla_client as _xla_client
from jax._src.lib.mlir import ir as _ir
from jax._src.lib.mlir.dialects import sdy as _sdy

# --- Primitives (_primitives/*) ----------------------------------------------------

Primitive = _core.Primitive
ShapedArray = _core.ShapedArray
moveaxis = _batching.moveaxis
batchers = _batching.primitive_batchers
Zero = _ad.Zero
instantiate_zeros = _ad.instantiate_zeros
partial_eval_rules = _pe.partial_eval_jaxpr_custom_rules  # under remat
jvps = _ad.primitive_jvps
transposes = _ad.primitive_transposes


def hold_weakly_in_caches(parameter_type: type) -> None:
    """JAX's caches of traced equations shall not keep parameters of this type alive.

    They are global, and would keep the user's function with them. Needs a type that
    allows weak references.
    """
    _util.weakref_cache_key_types.add(parameter_type)


def def_effectful_abstract_eval(primitive: Any, rule: Callable[..., Any]) -> None:
    """`rule` gives (result avals, effects)."""
    primitive.def_effectful_abstract_eval(rule)


def register_lowering(primitive: Any, rule: Callable[..., Any], platform: str) -> None:
    """Registers a lowering that runs once for each equation.

    Not cacheable: a cached lowering becomes a function that several equations
    share, and neighbours then could not be chained (see `chain`). The devices are
    wanted in the lowering, for `sharding=` and for mesh coordinates.
    """
    _mlir.register_lowering(primitive, rule, platform=platform, cacheable=False)
    _dispatch.prim_requires_devices_during_lowering.add(primitive)


def register_default_lowering(primitive: Any, rule: Callable[..., Any]) -> None:
    """Registers what happens on platforms that have no rule of their own."""
    _mlir.register_lowering(primitive, rule, cacheable=False)


def result_avals(
    avals: Sequence[Any], operands: Sequence[Any], pure: bool
) -> list[Any]:
    """Result avals on the mesh in context, varying as the operands do.

    Inside `shard_map` with its check on, JAX follows over which mesh axes a value
    varies. A pure function of values that are the same everywhere gives the same
    everywhere; one with effects may tell its shards apart (`hc.current()`), so its
    results vary over all manual axes.
    """
    mesh = _mesh.get_abstract_mesh()
    if mesh.empty:
        return list(avals)
    varying: frozenset[Any] = frozenset()
    if _config._check_vma.value:
        if pure:
            for operand in operands:
                varying |= frozenset(operand.mat.varying)
        else:
            varying = frozenset(mesh.manual_axes)
    mat = _core.ManualAxisType(varying=varying)
    return [
        aval.update(sharding=_core.get_cur_mesh_sharding(), manual_axis_type=mat)
        for aval in avals
    ]


# --- Effects (_order) --------------------------------------------------------------

Effect = _effects.Effect


def register_effect(effect_type: type, ordered: bool) -> None:
    """Allows an effect in everything that hostcall supports."""
    _effects.lowerable_effects.add_type(effect_type)
    _effects.control_flow_allowed_effects.add_type(effect_type)
    _effects.custom_derivatives_allowed_effects.add_type(effect_type)
    _effects.remat_allowed_effects.add_type(effect_type)
    # Else a scan under grad, whose effects have no result, drops them.
    _effects.partial_eval_kept_effects.add_type(effect_type)
    if ordered:
        _effects.ordered_effects.add_type(effect_type)
        _effects.shardable_ordered_effects.add_type(effect_type)


def wait_for_effects() -> list[Exception]:
    """Waits for what this thread has dispatched, as far as effects tell.

    Gives what programs failed with, each once. JAX's own wait stops at the first that
    failed (0.10.2), and there fails again the next time.
    """
    tokens = _dispatch.runtime_tokens
    found: dict[str, Exception] = {}
    waiting = [*tokens.current_tokens.values(), *tokens.output_runtime_tokens.values()]
    for token in waiting:
        try:
            token.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            found.setdefault(str(error), error)
    tokens.clear()
    return list(found.values())


def drop_failed_token(effect: Any) -> str | None:
    """Forgets this thread's token of `effect` if it is that of a program that failed.

    Gives what the program failed with. Does not wait for one that is under way.
    """
    tokens = _dispatch.runtime_tokens.current_tokens
    # Not by look-up: that would ask for the effect's hash, which asks for this.
    token = next((t for e, t in list(tokens.items()) if e is effect), None)
    buffer = getattr(token, "_buf", None)
    if buffer is None or not buffer.is_ready():
        return None
    try:
        buffer.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        # In place, since JAX is about to look into this dictionary; and what is put
        # back has hashes of its own.
        kept = [(e, t) for e, t in tokens.items() if e is not effect]
        tokens.clear()
        tokens.update(kept)
        return str(error)
    return None


# --- dtypes (_spec, _coerce) -------------------------------------------------------


def is_key_dtype(dtype: Any) -> bool:
    return bool(_dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def canonical_dtype(dtype: Any) -> Any:
    """The dtype that JAX uses for this one with the present x64 setting."""
    return _dtypes.canonicalize_dtype(dtype)


def key_data_shape(dtype: Any) -> tuple[int, ...]:
    """Shape of the uint32 block behind one typed PRNG key."""
    return tuple(dtype._impl.key_shape)


def wrap_key(data: Any, dtype: Any) -> Any:
    return jax.random.wrap_key_data(data, impl=dtype._impl.name)


# --- Lowering (_primitives/call/lowering) ------------------------------------------


_CHAIN = "hostcall: last token of each block"


def chain(ctx: Any) -> tuple[Any | None, Callable[[Any], None]]:
    """Token of the chained call before this one in the same block, and a setter.

    Calls in one MLIR block are straight-line code. Each takes the token of the one
    before it, so the compiler sees that they depend on each other. The record lies in
    a dictionary that JAX keeps for one module's lowering, and goes with it.
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
    """Ties `thing` to the executable that comes out of this lowering."""
    ctx.module_context.add_keepalive(thing)


def lowering_client(ctx: Any) -> Any | None:
    """The client that the program is lowered for; None in a cross-lowering."""
    try:
        return ctx.module_context.get_backend()
    except RuntimeError:
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
    """Lowers an equation as the JAX function `f` (a list of results) is lowered."""
    return list(_mlir.lower_fun(f, multiple_results=True)(ctx, *operands))


def check_sharding(ctx: Any, sharding: Any, name: str) -> None:
    """Refuses placements that mean nothing for this program."""
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
            f"hostcall: `{name}` has sharding={sharding} inside shard_map or pmap,"
            " where each device makes its own call. Drop `sharding=`"
        )


def program_devices(ctx: Any) -> list[Any] | None:
    """The devices that the program will run on, in its order; None: just one."""
    context = ctx.module_context.axis_context
    if isinstance(context, _sharding_impls.SPMDAxisContext):
        devices = list(context.mesh.devices.flat)
    elif isinstance(context, _sharding_impls.ShardingContext):
        devices = list(context.device_assignment or ())
    else:
        return None
    return devices if len(devices) > 1 else None


def emit_custom_call(
    ctx: Any,
    target: str,
    operands: Sequence[Any],
    *,
    token: Any | None,
    returns_token: bool,
    has_side_effect: bool,
    attributes: dict[str, np.uint64],
    aliases: dict[int, int] | None = None,
) -> tuple[list[Any], Any | None]:
    """Emits the call and gives (results, token).

    With `token` the first operand, and with `returns_token` the first result, is a
    token. Buffers are row-major. In a program over several devices every device makes
    the call, on whole values (on its own, in a region that is manual already).
    `aliases` says which operand's memory may become which result's.
    """
    abstract_token = _core.abstract_token
    operands = list(operands) if token is None else [token, *operands]
    avals_in = list(ctx.avals_in) if token is None else [abstract_token, *ctx.avals_in]
    avals_out = [abstract_token] * returns_token + list(ctx.avals_out)
    inner = ctx.replace(avals_in=avals_in, avals_out=avals_out)

    def emit(values: Sequence[Any]) -> Any:
        return _ffi.build_ffi_lowering_function(
            target,
            has_side_effect=has_side_effect,
            operand_output_aliases=aliases,
        )(inner, *values, **attributes)

    devices = program_devices(ctx)
    if devices is None:
        results = list(emit(operands).results)
    elif manual_mesh(ctx) is not None:
        op = emit(operands)
        _mlir.set_sharding(ctx.module_context, op, _closed((), avals_out or [None]))
        results = list(op.results)
    else:
        results = _emit_on_each_device(
            ctx, emit, operands, avals_in, avals_out, devices
        )
    return (results[1:], results[0]) if returns_token else (results, None)


def _closed(mesh_shape: tuple[tuple[str, int], ...], avals: Sequence[Any]) -> Any:
    """One entry a value: not split along any dimension."""
    dim = _sharding_impls.SdyDim(axes=(), is_open=False)
    return _sharding_impls.SdyArrayList(
        tuple(
            _sharding_impls.SdyArray(
                mesh_shape=mesh_shape,
                dim_shardings=(dim,) * getattr(aval, "ndim", 0),
                logical_device_ids=(),
            )
            for aval in avals
        )
    )


def _emit_on_each_device(
    ctx: Any,
    emit: Callable[[Sequence[Any]], Any],
    operands: Sequence[Any],
    avals_in: Sequence[Any],
    avals_out: Sequence[Any],
    devices: Sequence[Any],
) -> list[Any]:
    """The call inside a region that is manual over all devices, on whole values.

    The plain way, a call that is placed on one device by a maximal sharding, is not to
    be had: the partitioner keeps that for the targets of JAX's own callbacks, drops it
    from any other, and then refuses those with a side effect.
    """
    cache = ctx.module_context.sharding_attr_cache
    mesh_shape = (("hostcall", len(devices)),)
    types, _ = _mlir.ir_tree_registry.flatten(
        [_mlir._aval_to_ir_types(ctx.module_context, aval) for aval in avals_out]
    )
    region = _sdy.ManualComputationOp(
        types,
        list(operands),
        _closed(mesh_shape, avals_in).build(cache),
        _closed(mesh_shape, avals_out).build(cache),
        _sdy.ManualAxesAttr.get([_ir.StringAttr.get("hostcall")]),
    )
    block = _ir.Block.create_at_start(region.body, [value.type for value in operands])
    with _ir.InsertionPoint(block):
        op = emit(list(block.arguments))
        _mlir.set_sharding(ctx.module_context, op, _closed((), avals_out or [None]))
        _sdy.return_(list(op.results))
    return list(region.results)


def emit_jax_callback(
    ctx: Any,
    run: Callable[..., Sequence[np.ndarray]],
    operands: Sequence[Any],
    *,
    token: Any | None,
    has_side_effect: bool,
    sharding: Any,
) -> tuple[list[Any], Any | None]:
    """JAX's own callback, for platforms that the engine does not serve.

    Gives (results, token). `run` gets one array an operand, and gives one a result.
    """
    place = _callback._callback_op_sharding(
        ctx.module_context.axis_context, sharding, ctx.avals_out
    )
    results, token_out, _ = _callback.emit_python_callback(
        ctx,
        run,
        token,
        list(operands),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=has_side_effect,
        returns_token=token is not None,
        sharding=place,
    )
    return list(results), token_out


# --- Host code's own device (_host_device) -----------------------------------------

default_device = _config.default_device


def make_host_client() -> Any:
    """A CPU client of its own that runs programs on the thread that calls it.

    The process's CPU client admits 32 programs at a time on a device; while they
    all wait for their callbacks, a callback that used it would wait for ever.
    """
    return _xla_client.make_cpu_client(asynchronous=False, num_devices=1)


FIXED, DEVICE, GUARD = range(3)


def ambient_settings() -> list[tuple[int, Any, Any, Any, Any]]:
    """(kind, swap, set, get, value) of the settings that host code has its own of.

    A callback may run on the thread that dispatched the program, inside that
    thread's `jax.default_device` and `jax.set_mesh`, which it must not inherit. What
    a setting of the kinds DEVICE and GUARD is set to, the call's plan knows.
    """
    home = _config if hasattr(_config, "device_context") else _mesh
    abstract, concrete = home.abstract_mesh_context_manager, home.device_context

    def entry(kind: int, setting: Any, value: Any) -> tuple[int, Any, Any, Any, Any]:
        return kind, setting.swap_local, setting.set_local, setting.get_local, value

    return [
        entry(DEVICE, default_device, None),
        entry(FIXED, abstract, _mesh.empty_abstract_mesh),
        entry(FIXED, concrete, _mesh.empty_concrete_mesh),
        entry(GUARD, _config.no_execution, None),
    ]


# What `get_local` gives for a setting that the calling thread has not set.
UNSET = _config.config_ext.unset


class ExecutionGuard:
    """Refuses programs over devices that wait for the callback that starts them.

    A program over several devices holds the queue of each until it ends, and it does
    not end before its callbacks do. A callback that starts another program over
    several of those devices, and waits for it, would wait for ever.

    Stands in for the value of `jax_no_execution`, whose truth JAX asks for before it
    executes a program, or puts one on its fast path. The setting is part of the key
    of JAX's caches, so programs that were on the fast path before are asked about
    again; those that have passed get a fast path of their own.
    """

    def __init__(
        self, devices: frozenset[Any], refuse: Callable[[], Exception]
    ) -> None:
        self._devices = devices
        self._refuse = refuse

    def __bool__(self) -> bool:
        asking = sys._getframe(1).f_locals
        program = asking.get("self")
        if program is None:
            program = getattr(asking.get("executable"), "unsafe_call", None)
        devices = getattr(program, "_local_devices", ())
        if len(devices) > 1 and not self._devices.isdisjoint(devices):
            raise self._refuse()
        return False


def put_on_device(array: np.ndarray, device: Any, committed: bool = True) -> jax.Array:
    """NumPy to jax.Array in 3 us, where `jax.device_put` takes 20 to 50.

    The result may share the array's memory: nobody may write to that any more.
    """
    aval = ShapedArray(array.shape, array.dtype)
    sharding = _single_device_sharding(device)
    return _xla_client.batched_device_put(aval, sharding, [array], [device], committed)


_shardings: dict[Any, Any] = {}


def _single_device_sharding(device: Any) -> Any:
    sharding = _shardings.get(device)
    if sharding is None:
        sharding = _shardings[device] = jax.sharding.SingleDeviceSharding(device)
    return sharding


def here() -> Any:
    """The device where the calling thread's computations go by default."""
    default = default_device.value
    if hasattr(default, "client"):
        return default
    return jax.local_devices(backend=default)[0]


def is_committed(array: jax.Array) -> bool:
    return bool(getattr(array, "_committed", False))
