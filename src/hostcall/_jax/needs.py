"""What hostcall needs of JAX that JAX does not promise: all of it, in one table.

A row has names of one module that are needed for one thing. The other files of this
wing take these modules from `door`, which checks the names against the table: one that
this JAX has not (any more) is refused where it is used, and not before. What hostcall
replaces in JAX is in another table (patches.py).

Public modules (`jax.core`, `jax.interpreters`, `jax.sharding`) are imported as they
are, and so is MLIR (`jaxlib.mlir`, which is also `jax.extend.mlir`).

docs/design/jax_boundary.md is written from the tables (`make jax-mutation`), and
tests/repo/test_boundary.py holds that no file of this wing names anything else.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

# The versions of JAX under which the suite has run (CONTRIBUTING.md).
OLDEST = "0.9.0"
NEWEST = "0.12.0.1"
INSTALL = f'pip install "jax>={OLDEST},<={NEWEST}"'


class Part(enum.Enum):
    """What of hostcall is lost without something of JAX's, in words."""

    CALLS = "host calls"
    ORDER = "one order for all host calls of a program"
    FAST = "fast dispatch of programs with host calls"
    TOKENS = "ordered calls that go on after a program that failed"
    SCANS = "calls with effects in scans"
    LOOPS = "calls with effects in while loops"
    SHARDS = "host calls in shard_map and over several devices"
    HOST = "JAX in host code"
    CHECKS = "host calls under jax_debug_nans"
    LINES = "the user's line in messages"
    REPORTS = "exceptions of host code in place of JAX's report"
    OBSERVE = "hc.observe"
    EXPORT = "exported programs"
    DROP_INS = "drop-ins for JAX's callbacks, and hc.patch_jax"
    JOBS = "jobs of several processes"
    FORK = "forked children that refuse programs"
    STARTED = "whether JAX has started a back end"

    @property
    def instead(self) -> str:
        """What hostcall does without it; "" if what needs it is refused."""
        return _INSTEAD.get(self, "")


_INSTEAD = {
    Part.ORDER: "programs whose calls need it are refused where they are lowered",
    Part.FAST: "such programs are dispatched with JAX's tokens, in 50 to 100 us",
    Part.LINES: "a function's own line is named",
    Part.REPORTS: "JAX's JaxRuntimeError is raised, with the exception's text",
    Part.FORK: "the child may hang where it runs a program, as with plain JAX",
    Part.STARTED: "it counts as started, and a forked child may crash as it ends",
}


# A tuple, since the table is made whenever hostcall is imported: 90 dataclasses cost
# one millisecond more.
class Need(NamedTuple):
    """Names of one module of JAX that are needed for one thing.

    Attributes:
        module: its name in MODULES.
        part: what of hostcall is lost without them.
        names: the names; none if only the module itself is.
        why: what they are for, or why nothing public will do.
        since, until: the first and the last version that has them, where not all of
            the range do.
    """

    module: str
    part: Part
    names: str
    why: str
    since: str = ""
    until: str = ""


MODULES: dict[str, str] = {
    "api": "jax._src.api",
    "array": "jax._src.array",
    "batching": "jax._src.interpreters.batching",
    "buffer_callback": "jax._src.buffer_callback",
    "callback": "jax._src.callback",
    "compiler": "jax._src.compiler",
    "config": "jax._src.config",
    "core": "jax._src.core",
    "custom_partitioning": "jax._src.custom_partitioning",
    "debugging": "jax._src.debugging",
    "discharge": "jax._src.state.discharge",
    "dispatch": "jax._src.dispatch",
    "distributed": "jax._src.distributed",
    "dtypes": "jax._src.dtypes",
    "effects": "jax._src.effects",
    "export": "jax._src.export._export",
    "ffi": "jax._src.ffi",
    "flattree": "jax._src.flattree",
    "guard_lib": "jax._src.lib.guard_lib",
    "jaxlib": "jax._src.lib._jax",
    "key_reuse": "jax.experimental.key_reuse._core",
    "lax": "jax._src.lax.lax",
    "linear_util": "jax._src.linear_util",
    "literals": "jax._src.literals",
    "mesh": "jax._src.mesh",
    "mlir": "jax._src.interpreters.mlir",
    "pallas": "jax._src.pallas.core",
    "partial_eval": "jax._src.interpreters.partial_eval",
    "pretty_printer": "jax._src.pretty_printer",
    "pxla": "jax._src.interpreters.pxla",
    "roofline": "jax.experimental.roofline.roofline",
    "shard_map": "jax._src.shard_map",
    "sharding_impls": "jax._src.sharding_impls",
    "slicing": "jax._src.lax.slicing",
    "source_info_util": "jax._src.source_info_util",
    "stages": "jax._src.stages",
    "tree_util": "jax._src.tree_util",
    "util": "jax._src.util",
    "windowed_reductions": "jax._src.lax.windowed_reductions",
    "xla_bridge": "jax._src.xla_bridge",
    "xla_client": "jax._src.lib.xla_client",
}

