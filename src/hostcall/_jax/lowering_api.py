"""How to add lowering rules, and what a rule asks of JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
from jax.interpreters import mlir as _mlir
from jaxlib.mlir import ir as _ir

from hostcall._jax import types as _t
from hostcall._jax.door import core as _core
from hostcall._jax.door import dispatch as _dispatch
from hostcall._jax.door import effects as _effects
from hostcall._jax.door import missing_of
from hostcall._jax.door import source_info_util as _source_info_util
from hostcall._jax.door import xla_client as _xla_client
from hostcall._jax.installing import lost, need
from hostcall._jax.needs import Part
from hostcall._jax.program import record_of
from hostcall._jax.program_order import effects_in, in_order_of_program, joined
from hostcall._jax.tracing import ENGINE_CALLS
from hostcall._jax.versions import HOST_CALLBACKS_ARE_KNOWN


def register_lowering(
    primitive: _t.Primitive,
    rule: _t.LoweringRule,
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
        rule: lowers an equation, on any platform.
        wants_devices: the rule needs the program's devices, for `sharding=` and for
            mesh coordinates. JAX then allows only one mesh in that program.
    """

    _mlir.register_lowering(primitive, rule, cacheable=False)
    ENGINE_CALLS[primitive] = rule
    if wants_devices:
        _dispatch.prim_requires_devices_during_lowering.add(primitive)


def in_order(
    ctx: _t.LoweringContext, effect: _t.Effect
) -> tuple[_t.Value | None, Callable[[_t.Value | None], None]]:
    """The token that an equation with this effect takes, and a setter of the one that
    it leaves.

    If all host calls of the program have the same effects (program_order.py), it takes
    the tokens of these, and leaves one for all. Else an ordered effect has JAX's token.
    With another one, the token is that of the previous equation in the same MLIR block,
    which is straight-line code: XLA then sees that they depend on each other.
    """
    tokens_in = dict(ctx.tokens_in.items())
    effects = effects_in(ctx)
    if not effects and _effects.ordered_effects.contains(effect):
        effects = frozenset([effect])
    if lost(Part.ORDER) and effects:
        _check_tokens(ctx, effects)
    if effects:
        own_tokens = [t for effect, t in tokens_in.items() if effect in effects]
        taken = joined(own_tokens)

        def leave(token: _t.Value | None) -> None:
            tokens_left = _mlir.TokenSet(dict.fromkeys(effects, token))
            # Beside them are those of other effects, which pass through.
            ctx.set_tokens_out(ctx.tokens_in.update_tokens(tokens_left))

        return taken, leave
    record = record_of(ctx, "last token of each block")
    block = _ir.InsertionPoint.current.block
    if lost(Part.ORDER):
        _check_chain(ctx, record, block)
    return record.get(block), partial(record.__setitem__, block)


# Where JAX has no place for the one order of all host calls (patches.py), two kinds of
# programs are in order without it: those whose calls have one ordered effect, and those
# whose calls are unordered and one after another in the program itself, in no loop,
# branch or function inside.


def _check_tokens(ctx: _t.LoweringContext, effects: Iterable[_t.Effect]) -> None:
    """Refuses host calls in a second order; notes in which one these are."""
    kinds = record_of(ctx, "ordered effects of host calls")
    kinds.update(dict.fromkeys(effects))
    if len(kinds) > 1 or record_of(ctx, "last token of each block"):
        need(Part.ORDER)


def _check_chain(
    ctx: _t.LoweringContext, tokens: dict[Any, Any], block: _ir.Block
) -> None:
    """Refuses a call that the chain of one block does not put in order with others."""
    owner = block.owner
    is_program = "sym_name" in owner.attributes and (
        _ir.StringAttr(owner.attributes["sym_name"]).value == "main"
    )
    ordered = record_of(ctx, "ordered effects of host calls")
    if ordered or not is_program or set(tokens) - {block}:
        need(Part.ORDER)


def host_callback_handler() -> object | None:
    """JAX's handler of buffer callbacks on CPUs; None in a jaxlib for which nobody has
    seen that the engine may go through it.

    native/handlers/host_callback.h says what the engine needs it for.
    """
    if not HOST_CALLBACKS_ARE_KNOWN:
        return None
    targets = _xla_client.custom_call_targets("cpu")
    handler: object = targets["xla_buffer_python_cpu_callback"]["execute"]
    return handler


# The lowering rule of a JAX function that returns a list of results.
lowering_as = partial(_mlir.lower_fun, multiple_results=True)


def lower_by(
    ctx: _t.LoweringContext, f: Callable[..., object], *operands: _t.Value
) -> list[_t.Value]:
    """Lowers an equation as the JAX function `f`, which returns a list of results.

    Host calls in `f` are in the order of the program.
    """
    return list(lowering_as(partial(_in_order, ctx, f))(ctx, *operands))


def _in_order(
    ctx: _t.LoweringContext, f: Callable[..., object], *args: jax.Array
) -> object:
    """`f(*args)`, with its host calls in the order of the program, if it has one."""
    if not effects_in(ctx):
        return f(*args)
    jaxpr = in_order_of_program(ctx, jax.make_jaxpr(f)(*args))
    return _core.jaxpr_as_fun(jaxpr)(*args)


def name_partitioning(value: _t.Value, name: str) -> None:
    """Names the custom partitioning, if there is one, whose result this value is.

    JAX names it by the address of its rules, which is another one in each process, so
    the compilation cache would never find the program.
    """
    # Imported here because it takes 10 ms, which most programs need not pay.
    from hostcall._jax.door import custom_partitioning

    if isinstance(value.owner, _ir.Block):  # an argument of a block
        return
    named = value.owner.attributes
    target = named["call_target_name"].value if "call_target_name" in named else ""
    if target == custom_partitioning._CUSTOM_PARTITIONING_CALL_NAME:
        rules = custom_partitioning._sharding_callbacks
        rules[name.encode()] = rules[named["backend_config"].value.encode()]
        named["backend_config"] = _ir.StringAttr.get(name)


def lower_traced(
    ctx: _t.LoweringContext,
    f: Callable[..., object],
    avals: Sequence[_t.Aval],
    values: Sequence[_t.Value],
) -> list[_t.Value]:
    """Emits the JAX function `f` on values of these avals; returns its results."""
    avals = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals]
    inner = ctx.replace(primitive=None, avals_in=avals, avals_out=None)
    return lower_by(inner, f, *values)


def line_of(ctx: _t.LoweringContext) -> tuple[str, int, str] | None:
    """(file, line, function) of the user's line behind an equation being lowered."""
    if missing_of(Part.LINES):
        return None
    frame = _source_info_util.user_frame(ctx.traceback)
    if frame is None:
        return None
    return frame.file_name, frame.start_line, frame.function_name
