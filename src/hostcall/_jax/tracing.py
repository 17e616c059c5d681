"""Primitives, their effects and rules, and the values that these see while JAX traces a
program.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
from jax.interpreters import ad as _ad
from jax.interpreters import batching as _batching
from jax.interpreters import mlir as _mlir
from jax.interpreters import partial_eval as _pe
from jax.interpreters import xla as _xla

from hostcall._jax import types as _t
from hostcall._jax.door import JAX_VERSION
from hostcall._jax.door import array as _array
from hostcall._jax.door import batching as _src_batching
from hostcall._jax.door import config as _config
from hostcall._jax.door import core as _core
from hostcall._jax.door import debugging as _debugging
from hostcall._jax.door import discharge as _discharge
from hostcall._jax.door import dispatch as _dispatch
from hostcall._jax.door import effects as _effects
from hostcall._jax.door import ffi as _ffi
from hostcall._jax.door import pretty_printer as _pretty_printer
from hostcall._jax.door import util as _util
from hostcall._jax.versions import axes_of, varying_over

Arrays: TypeAlias = Sequence[jax.Array]
# For each operand the axis of the batch, or None.
Dims: TypeAlias = Sequence[int | None]


ShapedArray: TypeAlias = jax.core.ShapedArray
moveaxis = _src_batching.moveaxis
check_arg = _dispatch.check_arg
# Compiles one equation and runs it; equal equations share the compiled program.
apply_primitive = _xla.apply_primitive
aval_of = jax.typeof


# Whether the calling thread is not tracing. Traced values exist only while it is.
traces_nothing = _core.trace_state_clean


def are_arrays(operands: Sequence[object]) -> bool:
    """Whether JAX would take these operands as they are, and knows their values."""
    return {*map(type, operands)} <= _ARRAYS  # a generator would take twice as long


_ARRAYS = {_array.ArrayImpl}


def is_staged() -> bool:
    """Whether what JAX computes now has no value yet: under jit, and in the bodies of
    loops. Under vmap or grad alone it has one, and in a shard_map without jit.
    """
    if traces_nothing():
        return False
    with jax.transfer_guard("allow"):
        return not _core.is_concrete(jax.numpy.zeros(()))


batchers = _batching.primitive_batchers
instantiate_zeros = _ad.instantiate_zeros
partial_eval_rules = _pe.partial_eval_jaxpr_custom_rules  # under remat
jvps = _ad.primitive_jvps
transposes = _ad.primitive_transposes


def zero_tangent(primal: jax.Array) -> _t.Zero:
    return _t.Zero(jax.typeof(primal).to_tangent_aval())


def is_literal(atom: _t.Atom) -> bool:
    return isinstance(atom, _core.Literal)


# The primitives of host calls, and how each is lowered. JAX's own ones are among them
# while `replace_lowering` lowers these, and then in JAXS_CALLS too.
ENGINE_CALLS: dict[_t.Primitive, _t.LoweringRule] = {}
JAXS_CALLS: set[_t.Primitive] = set()

# The effects that nothing but an engine's call has.
own_effects = _effects.EffectTypeSet()


def register_effect(effect_type: type, ordered: bool) -> None:
    """Allows an effect in all of JAX's transformations that hostcall supports."""
    kinds = [
        own_effects,
        _mlir.lowerable_effects,
        _effects.control_flow_allowed_effects,
        _effects.custom_derivatives_allowed_effects,
        _effects.remat_allowed_effects,
        # Without this, partial evaluation under grad drops effectful equations of a
        # scan that have no outputs.
        _effects.partial_eval_kept_effects,
    ]
    if ordered:
        kinds += [_effects.ordered_effects, _effects.shardable_ordered_effects]
    for effects in kinds:
        effects.add_type(effect_type)


# Whether programs with this effect run one after another on each device.
is_ordered = _effects.ordered_effects.contains


# (used outputs, equation) -> (used inputs, the equation that remains or None). In 0.12
# there is one more argument in the middle, a list of live inputs.
dead_code_rules = _pe.dce_rules


# Makes JAX's caches of traced equations hold parameters of this type weakly. The caches
# are global; otherwise they would keep the user's function alive. The type must allow
# weak references.
hold_weakly_in_caches = _util.weakref_cache_key_types.add