NEEDS: tuple[Need, ...] = (
    Need(
        "api",
        Part.FAST,
        "_post_hook_state",
        "tells hc.reraise of dispatches on JAX's fast path, which runs no other Python",
    ),
    Need(
        "api",
        Part.OBSERVE,
        "__file__",
        "the frames in which JAX differentiates, by their file",
    ),
    Need(
        "array",
        Part.CALLS,
        "ArrayImpl",
        "arrays that JAX takes as they are, which no tracer is",
    ),
    Need(
        "buffer_callback",
        Part.DROP_INS,
        "buffer_callback_p",
        "the patch also serves code that bound the name before it",
    ),
    Need(
        "callback",
        Part.DROP_INS,
        "_FlatCallback _IOEffect _OrderedIOEffect io_callback_p pure_callback_p",
        "JAX's rules look for these objects",
    ),
    Need(
        "callback",
        Part.DROP_INS,
        "emit_python_callback",
        "what Pallas and checkify call, below all primitives",
    ),
    Need(
        "callback",
        Part.DROP_INS,
        "logger",
        "equinox filters the messages of this logger",
    ),
    Need(
        "callback",
        Part.DROP_INS,
        "_callback_op_sharding",
        "JAX's checks of sharding=, with its texts",
    ),
    Need(
        "compiler",
        Part.FAST,
        "backend_compile_and_load get_compile_options",
        "compiles a program that does nothing, behind which a thread waits",
    ),
    Need(
        "config",
        Part.DROP_INS,
        "bool_env bool_flag int_env int_flag",
        "the flags of host_callback",
    ),
    Need(
        "config",
        Part.CALLS,
        "config_states pallas_tpu_interpret_mode_context_manager",
        "the settings that a trace has of its own, by name: host code takes them along",
    ),
    Need(
        "config",
        Part.CALLS,
        "trace_context_names",
        "which settings these are",
        since="0.10.2",
    ),
    Need(
        "config",
        Part.CALLS,
        "abstract_mesh_context_manager device_context",
        "host code has no mesh of the program around; a context manager costs"
        " four times as much",
        until="0.11.1",
    ),
    Need(
        "config",
        Part.SHARDS,
        "_check_vma",
        "whether results must say over which axes they vary",
    ),
    Need(
        "config",
        Part.OBSERVE,
        "eager_constant_folding",
        "what is put into a program is no constant",
    ),
    Need(
        "core",
        Part.CALLS,
        "abstract_token physical_aval",
        "the values of a custom call, as compiled programs have them",
    ),
    Need(
        "core",
        Part.CALLS,
        "trace_state_clean is_concrete",
        "whether something is being traced",
    ),
    Need(
        "core",
        Part.CALLS,
        "DropVar jaxprs_in_params new_jaxpr_eqn",
        "programs as data, where they are split and put in order",
    ),
    Need(
        "core",
        Part.CALLS,
        "Jaxpr JaxprEqn Literal Primitive Token Var closed_call_p jaxpr_as_fun",
        "jax.extend.core has most of them, but importing it brings Pallas, in 18 ms",
    ),
    Need(
        "core",
        Part.CALLS,
        "ClosedJaxpr",
        "the same",
        until="0.10.2",
    ),
    Need(
        "core",
        Part.OBSERVE,
        "DebugInfo",
        "the names of what is put into a program",
    ),
    Need(
        "core",
        Part.SHARDS,
        "get_cur_mesh_sharding",
        "the sharding of results inside shard_map",
    ),
    Need(
        "core",
        Part.SHARDS,
        "ManualAxisType",
        "over which axes they vary",
        since="0.10.0",
    ),
    Need(
        "custom_partitioning",
        Part.SHARDS,
        "_CUSTOM_PARTITIONING_CALL_NAME _sharding_callbacks",
        "JAX names the rules by an address, and the compilation cache would never hit",
    ),
    Need(
        "debugging",
        Part.DROP_INS,
        "debug_callback_p debug_print_p debug_effect ordered_debug_effect",
        "JAX's rules look for these objects",
    ),
    Need(
        "debugging",
        Part.DROP_INS,
        "logger formatter _format_print_callback _make_flat_callback"
        " _split_callback_args",
        "prints as JAX makes them, in the log where equinox filters them",
    ),
    Need(
        "debugging",
        Part.CALLS,
        "debug_batching_rule _debug_partial_eval_custom",
        "JAX's rules for debug callbacks, which taps have too",
    ),
    Need(
        "debugging",
        Part.CALLS,
        "_debug_callback_state_discharge_rule",
        "the arguments of such rules, which differ",
    ),
    Need(
        "dispatch",
        Part.CALLS,
        "check_arg prim_requires_devices_during_lowering",
        "checks of arguments; a program's devices, where it is lowered",
    ),
    Need(
        "dispatch",
        Part.CALLS,
        "RuntimeTokenSet runtime_tokens",
        "what a thread waits for, and which program failed",
    ),
    Need(
        "dispatch",
        Part.CHECKS,
        "check_special needs_check_special InternalFloatingPointError",
        "jax_debug_nans finds what a call returned",
    ),
    Need(
        "distributed",
        Part.JOBS,
        "global_state _ENABLE_RECOVERABILITY",
        "the store of a job, and a way to end without meeting the others",
    ),
    Need(
        "dtypes",
        Part.CALLS,
        "ExtendedDType",
        "dtypes that are no dtype of NumPy's",
    ),
    Need(
        "effects",
        Part.CALLS,
        "Effect EffectTypeSet JaxprInputEffect",
        "effects are not public",
    ),
    Need(
        "effects",
        Part.CALLS,
        "control_flow_allowed_effects custom_derivatives_allowed_effects "
        "ordered_effects partial_eval_kept_effects remat_allowed_effects "
        "shardable_ordered_effects",
        "where an effect may be",
    ),
    Need(
        "export",
        Part.EXPORT,
        "serialization_registry deserialization_registry",
        "pytree types have names there only",
    ),
    Need(
        "export",
        Part.EXPORT,
        "xla_client",
        "reads an exported program as MLIR",
        until="0.9.2",
    ),
    Need(
        "ffi",
        Part.CALLS,
        "ffi_batching_rule",
        "the text of a refusal",
    ),
    Need(
        "flattree",
        Part.OBSERVE,
        "nones pack",
        "the parameters of a scan",
        since="0.12.0",
    ),
    Need(
        "batching",
        Part.CALLS,
        "moveaxis",
        "moves a batch, also of typed keys",
    ),
    Need(
        "batching",
        Part.OBSERVE,
        "broadcast_batcher vectorized_batcher",
        "which operations are elementwise",
    ),
    Need(
        "mlir",
        Part.DROP_INS,
        "_lowerings _platform_specific_lowerings",
        "nothing else reaches code that bound a primitive before the patch",
    ),
    Need(
        "mlir",
        Part.CALLS,
        "custom_call",
        "jax.ffi can't add a token, and takes twice as long",
    ),
    Need(
        "mlir",
        Part.EXPORT,
        "eval_dynamic_shape_as_tensor global_thread_pool",
        "XLA wants symbolic sizes as values; a process with MLIR's threads "
        "may not fork, and a forked child may not end the pool of these",
    ),
    Need(
        "mlir",
        Part.SHARDS,
        "set_sharding wrap_with_full_to_shard_op wrap_with_shard_to_full_op "
        "wrap_with_sharding_op",
        "calls of each device of a program",
    ),
    Need(
        "partial_eval",
        Part.CALLS,
        "make_jaxpr_effects",
        "the effects of a jaxpr that was changed",
    ),
    Need(
        "partial_eval",
        Part.SCANS,
        "EffectHandle new_eqn_recipe",
        "puts a call into a scan that is split",
    ),
    Need(
        "partial_eval",
        Part.LOOPS,
        "new_jaxpr_eqn partial_eval_jaxpr_custom",
        "splits a while loop",
    ),
    Need(
        "partial_eval",
        Part.CALLS,
        "JaxprTrace",
        "a type that partial evaluation gives to rules",
    ),
    Need(
        "pxla",
        Part.CALLS,
        "ExecuteReplicated MeshExecutable",
        "the program that is about to run, which host code may refuse",
    ),
    Need(
        "pxla",
        Part.FAST,
        "_create_device_list",
        "for the program that does nothing",
    ),
    Need(
        "lax",
        Part.CALLS,
        "",
        "whether a call is in the function of a reduction, where XLA ends the process",
    ),
    Need(
        "slicing",
        Part.CALLS,
        "",
        "the same",
    ),
    Need(
        "windowed_reductions",
        Part.CALLS,
        "",
        "the same",
    ),
    Need(
        "jaxlib",
        Part.FAST,
        "PjitFunctionCache",
        "drops what C++ would dispatch out of order",
    ),
    Need(
        "jaxlib",
        Part.HOST,
        "collect_garbage",
        "a dead jax.Array leaves its reference to a NumPy array in a list",
    ),
    Need(
        "guard_lib",
        Part.HOST,
        "TransferGuardLevel global_state thread_local_state",
        "whether a transfer would be refused or logged",
    ),
    Need(
        "xla_client",
        Part.HOST,
        "batched_device_put make_cpu_client",
        "arrays for host code in 3 us; a client that host code can't block",
    ),
    Need(
        "xla_client",
        Part.CALLS,
        "custom_call_targets",
        "XLA exports no other way to say that a thread is inside a host callback",
    ),
    Need(
        "xla_client",
        Part.CALLS,
        "ArrayImpl Client LoadedExecutable",
        "types",
    ),
    Need(
        "xla_client",
        Part.SHARDS,
        "OpSharding",
        "JAX's annotations of callbacks",
    ),
    Need(
        "linear_util",
        Part.OBSERVE,
        "wrap_init",
        "traces what is put into a program",
    ),
    Need(
        "literals",
        Part.CALLS,
        "TypedNdArray",
        "what derivative rules get for NumPy's arrays, before it was one of these",
        until="0.9.1",
    ),
    Need(
        "mesh",
        Part.CALLS,
        "empty_abstract_mesh empty_concrete_mesh",
        "host code has no mesh of the program around",
    ),
    Need(
        "mesh",
        Part.CALLS,
        "abstract_mesh_context_manager device_context",
        "the same",
        since="0.11.2",
    ),
    Need(
        "pretty_printer",
        Part.DROP_INS,
        "Doc",
        "texts of host_callback's equations",
    ),
    Need(
        "shard_map",
        Part.OBSERVE,
        "_as_manual_mesh _extend_axis_env",
        "what is put into a shard_map is traced inside of it",
    ),
    Need(
        "sharding_impls",
        Part.SHARDS,
        "SdyArray SdyArrayList SdyDim",
        "shardings of the custom call",
    ),
    Need(
        "sharding_impls",
        Part.CALLS,
        "UNSPECIFIED",
        "a sharding that JAX finds",
    ),
    Need(
        "source_info_util",
        Part.OBSERVE,
        "Transform is_user_filename raw_frame_to_frame",
        "the lines of equations",
    ),
    Need(
        "source_info_util",
        Part.LINES,
        "user_frame",
        "the lines that messages name",
    ),
    Need(
        "stages",
        Part.FAST,
        "CompiledCallParams",
        "a type",
    ),
    Need(
        "discharge",
        Part.CALLS,
        "register_discharge_rule",
        "calls in functions with Refs",
    ),
    Need(
        "tree_util",
        Part.FAST,
        "dispatch_registry pytree",
        "JAX's fast path calls nothing of Python's but the nodes of a "
        "program's results",
    ),
    Need(
        "util",
        Part.CALLS,
        "weakref_cache_key_types weakref_lru_cache",
        "without it JAX's caches would keep the user's functions alive",
    ),
    Need(
        "xla_bridge",
        Part.EXPORT,
        "get_backend",
        "the client of a platform",
    ),
    Need(
        "xla_bridge",
        Part.STARTED,
        "_backends",
        "a forked child must not take JAX's lock, and asking in public starts"
        " a back end",
    ),
    Need(
        "pallas",
        Part.DROP_INS,
        "_grid_context",
        "whether a Pallas kernel is being traced",
        since="0.12.0",
    ),
    Need(
        "pallas",
        Part.DROP_INS,
        "_pallas_tracing_env",
        "the same",
        until="0.11.2",
    ),
    Need(
        "roofline",
        Part.DROP_INS,
        "_rooflines",
        "a table by primitive, with entries for JAX's callbacks",
    ),
    Need(
        "key_reuse",
        Part.DROP_INS,
        "key_reuse_signatures",
        "a table by primitive, with an entry for JAX's callbacks",
    ),
)

