"""JAX's own callbacks: primitives, effects, loggers, and the old module's flags."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping

import jax
from jax.interpreters import mlir as _mlir

from hostcall._jax import types as _t
from hostcall._jax.door import buffer_callback as _buffer_callback
from hostcall._jax.door import callback as _callback
from hostcall._jax.door import config as _config
from hostcall._jax.door import debugging as _debugging
from hostcall._jax.door import mlir as _src_mlir
from hostcall._jax.installing import put_entry
from hostcall._jax.needs import MODULES
from hostcall._jax.program import SERVED, Program, is_served
from hostcall._jax.tracing import ENGINE_CALLS, JAXS_CALLS

# Saved at import, before `patch_jax` can replace it, so that hostcall never calls its
# own replacement.
emit_python_callback = _callback.emit_python_callback


def place_of_callback(ctx: _t.LoweringContext, sharding: _t.Sharding | None) -> object:
    """Checks a callback's `sharding=` as JAX does, with JAX's messages.

    Returns the annotation that JAX would put on the call.
    """
    return _callback._callback_op_sharding(
        ctx.module_context.axis_context, sharding, ctx.avals_out
    )


def caller(
    program: Program,
    sharding: _t.Sharding | None,
    *,
    partitioned: bool,
) -> _t.Device | None:
    """The device whose callback runs where one device calls; None if several do, or if
    it is not known.
    """
    mesh = program.mesh
    context = program.ctx.module_context.axis_context
    devices: Iterable[_t.Device] = ()
    if partitioned or isinstance(mesh, jax.sharding.AbstractMesh):
        pass  # each device calls, or nobody knows which there are
    elif mesh is not None:
        devices = mesh.devices.flat
    elif sharding is not None:
        devices = sharding.device_set
    elif isinstance(context, _mlir.ShardingContext):
        devices = context.device_assignment or ()
    return next(iter(devices), None)


# --- For the drop-ins: _primitives/drop_in.py, _compat/pure_and_io.py, debugging.py ---

IO_EFFECT = _callback._IOEffect
ORDERED_IO_EFFECT = _callback._OrderedIOEffect
DEBUG_EFFECT = _debugging.debug_effect
ORDERED_DEBUG_EFFECT = _debugging.ordered_debug_effect

# --- Tables of rules in modules that JAX itself imports only when they are needed -----


@functools.cache
def look_at_keys(debug_callback: _t.Primitive) -> None:
    """Lets a debug callback look at a typed key without using it up, as JAX's may.

    With `jax_debug_key_reuse` a primitive without an entry consumes its keys. JAX
    imports the table when it first checks a program.
    """
    from hostcall._jax.door import key_reuse

    rules = key_reuse.key_reuse_signatures
    rules[debug_callback] = rules[_debugging.debug_callback_p]


def share_rooflines(by_name: Mapping[str, _t.Primitive]) -> None:
    """Estimates each of these primitives as JAX's primitive of that name.

    Under JAX 0.10 `jax.experimental.roofline` needs absl, which JAX does not require.
    So this does nothing in a process that has not imported it.
    """
    if "jax.experimental.roofline.roofline" not in sys.modules:
        return
    from hostcall._jax.door import roofline

    rules = roofline._rooflines
    for theirs in (pure_callback_p, io_callback_p, debug_callback_p):
        if theirs in rules:
            rules.setdefault(by_name[theirs.name], rules[theirs])


# The loggers to which JAX reports failed callbacks. Equinox installs a filter on the
# first one, so the drop-ins must log there too.
callback_logger = _callback.logger
debug_logger = _debugging.logger
print_checker = _debugging.formatter  # refuses arguments that a format does not use

# (args, kwargs) of a debug callback -> their tree, the arrays among their leaves, and
# the other leaves by their numbers.
split_callback_args = _debugging._split_callback_args


def parts_of_callback(
    flat: Callable[..., object],
) -> tuple[Callable[..., object], _t.TreeDef, Mapping[int, object]] | None:
    """(the user's function, the tree of its arguments, the leaves of these that are no
    arrays by their numbers) in the `callback` parameter of JAX's primitives; None if
    something else than JAX's functions made that.
    """
    if isinstance(flat, _callback._FlatCallback):
        return flat.callback_func, flat.in_tree, {}
    # A debug callback's is a function inside of another, whose variables it uses.
    code = getattr(flat, "__code__", None)
    names = getattr(code, "co_freevars", ())
    if names != ("callback", "in_tree", "static_args"):
        return None
    if flat.__module__ != MODULES["debugging"]:
        return None
    cells = flat.__closure__ or ()
    fn, in_tree, static = [cell.cell_contents for cell in cells]
    return fn, in_tree, dict(static)


# --- What `patch_jax` replaces: _compat/patch.py, _compat/redirects.py ---------------

pure_callback_p = _callback.pure_callback_p
io_callback_p = _callback.io_callback_p
debug_callback_p = _debugging.debug_callback_p
debug_print_p = _debugging.debug_print_p
buffer_callback_p = _buffer_callback.buffer_callback_p
MODULES_WITH_EMIT = (_callback, jax.interpreters.mlir)


def replace_lowering(
    primitive: _t.Primitive, rule: _t.LoweringRule
) -> Callable[[], None]:
    """Lowers one of JAX's primitives by `rule` on the platforms that the engine serves.

    Returns a function that puts JAX's rule back. A module for another platform, or for
    several platforms at once, keeps JAX's rule. JAX registers these primitives as not
    cacheable, so `rule` runs once for each equation, as `register_lowering` arranges
    for hostcall's own primitives.
    """
    by_platform = _src_mlir._platform_specific_lowerings
    undo: list[Callable[[], None]] = []

    def either(
        theirs: _t.LoweringRule, ctx: _t.LoweringContext, *xs: object, **params: object
    ) -> object:
        chosen = rule if is_served(ctx) else theirs
        return chosen(ctx, *xs, **params)

    tables = [_src_mlir._lowerings, *[by_platform[name] for name in SERVED]]
    for table in tables:
        entry = table.get(primitive)
        if entry is not None:
            # JAX asks an entry for `inline`, so it stays one of JAX's type.
            either_rule = functools.partial(either, entry.rule)
            replacement = type(entry)(either_rule, entry.inline)
            undo.append(put_entry(table, primitive, replacement))
    undo.append(put_entry(ENGINE_CALLS, primitive, rule))
    JAXS_CALLS.add(primitive)

    def restore() -> None:
        JAXS_CALLS.discard(primitive)
        for put_back in undo:
            put_back()

    return restore


def print_callback(params: _t.Params) -> Callable[..., None]:
    """The function that JAX's debug_print primitive calls with its arrays."""
    line = functools.partial(
        _debugging._format_print_callback,
        params["fmt"],
        dict(params["np_printoptions"]),
        params["has_placeholders"],
        params["logging_record"],
    )
    flat: Callable[..., None] = _debugging._make_flat_callback(
        params["in_tree"], line, params["static_args"]
    )
    return flat


def define_old_flags(flags: dict[str, bool | int], help_text: str) -> None:
    """Defines settings that JAX has dropped, for `jax.config.update` and as environment
    variables; `flags` has their defaults.
    """
    for name, default in flags.items():
        env = _config.int_env
        flag = _config.int_flag
        if isinstance(default, bool):
            env = _config.bool_env
            flag = _config.bool_flag
        flag(name, env(name.upper(), default), help=help_text)


old_flag = jax.config.read