def result_avals(
    avals: Sequence[_t.Aval], operands: Sequence[_t.Aval], pure: bool
) -> list[_t.Aval]:
    """Result avals on the mesh in context, with the mesh axes over which they vary.

    Inside `shard_map` with its check on, JAX tracks the mesh axes over which each value
    varies. Results of a pure call vary over the axes of its operands. A call with
    effects can tell shards apart (`hc.current()`), so its results vary over all manual
    axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return list(avals)
    varying: frozenset[object] = frozenset()
    if _config._check_vma.value:
        if pure:
            for operand in operands:
                varying |= axes_of(operand)
        else:
            varying = frozenset(mesh.manual_axes)
    sharding = _core.get_cur_mesh_sharding()
    return [varying_over(aval, varying, sharding=sharding) for aval in avals]


def vary_alike(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Casts operands so that all vary over the same mesh axes.

    This matters inside `shard_map` with its check on. A cotangent varies over the axes
    of the results; if an operand varies over fewer, the transpose of this cast sums its
    cotangents over the devices that hold copies.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not _config._check_vma.value:
        return list(operands)
    varying = [axes_of(jax.typeof(operand)) for operand in operands]
    everything = frozenset[object]().union(*varying)
    alike: list[jax.Array] = []
    for operand, axes in zip(operands, varying, strict=True):
        lacking = tuple(everything - axes)
        if lacking:
            operand = jax.lax.pcast(operand, lacking, to="varying")
        alike.append(operand)
    return alike


def shard_alike(value: jax.Array, aval: _t.Aval) -> jax.Array:
    """`value` resharded as `aval` says; explicit mesh axes make sharding part of the
    type.
    """
    wanted = aval.sharding
    if wanted.mesh.empty or jax.typeof(value).sharding == wanted:
        return value
    return jax.sharding.reshard(value, wanted)


def rows_sharded_alike(
    results: Arrays, operands: Arrays, dims: Dims, place: int = 0
) -> list[jax.Array]:
    """Results with their axis of rows at `place`, sharded along it as the operands are
    along theirs. JAX wants that of all values of a `vmap`, if a mesh axis is explicit.
    """
    pairs = zip(operands, dims, strict=True)
    # All operands that have rows shard them alike, so the first one tells.
    operand, dim = next(pair for pair in pairs if pair[1] is not None)
    sharding = jax.typeof(operand).sharding
    mesh_axis = sharding.spec[dim]
    if mesh_axis is None:
        return list(results)
    in_front = [None] * place
    wanted = jax.NamedSharding(sharding.mesh, jax.P(*in_front, mesh_axis))
    return [jax.sharding.reshard(result, wanted) for result in results]


def replicated(value: jax.Array) -> jax.Array:
    """`value`, whole on each device, if explicit mesh axes shard it."""
    sharding = jax.typeof(value).sharding
    if not any(sharding.spec):
        return value
    everywhere = jax.NamedSharding(sharding.mesh, jax.P())
    return jax.sharding.reshard(value, everywhere)


# Whether `jax_debug_nans` or `jax_debug_infs` is on.
refuses_special = _dispatch.needs_check_special


def refuse_special(results: Sequence[jax.Array], maker: str) -> None:
    """Raises as JAX does for values that these settings forbid.

    JAX checks the results of its programs. If a jitted function returns a NaN, JAX runs
    it again without jit to name the operation that made it. A host call in that rerun
    is an eager call, and this check names it.
    """
    blocks = [shard.data for result in results for shard in result.addressable_shards]
    try:
        _dispatch.check_special("", blocks)
    except _dispatch.InternalFloatingPointError as nan:
        text = f"invalid value ({nan.ty}) encountered in {maker}"
        raise FloatingPointError(text) from None


def refuse_vmap(primitive: _t.Primitive, operands: Arrays, dims: Dims) -> None:
    """Raises as JAX does for a callback without a `vmap_method`."""
    _ffi.ffi_batching_rule(primitive, operands, dims, vmap_method=None, result_avals=())


def unroll(
    primitive: _t.Primitive, operands: Arrays, dims: Dims, params: _t.Params
) -> tuple[Arrays, Dims]:
    """Applies JAX's batching rule for debug callbacks: one equation for each row."""
    rule = _debugging.debug_batching_rule
    return rule(operands, dims, primitive=primitive, **params)  # type: ignore[no-any-return]


def keep_under_remat(primitive: _t.Primitive) -> None:
    """Gives a primitive JAX's remat rule for debug callbacks.

    The rule keeps the equation in the rematerialized program too, if its inputs are
    available there.
    """
    rule = _debugging._debug_partial_eval_custom
    partial_eval_rules[primitive] = lambda *args: rule(*args, primitive)


def discharge_in_place(primitive: _t.Primitive) -> None:
    """Registers a primitive that reads Refs, and changes none of them."""
    jaxs_rule = _debugging._debug_callback_state_discharge_rule
    # What comes before the values: (ctx) in 0.12, (in_avals, out_avals) in 0.10.
    leading = jaxs_rule.__code__.co_argcount

    def rule(*args: object, **params: object) -> object:
        values = args[leading:]
        return values, primitive.bind(*values, **params)

    _discharge.register_discharge_rule(primitive)(rule)


def in_pallas_kernel() -> bool:
    """Whether the calling thread is tracing a Pallas kernel.

    That is device code, and only JAX's own primitives have lowering rules for it.
    """
    if "jax._src.pallas.core" not in sys.modules:
        return False
    from hostcall._jax.door import pallas

    if JAX_VERSION < (0, 12):
        return pallas._pallas_tracing_env.grid_context is not None
    return pallas._grid_context.value is not None


def on_first_of(axes: Sequence[object], f: Callable[[], Arrays]) -> Arrays:
    """Runs `f()` only on the devices that are first along these mesh axes."""

    def body() -> Arrays:
        is_first = jax.lax.axis_index(tuple(axes)) == 0
        return jax.lax.cond(is_first, f, lambda: [])  # type: ignore[no-any-return]

    mapped = jax.shard_map(body, in_specs=(), out_specs=[])
    return mapped()  # type: ignore[no-any-return]


def manual_over(f: Callable[..., Arrays], values: Arrays) -> Arrays:
    """Runs `f` on whole values, manually over all axes of the mesh around.

    `f` says itself that its results are the same on all devices.
    """
    whole_spec = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(
        f, in_specs=whole_spec, out_specs=whole_spec, check_vma=False
    )
    whole_values = [replicated(value) for value in values]
    return mapped(*whole_values)  # type: ignore[no-any-return]


# --- For host_callback: _compat/removed_module.py, _compat/outside_call.py ------------

partial_eval_by_trace = _pe.custom_partial_eval_rules  # under linearize
pretty_printer = _pretty_printer
is_undefined_primal = _ad.is_undefined_primal


def is_known(tracer: _t.Tracer) -> bool:
    """Whether partial evaluation knows this value."""
    return bool(tracer.is_known())
