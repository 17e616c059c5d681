"""JAX's own callbacks: primitives, effects, loggers, and the old module's flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax._src import buffer_callback as _buffer_callback
from jax._src import callback as _callback
from jax._src import config as _config
from jax._src import core as _core
from jax._src import debugging as _debugging
from jax._src import tree_util as _tree_util
from jax._src.interpreters import mlir as _mlir

from hostcall._jax.lowering import SERVED, is_served

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