# How hostcall calls functions of these modules: with so many arguments by position, and
# these by name. A function that takes others counts as missing. (One that is written in
# C++ does not say what it takes.)
CALLED: dict[tuple[str, str], tuple[int, tuple[str, ...]]] = {
    ("callback", "_callback_op_sharding"): (3, ()),
    ("compiler", "backend_compile_and_load"): (5, ()),
    ("config", "trace_context_names"): (0, ()),
    ("core", "get_cur_mesh_sharding"): (0, ()),
    ("core", "is_concrete"): (1, ()),
    ("core", "jaxprs_in_params"): (1, ()),
    ("core", "new_jaxpr_eqn"): (5, ()),
    ("core", "physical_aval"): (1, ()),
    ("debugging", "_debug_partial_eval_custom"): (5, ()),
    ("debugging", "_make_flat_callback"): (3, ()),
    ("debugging", "_split_callback_args"): (2, ()),
    ("debugging", "debug_batching_rule"): (2, ("primitive",)),
    ("discharge", "register_discharge_rule"): (1, ()),
    ("dispatch", "check_special"): (2, ()),
    ("ffi", "ffi_batching_rule"): (3, ("result_avals", "vmap_method")),
    ("flattree", "nones"): (1, ()),
    ("flattree", "pack"): (1, ()),
    ("linear_util", "wrap_init"): (1, ("debug_info",)),
    ("mlir", "custom_call"): (
        1,
        (
            *("api_version", "backend_config", "has_side_effect", "operand_layouts"),
            *("operand_output_aliases", "operands", "result_layouts"),
            *("result_shapes", "result_types"),
        ),
    ),
    ("mlir", "eval_dynamic_shape_as_tensor"): (2, ()),
    ("mlir", "wrap_with_full_to_shard_op"): (4, ()),
    ("mlir", "wrap_with_shard_to_full_op"): (4, ()),
    ("mlir", "wrap_with_sharding_op"): (4, ()),
    ("partial_eval", "make_jaxpr_effects"): (4, ()),
    ("partial_eval", "new_eqn_recipe"): (7, ()),
    ("partial_eval", "new_jaxpr_eqn"): (5, ()),
    ("partial_eval", "partial_eval_jaxpr_custom"): (6, ()),
    ("pxla", "_create_device_list"): (1, ()),
    ("shard_map", "_as_manual_mesh"): (2, ()),
    ("shard_map", "_extend_axis_env"): (2, ()),
    ("source_info_util", "is_user_filename"): (1, ()),
    ("source_info_util", "raw_frame_to_frame"): (2, ()),
    ("source_info_util", "user_frame"): (1, ()),
}
