"""The one door to JAX's private parts.

No other module names anything under `jax._src` (tests/test_layers.py reads the
imports). Each entry says what needs it; all were read and run in 0.10.2 and
0.12.0.1. Where the two differ, the branch asks for the name, not for the version.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax._src import api as _api
from jax._src import buffer_callback as _buffer_callback
from jax._src import callback as _callback
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import core as _core
from jax._src import debugging as _debugging
from jax._src import dispatch as _dispatch
from jax._src import dtypes as _dtypes
from jax._src import effects as _effects
from jax._src import ffi as _ffi
from jax._src import mesh as _mesh
from jax._src import pretty_printer as _pretty_printer
from jax._src import shard_map as _shard_map
from jax._src import sharding_impls as _sharding_impls
from jax._src import source_info_util as _source_info_util
from jax._src import tree_util as _tree_util
from jax._src import util as _util
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _pe
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import guard_lib as _guard_lib
from jax._src.lib import xla_client as _xla_client
from jax._src.lib.mlir import ir as _ir
from jax._src.lib.mlir.dialects import hlo as _hlo
from jax._src.lib.mlir.dialects import sdy as _sdy
from jax._src.state import discharge as _discharge

# --- Primitives (_primitives/*) ----------------------------------------------------

Primitive = _core.Primitive
ShapedArray = _core.ShapedArray
moveaxis = _batching.moveaxis
check_arg = _dispatch.check_arg
aval_of = _core.typeof


def is_tracing() -> bool:
    """Whether the calling thread is tracing: only then are there traced values."""
    return not _core.trace_state_clean()


batchers = _batching.primitive_batchers
Zero = _ad.Zero
instantiate_zeros = _ad.instantiate_zeros
partial_eval_rules = _pe.partial_eval_jaxpr_custom_rules  # under remat
jvps = _ad.primitive_jvps
transposes = _ad.primitive_transposes


def zero_tangent(primal: Any) -> Any:
    return Zero(_core.typeof(primal).to_tangent_aval())


def is_literal(atom: Any) -> bool:
    return isinstance(atom, _core.Literal)


def register_dce(
    primitive: Any, rule: Callable[[Sequence[bool], Any], tuple[list[bool], Any]]
) -> None:
    """`rule(used outputs, equation)` gives (used inputs, what remains of it).

    JAX's has a list of live inputs in the middle (0.12), or not (0.10).
    """
    _pe.dce_rules[primitive] = lambda used, *rest: rule(used, rest[-1])


def hold_weakly_in_caches(parameter_type: type) -> None:
    """JAX's caches of traced equations shall not keep parameters of this type alive.

    They are global, and would keep the user's function with them. Needs a type that
    allows weak references.
    """
    _util.weakref_cache_key_types.add(parameter_type)


def def_effectful_abstract_eval(primitive: Any, rule: Callable[..., Any]) -> None:
    """`rule` gives (result avals, effects)."""
    primitive.def_effectful_abstract_eval(rule)


SERVED = ("cpu", "cuda")  # where the engine has handlers


def register_lowering(
    primitive: Any,
    rule: Callable[..., Any],
    elsewhere: Callable[..., Any] | None = None,
    *,
    wants_devices: bool = True,
) -> None:
    """Registers a lowering that runs once for each equation.

    One rule for all platforms: those that the engine serves have handlers of one name,
    so a module for several of them has one call, and JAX need not choose between
    copies. `elsewhere` lowers for other platforms.

    Not cacheable: a cached lowering becomes a function that several equations share,
    and neighbours then could not be chained (see `chain`). Most want to know the
    program's devices, for `sharding=` and for mesh coordinates; where one does, JAX
    allows one mesh only in that program.
    """

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        there = elsewhere is None or set(platforms(ctx)) <= set(SERVED)
        chosen = rule if there else elsewhere
        assert chosen is not None
        return chosen(ctx, *operands, **params)

    _mlir.register_lowering(primitive, lower, cacheable=False)
    if wants_devices:
        _dispatch.prim_requires_devices_during_lowering.add(primitive)


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


def vary_alike(operands: Sequence[Any]) -> list[Any]:
    """Operands that vary over the same mesh axes, inside `shard_map` with its check on.

    A cotangent varies as the results do. Where an operand varies less, the cast here
    is transposed to the sum over the devices that hold it.
    """
    mesh = _mesh.get_abstract_mesh()
    if mesh.empty or not _config._check_vma.value:
        return list(operands)
    own = [frozenset(_core.typeof(x).mat.varying) for x in operands]
    everything = frozenset[Any]().union(*own)
    return [
        jax.lax.pcast(x, tuple(everything - have), to="varying")
        if everything - have
        else x
        for x, have in zip(operands, own, strict=True)
    ]


def shard_alike(value: Any, aval: Any) -> Any:
    """`value`, sharded as `aval` says, which over explicit mesh axes is typed."""
    wanted = getattr(aval, "sharding", None)
    if wanted is None or wanted.mesh.empty or _core.typeof(value).sharding == wanted:
        return value
    return jax.sharding.reshard(value, wanted)


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


def lower_batched_conditions(effect_type: type) -> None:
    """Lowers `while_loop`s whose condition is batched and has this ordered effect.

    JAX's rule for ordered effects in a condition (0.10.2, 0.12.0.1) forgets there that
    rows stop one by one, and lets all of them run on. Every other loop stays JAX's.
    """
    table = _mlir._lowerings
    entry = table[jax.lax.while_p]

    def rule(ctx: Any, *operands: Any, cond_jaxpr: Any, **params: Any) -> Any:
        batched = bool(cond_jaxpr.out_avals[0].shape)
        ours = any(isinstance(effect, effect_type) for effect in cond_jaxpr.effects)
        if not (batched and ours):
            return entry.rule(ctx, *operands, cond_jaxpr=cond_jaxpr, **params)
        loop = _batched_while(cond_jaxpr=cond_jaxpr, **params)
        # Inside shard_map: what stopped rows keep varies as the condition does, which
        # the carry's types do not say. The program has been checked before.
        fixed = _core.ManualAxisType()
        plain = [
            aval.update(manual_axis_type=fixed) if hasattr(aval, "mat") else aval
            for aval in ctx.avals_in
        ]
        inner = ctx.replace(avals_in=plain)
        with _config._check_vma(False):
            outs = lower_by(inner, loop, *operands)
        ctx.set_tokens_out(inner.tokens_out)
        return outs

    table[jax.lax.while_p] = type(entry)(rule, entry.inline)


def _batched_while(
    *, cond_jaxpr: Any, body_jaxpr: Any, cond_nconsts: int, body_nconsts: int
) -> Callable[..., list[Any]]:
    """The loop with its condition moved into its body, and rows that stop."""
    condition, body = _core.jaxpr_as_fun(cond_jaxpr), _core.jaxpr_as_fun(body_jaxpr)

    def chosen(goes_on: Any, new: Any, old: Any) -> Any:
        rows = jax.lax.broadcast_in_dim(goes_on, new.shape, range(goes_on.ndim))
        return jax.lax.select(rows, new, old)

    def loop(*operands: Any) -> list[Any]:
        cond_consts = operands[:cond_nconsts]
        body_consts = operands[cond_nconsts : cond_nconsts + body_nconsts]
        start = operands[cond_nconsts + body_nconsts :]

        def again(state: Any) -> Any:
            goes_on, carry = state
            new = body(*body_consts, *carry)
            carry = [chosen(goes_on, n, c) for n, c in zip(new, carry, strict=True)]
            (still,) = condition(*cond_consts, *carry)
            return goes_on & still, carry

        (first,) = condition(*cond_consts, *start)
        _, carry = jax.lax.while_loop(
            lambda state: state[0].any(), again, (first, list(start))
        )
        return list(carry)

    return loop


def tokens() -> list[Any]:
    """Of the programs with effects that this thread has dispatched last."""
    held = _dispatch.runtime_tokens
    return [*held.current_tokens.values(), *held.output_runtime_tokens.values()]


def wait_for_effects(
    is_failure: Callable[[BaseException], bool] = lambda error: False,
) -> list[BaseException]:
    """Waits for what this thread has dispatched, as far as effects tell.

    Gives what programs failed with, each once: JaxRuntimeErrors, and what `is_failure`
    knows. JAX's own wait stops at the first that failed (0.10.2), and there fails again
    the next time.
    """
    found: dict[str, BaseException] = {}
    for token in tokens():
        try:
            token.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            found.setdefault(str(error), error)
        except (KeyboardInterrupt, SystemExit) as error:
            if not is_failure(error):
                raise
            found.setdefault(str(error), error)
    _dispatch.runtime_tokens.clear()
    return list(found.values())


def drop_failed_token(effect: Any) -> str | None:
    """Forgets this thread's token of `effect` if it is that of a program that failed.

    Gives what the program failed with. Does not wait for one that is under way.
    """
    tokens = _dispatch.runtime_tokens.current_tokens
    # Not by look-up: that would ask for the effect's hash, which asks for this.
    token = next((t for e, t in list(tokens.items()) if _is_same(e, effect)), None)
    buffer = getattr(token, "_buf", None)
    if buffer is None or not buffer.is_ready():
        return None
    try:
        buffer.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        # In place, since JAX is about to look into this dictionary; and what is put
        # back has hashes of its own.
        kept = [(e, t) for e, t in tokens.items() if not _is_same(e, effect)]
        tokens.clear()
        tokens.update(kept)
        return str(error)
    return None


def _is_same(effect: Any, other: Any) -> bool:
    """Without asking for a hash."""
    return effect is other or effect is getattr(other, "stands_for", other)


# --- What a thread dispatches (_reraise) ---------------------------------------------

# `hook(function, args, kwargs, results)` after each dispatch on JAX's fast path. The
# calling thread's own stands in for the process's, which `jax.debug_nans` sets.
POST_HOOK = _api._post_hook_state

_telling = threading.Lock()
_is_telling = False


def tell_of_dispatches(tell: Callable[[Sequence[Any], Sequence[Any]], None]) -> None:
    """From now on calls `tell(results, tokens)` after each dispatch that JAX makes in
    Python: the first of each program, and all of those with effects. Once a process.

    Tokens are those of effects, for JAX forgets them when the next program comes.
    """
    global _is_telling
    if _is_telling:
        return
    with _telling:
        if _is_telling:
            return
        _is_telling = True
        plain = _pxla.ExecuteReplicated.__call__

        @functools.wraps(plain)
        def call(self: Any, *args: Any) -> Any:
            results = plain(self, *args)
            tell(results, _tokens_of(self))
            return results

        _pxla.ExecuteReplicated.__call__ = call


def _tokens_of(program: Any) -> list[Any]:
    """Those that the calling thread's last dispatch of a program has left."""
    if not (
        program.has_unordered_effects
        or program.ordered_effects
        or program.has_host_callbacks
    ):
        return []
    tokens = _dispatch.runtime_tokens
    found = [tokens.output_runtime_tokens.get(d) for d in program._local_devices]
    # Not by look-up, for the sake of hashes that heal (see `drop_failed_token`).
    for effect, token in list(tokens.current_tokens.items()):
        if any(_is_same(effect, ordered) for ordered in program.ordered_effects):
            found.append(token)
    return [token for token in found if token is not None]


