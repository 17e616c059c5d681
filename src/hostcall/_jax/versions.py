"""What JAX keeps in one place in one version and elsewhere in another: 0.9.0 to 0.12.

The other files ask for no version. (Where JAX passes other arguments to a rule, the
rule takes both.) A branch ends with the last version that needs it, and can go when
that is out of the range.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import jax
import jaxlib
import numpy as np
from jax.interpreters import mlir as _mlir
from jaxlib.mlir import ir as _ir

from hostcall._jax.door import JAX_VERSION, version_of
from hostcall._jax.door import config as _config
from hostcall._jax.door import core as _core
from hostcall._jax.door import export as _export
from hostcall._jax.door import literals as _literals
from hostcall._jax.door import mesh as _mesh
from hostcall._jax.door import mlir as _src_mlir
from hostcall._jax.door import partial_eval as _src_pe

# --- Jaxprs ---------------------------------------------------------------------------

Jaxpr: TypeAlias = _core.Jaxpr
# One type with the open jaxpr since 0.11.
ClosedJaxpr = _core.ClosedJaxpr if JAX_VERSION < (0, 11) else _core.Jaxpr


def open_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr in a ClosedJaxpr, which JAX has before 0.11; else the jaxpr itself."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def closed_as(jaxpr: Jaxpr, new: Jaxpr) -> Jaxpr:
    """An open jaxpr made of `jaxpr`, closed if that is."""
    return new if open_jaxpr(jaxpr) is jaxpr else jaxpr.replace(jaxpr=new)


def changed(
    jaxpr: Jaxpr, consts: Sequence[jax.Array] | None = None, **changes: Any
) -> Jaxpr:
    """The same with other constants, other parts of the open jaxpr, and the effects
    that follow from these.
    """
    inner = open_jaxpr(jaxpr)
    changes["effects"] = _src_pe.make_jaxpr_effects(
        changes.get("constvars", inner.constvars),
        changes.get("invars", inner.invars),
        changes.get("outvars", inner.outvars),
        changes.get("eqns", inner.eqns),
    )
    changed_consts = {} if consts is None else {"consts": list(consts)}
    if inner is jaxpr:
        return jaxpr.replace(**changes, **changed_consts)
    return jaxpr.replace(jaxpr=inner.replace(**changes), **changed_consts)


# --- Settings -------------------------------------------------------------------------

if JAX_VERSION < (0, 11, 2):
    _home_of_meshes = _config
else:
    _home_of_meshes = _mesh
MESH_SETTINGS = (
    _home_of_meshes.abstract_mesh_context_manager,
    _home_of_meshes.device_context,
)

# Before JAX 0.12 a callback of JAX's own still sees the meshes of the dispatching
# thread, and Pallas's interpreter, which runs in such callbacks, reads the TPU kind
# from them.
CALLBACKS_HIDE_MESHES = JAX_VERSION >= (0, 12)

# The public settings that are part of JAX's trace context, up to 0.10.1, which does not
# say which are.
_IN_OLD_TRACE_CONTEXTS = frozenset(
    (
        *("jax_allow_f16_reductions", "jax_check_static_indices", "jax_custom_vjp3"),
        *("jax_debug_key_reuse", "jax_default_device", "jax_default_matmul_precision"),
        *("jax_disable_jit", "jax_enable_pgle", "jax_enable_x64"),
        "jax_error_checking_behavior_divide",
        *("jax_error_checking_behavior_nan", "jax_error_checking_behavior_oob"),
        *("jax_explicit_x64_dtypes", "jax_high_dynamic_range_gumbel"),
        *("jax_hlo_source_file_canonicalization_regex", "jax_mutable_array_checks"),
        *("jax_no_execution", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion"),
        *("jax_pgle_profiling_runs", "jax_ragged_dot_use_gpu_pallas_triton_lowering"),
        *("jax_random_seed_offset", "jax_remove_size_one_mesh_axis_from_type"),
        *("jax_scan3", "jax_softmax_custom_jvp", "jax_threefry_gpu_kernel_lowering"),
        *("jax_threefry_partitionable", "jax_use_direct_linearize"),
        *("jax_use_shardy_partitioner", "jax_use_simplified_jaxpr_constants"),
        *("jax_xla_profile_version", "check_vma", "eager_constant_folding"),
        "pallas_tpu_interpret_mode_context_manager",
    )
)


def trace_context_names() -> Collection[str]:
    """The names of the settings for whose values JAX traces a program once each."""
    if JAX_VERSION < (0, 10, 2):
        return _IN_OLD_TRACE_CONTEXTS
    names: Collection[str] = _config.trace_context_names()
    return names


# --- The mesh axes over which values vary ---------------------------------------------

_SAYS_VMA = JAX_VERSION < (0, 10)


def axes_of(aval: Any) -> frozenset[object]:
    """The mesh axes over which a value varies, inside a shard_map that is checked."""
    return frozenset(aval.vma if _SAYS_VMA else aval.mat.varying)


def varying_over(aval: Any, axes: Collection[object] = (), **changes: Any) -> Any:
    """The aval of a value that varies over these axes, with these other parts."""
    if _SAYS_VMA:
        return aval.update(vma=frozenset(axes), **changes)
    varying = _core.ManualAxisType(varying=frozenset(axes))
    return aval.update(manual_axis_type=varying, **changes)


def newly_manual_axes(params: dict[str, Any]) -> frozenset[str]:
    """The mesh axes over which a shard_map with these parameters is manual."""
    name = "manual_axes" if JAX_VERSION < (0, 10, 2) else "newly_manual_axes"
    return frozenset(params[name])


# --- Values ---------------------------------------------------------------------------

# What NumPy's arrays are. Up to JAX 0.9.1 the primals of derivative rules, and so what
# users' rules pass on, are NumPy arrays inside a class of JAX's, which is NumPy's own
# later.
NUMPY_ARRAYS: tuple[type[np.ndarray | np.generic], ...] = (np.ndarray, np.generic)
if JAX_VERSION < (0, 9, 2):
    NUMPY_ARRAYS += (_literals.TypedNdArray,)

# In JAX 0.9.0 a traced Ref passes for a jax.Array.
TRACED_REFS_ARE_ARRAYS = JAX_VERSION < (0, 9, 1)

# JAX's own callbacks (calls go through them on platforms that the engine does not
# serve) read and write elements of less than a byte wrong before 0.10.2.
CALLBACKS_TAKE_SMALL_ELEMENTS = JAX_VERSION >= (0, 10, 2)

# --- Several devices ------------------------------------------------------------------

# Before jaxlib 0.12 programs of JAX's own with collectives may end the process if they
# follow each other without tokens (fast_dispatch.py).
COLLECTIVES_NEED_NO_TOKENS = version_of(jaxlib.__version__) >= (0, 12)

# XLA's partitioner has a pass for regions that one token alone enters (operations.py).
# It is not in jaxlib 0.10.2.
TREATS_LONE_TOKENS = version_of(jaxlib.__version__) >= (0, 12)

# Programs on GPUs without tokens were tested with these alone: earlier ones keep them.
GPUS_NEED_NO_TOKENS = version_of(jaxlib.__version__) >= (0, 12)


# --- Lowering -------------------------------------------------------------------------


def lower_jaxpr(
    ctx: Any, jaxpr: Jaxpr, tokens: Any, consts: Any, *operands: Any
) -> Any:
    """Emits a jaxpr where an equation is lowered; returns (results, tokens)."""
    options = {} if JAX_VERSION < (0, 9, 1) else {"outer_traceback": ctx.traceback}
    return _mlir.jaxpr_subcomp(
        ctx.module_context,
        jaxpr,
        ctx.name_stack,
        tokens,
        consts,
        *operands,
        dim_var_values=ctx.dim_var_values,
        const_lowering=ctx.const_lowering,
        **options,
    )


def set_sharding(ctx: Any, op: Any, sharding: Any) -> None:
    if JAX_VERSION < (0, 10, 1):
        _src_mlir.set_sharding(op, sharding)
    else:
        _src_mlir.set_sharding(ctx.module_context, op, sharding)


def built(ctx: Any, shardings: Any) -> Any:
    """Shardings (SdyArrayList) as an attribute of the program that is lowered."""
    if JAX_VERSION < (0, 10, 1):
        return shardings.build()
    return shardings.build(ctx.module_context.sharding_attr_cache)


def module_of(exported: jax.export.Exported) -> _ir.Module:
    """The program of an exported one, in the MLIR context around."""
    if JAX_VERSION >= (0, 10):
        return exported.mlir_module(serialized=False)
    return _ir.Module.parse(
        _export.xla_client._xla.mlir.deserialize_portable_artifact(
            exported.mlir_module_serialized
        )
    )


# --- XLA's C interface ----------------------------------------------------------------

# The newest minor version of it that this jaxlib and hostcall both know: 0.3 since
# jaxlib 0.9.1. Later ones (0.5 in 0.12) have more, and serve what has less.
XLA_INTERFACE = 2 if version_of(jaxlib.__version__) < (0, 9, 1) else 3

# Whether the engine may go through JAX's handler of host callbacks: it answers that in
# the layout that XLA has had in these versions (native/handlers/host_callback.h).
HOST_CALLBACKS_ARE_KNOWN = (0, 9) <= version_of(jaxlib.__version__) < (0, 13)