def is_token_ready(token: Any) -> bool:
    """Of the token of an ordered effect; of others that is not known."""
    array = getattr(token, "_buf", None)
    return array is not None and bool(array.is_ready())


def forget_tokens(given: Sequence[Any]) -> None:
    """JAX's next wait for effects passes these tokens over."""
    tokens = _dispatch.runtime_tokens
    numbers = set(map(id, given))
    for latest in (tokens.output_runtime_tokens, tokens.current_tokens):
        kept = [(key, t) for key, t in list(latest.items()) if id(t) not in numbers]
        if len(kept) < len(latest):
            latest.clear()
            latest.update(kept)


# --- dtypes (_spec, _coerce) -------------------------------------------------------


def is_key_dtype(dtype: Any) -> bool:
    return bool(_dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def canonical_dtype(dtype: Any) -> Any:
    """The dtype that JAX uses for this one with the present x64 setting."""
    return _dtypes.canonicalize_dtype(dtype)


def key_data_shape(dtype: Any) -> tuple[int, ...]:
    """Shape of the uint32 block behind one typed PRNG key."""
    return tuple(dtype._impl.key_shape)


def data_of(array: Any) -> Any:
    """The array itself; of typed keys that of their blocks."""
    return getattr(array, "_base_array", array)


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
    """Ties `thing` to the executable that comes out of this lowering.

    A module that is lowered to be exported has no executable, and may be called as
    long as the process lives.
    """
    if is_for_export(ctx):
        _exported.append(thing)
    else:
        ctx.module_context.add_keepalive(thing)


_exported: list[Any] = []


def is_for_export(ctx: Any) -> bool:
    return bool(ctx.module_context.lowering_parameters.for_export)


def executables_are_shared() -> bool:
    """Whether one process's executable is to run in all, and is kept by its text."""
    return bool(_config.share_binary_between_hosts.value)


def run_where_dispatched(ctx: Any) -> None:
    """Has the program run on the thread that dispatches it, if it is for the CPU.

    XLA's runtime does so with a program that was compiled with host callbacks, which is
    how JAX's own callbacks get it. Any callable in their list will do: only custom
    calls of JAX's own ask for one. A program that is exported must not have any.
    """
    module = ctx.module_context
    if is_for_export(ctx) or not is_for_cpu(ctx):
        return
    if _not_called not in module.host_callbacks:
        module.add_host_callback(_not_called)


def _not_called(*args: Any) -> Any:
    """Stands among the host callbacks. One for all programs, since JAX's caches of
    executables compare by it.
    """
    raise AssertionError("hostcall: a host callback that stands for none was called")


def host_callback_handler() -> Any | None:
    """JAX's handler of buffer callbacks on CPUs (native/host_callback.h)."""
    targets = getattr(_xla_client, "custom_call_targets", None)
    if targets is None:
        return None
    return targets("cpu").get("xla_buffer_python_cpu_callback", {}).get("execute")


def lowering_client(ctx: Any) -> Any | None:
    """The client that the program is lowered for; None in a cross-lowering."""
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
    """The devices that the program will run on, in its order; None: just one, or (in
    a region inside a region) not to be told.
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
    """Of the program; also where its devices are not to be told."""
    context = ctx.module_context.axis_context
    if isinstance(context, _sharding_impls.ShardingContext):
        return int(context.num_devices)
    return len(program_devices(ctx) or (None,))


def spans_processes(ctx: Any) -> bool:
    """Whether other processes run the program too, as far as can be told."""
    devices = program_devices(ctx)
    if devices is not None:
        return len({device.process_index for device in devices}) > 1
    mesh = manual_mesh(ctx)
    n = number_of_devices(ctx) if mesh is None else mesh.size
    return n > 1 and jax.process_count() > 1


class Source(Protocol):
    """The device of a program over several processes whose results all take.

    Attributes:
        more_avals: of the results that the call adds to the function's.
    """

    @property
    def more_avals(self) -> list[Any]: ...
    def share(
        self,
        ctx: Any,
        token: Any | None,
        results: Sequence[Any],
        avals: Sequence[Any],
        has_side_effect: bool,
    ) -> tuple[list[Any], Any | None]: ...


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
    source: Source | None = None,
) -> tuple[list[Any], Any | None]:
    """Emits the call and gives (results, token).

    With `token` the first operand, and with `returns_token` the first result, is a
    token. Buffers are row-major. In a program over several devices every device makes
    the call, on whole values (on its own, in a region that is manual already).
    `aliases` says which operand's memory may become which result's.
    """

    def emit(token: Any | None, operands: Sequence[Any], more: Sequence[Any]) -> Any:
        return custom_call(
            ctx,
            target,
            token,
            operands,
            ctx.avals_in,
            [*ctx.avals_out, *more],
            returns_token=returns_token,
            has_side_effect=has_side_effect,
            attributes=attributes,
            aliases=aliases,
        )

    if manual_mesh(ctx) is not None or number_of_devices(ctx) == 1:
        return emit(token, operands, ())  # type: ignore[no-any-return]

    def in_region(token: Any | None, operands: Sequence[Any]) -> Any:
        if source is None:
            return emit(token, operands, ())
        results, token = emit(token, operands, source.more_avals)
        avals = physical_avals(ctx.avals_out)
        return source.share(ctx, token, results, avals, has_side_effect)

    return _emit_on_each_device(ctx, in_region, token, operands, returns_token)


def custom_call(
    ctx: Any,
    target: str,
    token: Any | None,
    operands: Sequence[Any],
    avals_in: Sequence[Any],
    avals_out: Sequence[Any],
    *,
    returns_token: bool,
    has_side_effect: bool,
    attributes: dict[str, np.uint64],
    aliases: dict[int, int] | None,
) -> tuple[list[Any], Any | None]:
    """The operation itself, on whole values; gives (results, token)."""
    abstract_token = _core.abstract_token
    if aliases:
        first = int(token is not None)
        aliases = {i + first: o + returns_token for i, o in aliases.items()}
    if token is not None:
        operands, avals_in = [token, *operands], [abstract_token, *avals_in]
    if returns_token:
        avals_out = [abstract_token, *avals_out]
    op = _ffi.build_ffi_lowering_function(
        target, has_side_effect=has_side_effect, operand_output_aliases=aliases
    )(ctx.replace(avals_in=avals_in, avals_out=avals_out), *operands, **attributes)
    if number_of_devices(ctx) > 1 or manual_mesh(ctx) is not None:
        _mlir.set_sharding(ctx.module_context, op, _closed((), avals_out or [None]))
    results = list(op.results)
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
    emit: Callable[[Any | None, Sequence[Any]], tuple[list[Any], Any | None]],
    token: Any | None,
    operands: Sequence[Any],
    returns_token: bool,
) -> tuple[list[Any], Any | None]:
    """The call inside a region that is manual over all devices, on whole values.

    The plain way, a call that is placed on one device by a maximal sharding, is not to
    be had: the partitioner keeps that for the targets of JAX's own callbacks, drops it
    from any other, and then refuses those with a side effect.
    """
    cache = ctx.module_context.sharding_attr_cache
    mesh_shape = (("hostcall", number_of_devices(ctx)),)
    takes_token = token is not None
    values = [token, *operands] if takes_token else list(operands)
    avals_in = [_core.abstract_token] * takes_token + list(ctx.avals_in)
    avals_out = [_core.abstract_token] * returns_token + list(ctx.avals_out)
    types, _ = _mlir.ir_tree_registry.flatten(
        [_mlir._aval_to_ir_types(ctx.module_context, aval) for aval in avals_out]
    )
    region = _sdy.ManualComputationOp(
        types,
        values,
        _closed(mesh_shape, avals_in).build(cache),
        _closed(mesh_shape, avals_out).build(cache),
        _sdy.ManualAxesAttr.get([_ir.StringAttr.get("hostcall")]),
    )
    block = _ir.Block.create_at_start(region.body, [value.type for value in values])
    with _ir.InsertionPoint(block):
        inner = list(block.arguments)
        results, token = emit(inner.pop(0) if takes_token else None, inner)
        _sdy.return_([token, *results] if returns_token else results)
    results = list(region.results)
    return (results[1:], results[0]) if returns_token else (results, None)


def partition_id() -> Any:
    """The number of the device that runs the program, among the program's."""
    return _hlo.partition_id()


def lower_traced(
    ctx: Any, f: Callable[..., Any], avals: Sequence[Any], values: Sequence[Any]
) -> list[Any]:
    """What JAX's function `f` makes of values of these avals."""
    avals = [_core.ShapedArray(aval.shape, aval.dtype) for aval in avals]
    inner = ctx.replace(primitive=None, avals_in=avals, avals_out=None)
    results = _mlir.lower_fun(f)(inner, *values)
    return list(_mlir.ir_tree_registry.flatten(results)[0])


def max_over_devices(ctx: Any, value: Any, aval: Any, n: int) -> Any:
    """The greatest of the program's `n` devices, in a region manual over all."""
    groups = np.arange(n, dtype=np.int64).reshape(1, n)
    op = _hlo.AllReduceOp(
        [value.type],
        [value],
        replica_groups=_ir.DenseElementsAttr.get(groups),
        channel_handle=_hlo.ChannelHandle.get(
            ctx.module_context.new_channel(), _mlir.DEVICE_TO_DEVICE_TYPE
        ),
        use_global_device_ids=_ir.BoolAttr.get(True),
    )
    scalar = _ir.RankedTensorType.get([], value.type.element_type)
    block = op.regions[0].blocks.append(scalar, scalar)
    with _ir.InsertionPoint(block):
        _hlo.return_([_hlo.maximum(*block.arguments)])
    _mlir.set_sharding(ctx.module_context, op, _closed((), [aval]))
    return op.result


emit_python_callback = _callback.emit_python_callback  # as it was before any patch


def emit_jax_callback(
    ctx: Any,
    run: Callable[..., Sequence[np.ndarray]],
    operands: Sequence[Any],
    *,
    token: Any | None,
    has_side_effect: bool,
    sharding: Any,
    partitioned: bool = False,
) -> tuple[list[Any], Any | None]:
    """JAX's own callback, for platforms that the engine does not serve.

    Gives (results, token). `run` gets one array an operand, and gives one a result.
    """
    place = _callback._callback_op_sharding(
        ctx.module_context.axis_context, sharding, ctx.avals_out
    )
    results, token_out, _ = emit_python_callback(
        ctx,
        run,
        token,
        list(operands),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=has_side_effect,
        returns_token=token is not None,
        partitioned=partitioned,
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


FIXED, DEVICE, GUARD, WITH = range(4)


def ambient_settings() -> list[tuple[int, Any, Any, Any, Any, Any]]:
    """(kind, setting, its swap, set and get, value) of what host code has its own of.

    A callback may run on the thread that dispatched the program, inside that
    thread's `jax.default_device` and `jax.set_mesh`, which it must not inherit. What
    a setting of the kinds DEVICE and GUARD is set to, the call's plan knows.
    """
    home = _config if hasattr(_config, "device_context") else _mesh
    abstract, concrete = home.abstract_mesh_context_manager, home.device_context

    def entry(kind: int, setting: Any, value: Any) -> Any:
        of = type(setting)
        return kind, setting, of.swap_local, of.set_local, of.get_local, value

    return [
        entry(DEVICE, default_device, None),
        entry(FIXED, abstract, _mesh.empty_abstract_mesh),
        # Whoever sets this one has set the one before.
        entry(WITH, concrete, _mesh.empty_concrete_mesh),
        entry(GUARD, _config.no_execution, None),
    ]


# JAX 0.10 leaves its own callbacks the meshes of the thread that dispatched, and the
# interpreter of Pallas looks there for the kind of TPU.
CALLBACKS_HIDE_MESHES = hasattr(_callback, "mesh_lib")

# What `get_local` gives for a setting that the calling thread has not set.
UNSET = _config.config_ext.unset


class ExecutionGuard:
    """Asks about programs that a callback starts, before they are executed.

    Stands in for the value of `jax_no_execution`, whose truth JAX asks for before it
    executes a program, or puts one on its fast path. The setting is part of the key
    of JAX's caches, so programs that were on the fast path before are asked about
    again; those that have passed get a fast path of their own.
    """

    def __init__(self, check: Callable[[Sequence[Any]], None]) -> None:
        """`check` gets a program's devices, and raises what refuses it."""
        self._check = check

    def __bool__(self) -> bool:
        _refuse_across(sys._getframe(1))
        self._check(_devices_of_what_asks(sys._getframe(1)))
        return False


def _devices_of_what_asks(frame: Any) -> Sequence[Any]:
    """Those of the program that JAX is about to execute, or to put on its fast path."""
    return getattr(_program_that_asks(frame), "_local_devices", ())


def _program_that_asks(frame: Any) -> Any:
    program = frame.f_locals.get("self")
    if program is None:
        program = getattr(frame.f_locals.get("executable"), "unsafe_call", None)
    return program


# --- A process that may run no more programs with others (_job) ----------------------

_refusal_across: Callable[[], Exception] | None = None


class _AcrossGuard:
    """Stands in for settings of the whole process that JAX asks for.

    `jax_no_execution` as `ExecutionGuard` does. `jax_no_tracing` is asked for when a
    jitted function is called that is not on the fast path: there the arguments are
    looked at, so that nothing is compiled (which may take minutes) only to be refused.
    """

    def __init__(self, before: Any) -> None:
        self._before = before

    def __bool__(self) -> bool:
        frame = sys._getframe(1)
        if frame.f_code.co_name == "_get_fastpath_data":
            return True  # of a program that has been dispatched: not the fast path
        _refuse_across(frame)
        return bool(self._before)


def refuse_programs_across(refusal: Callable[[], Exception]) -> None:
    """From now on programs over several processes raise where they would start.

    Both settings are global, and the first is part of the keys of JAX's caches: every
    program that comes again is traced and compiled again, once.
    """
    global _refusal_across
    _refusal_across = refusal
    for setting in (_config.no_tracing, _config.no_execution):
        setting.set_global(_AcrossGuard(setting.get_global()))


def _refuse_across(frame: Any) -> None:
    if _refusal_across is None:
        return
    program = _program_that_asks(frame)
    if program is None:  # a function, before it is traced: its arguments
        leaves = jax.tree.leaves([frame.f_locals.get(n) for n in ("args", "kwargs")])
        tracer = jax.core.Tracer
        parts = [
            x for x in leaves if isinstance(x, jax.Array) and not isinstance(x, tracer)
        ]
    else:
        parts = [
            *getattr(getattr(program, "in_handler", None), "in_shardings", ()),
            *getattr(getattr(program, "out_handler", None), "out_shardings", ()),
        ]
    if not all(part.is_fully_addressable for part in parts):
        raise _refusal_across()


# --- A forked child (_fork) ----------------------------------------------------------


class _Refusal:
    """Stands in for the value of `jax_no_execution`: no program passes."""

    def __init__(self, refusal: Callable[[], Exception]) -> None:
        self._refusal = refusal

    def __bool__(self) -> bool:
        raise self._refusal()


def refuse_programs(refusal: Callable[[], Exception]) -> None:
    """Ends lowering, compiling and running in this process; tracing goes on.

    For a process in which they would wait for threads that do not exist: MLIR's pool
    and XLA's. JAX's functions are replaced, and nothing puts them back.
    """

    def refuse(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise refusal()

    _mlir.lower_jaxpr_to_module = refuse
    _compiler.compile_or_get_cached = refuse
    setting, guard = _config.no_execution, _Refusal(refusal)
    setting.set_global(guard)
    if setting.get_local() is not UNSET:  # a callback's: it has forked
        setting.set_local(guard)


def put_on_device(array: np.ndarray, device: Any, committed: bool = True) -> jax.Array:
    """NumPy to jax.Array in 3 us, where `jax.device_put` takes 20 to 50.

    The result may share the array's memory: nobody may write to that any more. To
    JAX's transfer guards it is an explicit transfer, as `jax.device_put` is.
    """
    aval = ShapedArray(array.shape, array.dtype)
    sharding = _single_device_sharding(device)
    guard = _guard_lib.thread_local_state()
    before = guard.explicit_device_put
    guard.explicit_device_put = True
    try:
        return _xla_client.batched_device_put(
            aval, sharding, [array], [device], committed
        )
    finally:
        guard.explicit_device_put = before


def guards_transfers_to_devices() -> bool:
    """Whether an implicit transfer to a device may be logged or refused here."""
    for state in (_guard_lib.thread_local_state(), _guard_lib.global_state()):
        level = state.host_to_device
        if level is not None:  # the thread's own setting hides the process's
            return bool(level != _guard_lib.TransferGuardLevel.ALLOW)
    return False


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


# --- Drop-ins (_primitives/drop_in, _callbacks, debug) -------------------------------

IO_EFFECT = _callback._IOEffect
ORDERED_IO_EFFECT = _callback._OrderedIOEffect
DEBUG_EFFECT = _debugging.debug_effect
ORDERED_DEBUG_EFFECT = _debugging.ordered_debug_effect

# Where JAX logs that a callback failed. Equinox filters what the first one says.
callback_logger = _callback.logger
debug_logger = _debugging.logger

FlatCallback = _callback._FlatCallback  # what JAX's own primitives hold


def flatten_with_refs(tree: Any) -> tuple[list[Any], Any]:
    """As JAX flattens the arguments of debug callbacks: views of Refs are opened too,
    where the installed JAX does so.
    """
    registry = getattr(_tree_util, "tracing_registry", None)
    leaves, treedef = (registry or _tree_util.default_registry).flatten(tree)
    return list(leaves), treedef


def is_traceable(leaf: Any) -> bool:
    """Whether JAX's debug callbacks take this leaf as an array, and not as static."""
    try:
        _core.shaped_abstractify(leaf)
    except (AssertionError, TypeError):
        return False
    return True


def physical_avals(avals: Sequence[Any]) -> list[Any]:
    """With the uint32 blocks behind typed keys; float0, as in programs, is bool."""
    return [
        aval.update(dtype=np.dtype(np.bool_)) if aval.dtype == _dtypes.float0 else aval
        for aval in map(_core.physical_aval, avals)
    ]


def to_host(operand: Any) -> np.ndarray:
    """An operand of an eager call, with the dtype that JAX gives it."""
    if isinstance(operand, jax.Array):
        return to_numpy(operand)
    if getattr(operand, "dtype", None) == _dtypes.float0:
        return np.zeros(operand.shape, np.bool_)
    array = np.asarray(operand, _dtypes.canonicalize_dtype(_dtypes.dtype(operand)))
    return np.ascontiguousarray(array).reshape(array.shape)


def to_numpy(array: jax.Array) -> np.ndarray:
    """The values of an array. To JAX's transfer guards it is an explicit transfer, as
    `jax.device_get` is.
    """
    guard = _guard_lib.thread_local_state()
    before = guard.explicit_device_get
    guard.explicit_device_get = True
    try:
        return np.asarray(array)
    finally:
        guard.explicit_device_get = before


def _make_tokens(primitive: Any, operands: Any, params: Any) -> None:
    """The tokens of an eager ordered program, as explicit transfers: JAX makes a
    missing one implicitly, which a transfer guard refuses.
    """
    avals = [jax.typeof(operand) for operand in operands]
    _, effects = primitive.abstract_eval(*avals, **params)
    devices = next((x.devices() for x in operands if isinstance(x, jax.Array)), None)
    tokens = _dispatch.runtime_tokens
    for effect in _effects.ordered_effects.filter_in(effects):
        if effect not in tokens.current_tokens:
            with _config.explicit_device_put_scope():
                tokens.get_token_input(effect, list(devices or {here()}))


def apply_primitive(primitive: Any, *operands: Any, **params: Any) -> Any:
    """Compiles one equation and runs it; equal ones find what was compiled."""
    if guards_transfers_to_devices():
        _make_tokens(primitive, operands, params)
    return _dispatch.apply_primitive(primitive, *operands, **params)


def refuse_special(arrays: Sequence[jax.Array], what: Callable[[], str]) -> None:
    """Raises as JAX does for what `jax_debug_nans` and `jax_debug_infs` forbid.

    JAX looks at what its programs give. Jitted functions whose results have a NaN are
    run again without jit, to name the operation that gave it: that is found here too.
    """
    if not _dispatch.needs_check_special():
        return
    blocks = [shard.data for array in arrays for shard in array.addressable_shards]
    try:
        _dispatch.check_special("", blocks)
    except _dispatch.InternalFloatingPointError as found:
        text = f"invalid value ({found.ty}) encountered in {what()}"
        raise FloatingPointError(text) from None


def refuse_vmap(primitive: Any, operands: Any, dims: Any) -> None:
    """Raises as JAX does for a callback without a `vmap_method`."""
    _ffi.ffi_batching_rule(primitive, operands, dims, vmap_method=None, result_avals=())


def unroll(primitive: Any, operands: Any, dims: Any, params: dict[str, Any]) -> Any:
    """JAX's batching rule of debug callbacks: an equation a row."""
    return _debugging.debug_batching_rule(operands, dims, primitive=primitive, **params)


def keep_under_remat(primitive: Any) -> None:
    """JAX's rule of debug callbacks: staged out where remat computes their inputs."""
    rule = _debugging._debug_partial_eval_custom

    def partial_eval(saveable: Any, unknown: Any, inst: Any, eqn: Any) -> Any:
        return rule(saveable, unknown, inst, eqn, primitive)

    partial_eval_rules[primitive] = partial_eval


def discharge_in_place(primitive: Any) -> None:
    """The equation takes the value of a Ref, and changes none."""
    own = _debugging._debug_callback_state_discharge_rule
    names = own.__code__.co_varnames[: own.__code__.co_argcount]
    leading = len(names)  # (ctx) in 0.12, (in_avals, out_avals) in 0.10

    def rule(*args: Any, **params: Any) -> Any:
        values = args[leading:]
        return values, primitive.bind(*values, **params)

    _discharge.register_discharge_rule(primitive)(rule)


def in_pallas_kernel() -> bool:
    """Whether the calling thread is tracing a Pallas kernel: device code, where only
    JAX's own primitives have rules.
    """
    pallas = sys.modules.get("jax._src.pallas.core")
    if pallas is None:
        return False
    holder = getattr(pallas, "_grid_context", None)
    if holder is not None:
        return holder.value is not None
    return pallas._pallas_tracing_env.grid_context is not None


def place_of_callback(ctx: Any, sharding: Any) -> Any:
    """JAX's check of a callback's `sharding=`, with its texts; gives the annotation."""
    return _callback._callback_op_sharding(
        ctx.module_context.axis_context, sharding, ctx.avals_out
    )


def mark_place(ctx: Any, place: Any) -> None:
    """Writes into the program which device makes the next call.

    On a constant that nothing uses: the call itself can't bear the mark (see
    `_emit_on_each_device`), and readers of StableHLO look for it.
    """
    constant = _hlo.ConstantOp(_ir.DenseElementsAttr.get(np.zeros((), np.int32)))
    first = _sharding_impls.SdyArrayList((place.shardings[0],))
    _mlir.set_sharding(ctx.module_context, constant, first)


def automatic_axes(ctx: Any) -> set[Any]:
    """Mesh axes over which the enclosing shard_map is not manual."""
    context = ctx.module_context.axis_context
    if not isinstance(context, _sharding_impls.SPMDAxisContext):
        return set()
    return set(context.mesh.axis_names) - set(context.manual_axes)


def on_first_of(axes: Sequence[Any], f: Callable[[], Any]) -> Any:
    """`f()`, on the devices that are first along these axes."""

    def body() -> Any:
        first = jax.lax.axis_index(tuple(axes)) == 0
        return jax.lax.cond(first, f, lambda: [])

    return _shard_map.shard_map(body, in_specs=(), out_specs=[])()


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


# --- What `patch_jax` replaces (_patch, _hooks) --------------------------------------

pure_callback_p = _callback.pure_callback_p
io_callback_p = _callback.io_callback_p
debug_callback_p = _debugging.debug_callback_p
debug_print_p = _debugging.debug_print_p
buffer_callback_p = _buffer_callback.buffer_callback_p
MODULES_WITH_EMIT = ("jax._src.callback", "jax.interpreters.mlir")


def replace_lowering(primitive: Any, rule: Callable[..., Any]) -> Callable[[], None]:
    """Lowers a primitive of JAX's by `rule` where it is served; gives what ends that.

    For other platforms, and for several at once, JAX's own rule stays. JAX lowers each
    equation of these primitives by itself, as `register_lowering` has it for ours.
    """
    tables: list[dict[Any, Any]] = [_mlir._lowerings]
    if primitive not in _mlir._lowerings:
        specific = _mlir._platform_specific_lowerings
        tables = [specific[p] for p in SERVED if primitive in specific[p]]
    replaced = []

    def replace_in(table: dict[Any, Any]) -> None:
        entry = table[primitive]

        def either(ctx: Any, *operands: Any, **params: Any) -> Any:
            chosen = rule if is_served(ctx) else entry.rule
            return chosen(ctx, *operands, **params)

        table[primitive] = type(entry)(either, entry.inline)
        replaced.append((table, entry, table[primitive]))

    for table in tables:
        replace_in(table)

    def restore() -> None:
        for table, entry, ours in replaced:
            if table[primitive] is ours:  # else somebody came after us
                table[primitive] = entry

    return restore


def print_callback(params: dict[str, Any]) -> Callable[..., Any]:
    """What JAX's debug_print primitive calls with its arrays."""
    line = _debugging.partial(
        _debugging._format_print_callback,
        params["fmt"],
        dict(params["np_printoptions"]),
        params["has_placeholders"],
        params["logging_record"],
    )
    flat: Callable[..., Any] = _debugging._make_flat_callback(
        params["in_tree"], line, params["static_args"]
    )
    return flat


def device_of(ctx: Any, annotation: Any) -> Any | None:
    """The device that an annotation of JAX's puts a callback on; None where none."""
    devices = program_devices(ctx)
    entries = getattr(annotation, "shardings", None)
    if devices is None or not entries or not entries[0].logical_device_ids:
        return None
    return devices[entries[0].logical_device_ids[0]]


def back_ends_started() -> bool:
    """Takes no lock: a forked child asks, where nobody may be left to release it."""
    return bool(_xla_bridge._backends)


def clients() -> list[Any]:
    """Those of the process's back ends that have been started."""
    return list(_xla_bridge._backends.values())


# --- The old module (host_callback, _outside_call) -----------------------------------

partial_eval_by_trace = _pe.custom_partial_eval_rules  # under linearize
pretty_printer = _pretty_printer
is_undefined_primal = _ad.is_undefined_primal


def is_known(tracer: Any) -> bool:
    """Whether partial evaluation knows this value."""
    return bool(tracer.is_known())


_old_flags: dict[str, Any] = {}


def define_old_flags(flags: dict[str, tuple[bool | int, str]]) -> None:
    """Settings that JAX had: by `jax.config.update`, and from the environment."""
    for name, (default, help_text) in flags.items():
        if name in _old_flags:
            continue
        if isinstance(default, bool):
            from_env = _config.bool_env(name.upper(), default)
            _old_flags[name] = _config.bool_flag(name, from_env, help=help_text)
        else:
            from_env = _config.int_env(name.upper(), default)
            _old_flags[name] = _config.int_flag(name, from_env, help=help_text)


def old_flag(name: str) -> Any:
    return _old_flags[name].value
