"""The operations that hostcall emits into a program that JAX lowers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np
from jax.interpreters import mlir as _mlir
from jaxlib.mlir import ir as _ir
from jaxlib.mlir.dialects import sdy as _sdy
from jaxlib.mlir.dialects import stablehlo as _hlo

from hostcall._jax.door import core as _core
from hostcall._jax.door import mlir as _src_mlir
from hostcall._jax.door import sharding_impls as _sharding_impls
from hostcall._jax.door import xla_client as _xc
from hostcall._jax.dtypes import has_symbolic, is_symbolic
from hostcall._jax.program import Program
from hostcall._jax.types import Aval, Device, Emitted, LoweringContext, Operation, Value
from hostcall._jax.versions import TREATS_LONE_TOKENS, built, set_sharding

# Token and operands -> what was emitted.
Emit: TypeAlias = Callable[[Value | None, Sequence[Value]], Emitted]


def custom_call(
    program: Program,
    target: str,
    token: Value | None,
    operands: Sequence[Value],
    avals_out: Sequence[Aval],
    *,
    returns_token: bool,
    has_side_effect: bool,
    attributes: Mapping[str, str | int],
    aliases: dict[int, int] | None = None,
) -> Emitted:
    """Emits one XLA custom call on row-major buffers; returns (results, token).

    In a program over several devices, each of them makes the call on whole values, or
    inside a manual region on its own block.

    Args:
        program: the program.
        target: the name under which the handler is registered.
        token: the call's first operand, if not None.
        operands: its other operands.
        avals_out: the avals of its results.
        returns_token: the call's first result is a token.
        has_side_effect: XLA may neither drop nor merge the call.
        attributes: the numbers and texts that the handler decodes.
        aliases: operand number -> number of the result that may take its memory.
    """
    ctx = program.ctx
    # A token is an operand or a result like any other, in front of them. It has no
    # axes, and an array's are in row-major order: the last one varies fastest.
    of_token = range(0)
    tokens_in = 0 if token is None else 1
    tokens_out = 1 if returns_token else 0
    operand_layouts = [of_token] * tokens_in
    operand_layouts += [range(operand.type.rank)[::-1] for operand in operands]
    avals_out = [*[_core.abstract_token] * tokens_out, *avals_out]
    types_out = [_ir_type(aval) for aval in avals_out]
    result_layouts = [of_token] * tokens_out
    result_layouts += [range(type_.rank)[::-1] for type_ in types_out[tokens_out:]]
    if aliases:
        aliases = {i + tokens_in: o + tokens_out for i, o in aliases.items()}
    sizes_out = None
    if program.is_symbolic and has_symbolic(avals_out):
        sizes_out = _sizes_of(ctx, avals_out)
    # As `jax.ffi` does it, which takes twice as long.
    op = _src_mlir.custom_call(
        target,
        result_types=types_out,
        operands=operands if token is None else [token, *operands],
        api_version=4,
        backend_config=_config(attributes),
        has_side_effect=has_side_effect,
        result_shapes=sizes_out,
        operand_output_aliases=aliases,
        operand_layouts=operand_layouts,
        result_layouts=result_layouts,
    )
    if program.size > 1 or program.mesh is not None:
        _mark_each_device(ctx, op)
    results = list(op.results)
    return (results[1:], results[0]) if returns_token else (results, None)


def _sizes_of(ctx: LoweringContext, avals: Sequence[Aval]) -> list[Value]:
    """The shapes of results as values of the program, which XLA wants if a size has a
    name.
    """
    return [
        _src_mlir.eval_dynamic_shape_as_tensor(ctx, _core.physical_aval(aval).shape)
        for aval in avals
    ]


def _config(attributes: Mapping[str, str | int]) -> dict[str, _ir.Attribute]:
    """Numbers and texts, as the handler gets them."""
    number_type = _ir.IntegerType.get_unsigned(64)
    config: dict[str, _ir.Attribute] = {}
    for key, value in attributes.items():
        if isinstance(value, str):
            config[key] = _ir.StringAttr.get(value)
        else:
            config[key] = _ir.IntegerAttr.get(number_type, value)
    return config


def _rank(of: _ir.Type) -> int:
    """How many axes a value of this type has; a token has none."""
    return of.rank if isinstance(of, _ir.RankedTensorType) else 0


def _ir_type(aval: Aval) -> _ir.Type:
    """The type of one array, or of a token: a typed key is its uint32 block."""
    if aval is _core.abstract_token:
        return _hlo.TokenType.get()
    physical = _core.physical_aval(aval)
    any_size = _ir.ShapedType.get_dynamic_size()
    sizes = [any_size if is_symbolic(n) else int(n) for n in physical.shape]
    return _ir.RankedTensorType.get(sizes, _mlir.dtype_to_ir_type(physical.dtype))


def named(ctx: LoweringContext, label: str) -> _ir.Location:
    """A context in which operations get this name.

    XLA's profiler shows an operation under the last part of its name. JAX makes that
    the name of the primitive, which all calls share. The name is debugging information:
    it changes neither what is computed nor the key of the compilation cache.
    """
    name = f"{ctx.name_stack}/{ctx.primitive}/{label.replace('/', '|')}"
    return _ir.Location.name(name, childLoc=_ir.Location.current)


def _mark_each_device(ctx: LoweringContext, op: Operation) -> None:
    """Says that each device runs this operation of a manual region for itself."""
    types = [result.type for result in op.results]
    if jax.config.jax_use_shardy_partitioner:
        set_sharding(ctx, op, _closed((), types or [None]))
        return
    # The partitioner wants a tuple of shardings for a tuple of results, and JAX's
    # `set_sharding` can't write one.
    text = ", ".join(["{manual}"] * len(types))
    if len(types) != 1:
        text = f"{{{text}}}"
    op.attributes["mhlo.sharding"] = _ir.StringAttr.get(text)


def _closed(
    mesh_shape: tuple[tuple[str, int], ...], types: Sequence[_ir.Type | None]
) -> _sharding_impls.SdyArrayList:
    """Shardings that split no dimension of values of these types."""
    unsplit = _sharding_impls.SdyDim(axes=(), is_open=False)
    shardings: list[_sharding_impls.SdyArray] = []
    for type_ in types:
        sharding = _sharding_impls.SdyArray(
            mesh_shape=mesh_shape,
            dim_shardings=(unsplit,) * _rank(type_),
            logical_device_ids=(),
        )
        shardings.append(sharding)
    return _sharding_impls.SdyArrayList(tuple(shardings))


def _entering(token: Value | None) -> list[Value]:
    """The tokens that enter a region for this one: a second one, which says nothing.

    If one token alone enters, a pass of XLA's (nullary-function-wrap-inliner) gives
    everything in the region a control dependency on it. If a constant in there equals
    another one of the program, the compiler then ends the process (HloCSE). What else
    enters is not known here: the partitioner moves constants into the region, and an
    array without elements is one.
    """
    if token is None:
        return []
    return [token, _hlo.create_token()] if TREATS_LONE_TOKENS else [token]


def on_each_device(
    program: Program,
    emit: Emit,
    token: Value | None,
    operands: Sequence[Value],
    returns_token: bool,
) -> Emitted:
    """Emits the equation inside a region that is manual over all devices of a
    partitioned program, on whole values; returns (results, token).

    `emit` gets the region's own token and operands, and returns (results, token).

    The simpler way would be to place the call on one device by a maximal sharding. The
    partitioner allows that only for the targets of JAX's own callbacks: it drops the
    sharding from any other custom call, and then refuses those with a side effect.
    """
    ctx = program.ctx
    if not jax.config.jax_use_shardy_partitioner:
        return _on_each_device_gspmd(ctx, emit, token, operands)
    mesh_shape = (("hostcall", program.size),)
    tokens = _entering(token)
    values = [*tokens, *operands]
    types_in = [value.type for value in values]
    avals_out = [_core.abstract_token] * returns_token + list(ctx.avals_out)
    types_out = [_ir_type(aval) for aval in avals_out]
    region = _sdy.ManualComputationOp(
        types_out,
        values,
        built(ctx, _closed(mesh_shape, types_in)),
        built(ctx, _closed(mesh_shape, types_out)),
        _sdy.ManualAxesAttr.get([_ir.StringAttr.get("hostcall")]),
    )
    block = _ir.Block.create_at_start(region.body, types_in)
    with _ir.InsertionPoint(block):
        arguments = list(block.arguments)
        inner_tokens = arguments[: len(tokens)]
        inner_operands = arguments[len(tokens) :]
        inner_token = inner_tokens[0] if inner_tokens else None
        if len(inner_tokens) > 1:
            inner_token = _hlo.after_all(inner_tokens)  # else XLA drops the second
        results, token = emit(inner_token, inner_operands)
        _sdy.return_([token, *results] if returns_token else results)
    results = list(region.results)
    return (results[1:], results[0]) if returns_token else (results, None)


def _on_each_device_gspmd(
    ctx: LoweringContext, emit: Emit, token: Value | None, operands: Sequence[Value]
) -> Emitted:
    """`on_each_device` under JAX's setting jax_use_shardy_partitioner=False.

    That partitioner has no regions. What stands between two kinds of custom calls of
    its own is manual; here each device enters with whole values, and leaves so.
    """
    replicated = _xc.OpSharding()
    manual = _xc.OpSharding()
    replicated.type = _xc.OpSharding.Type.REPLICATED
    manual.type = _xc.OpSharding.Type.MANUAL

    def enter(value: Value, aval: Aval) -> Value:
        value = _src_mlir.wrap_with_sharding_op(ctx, value, aval, replicated)
        return _src_mlir.wrap_with_full_to_shard_op(ctx, value, aval, manual)

    def leave(value: Value, aval: Aval) -> Value:
        value = _src_mlir.wrap_with_sharding_op(ctx, value, aval, manual)
        return _src_mlir.wrap_with_shard_to_full_op(ctx, value, aval, replicated)

    avals_in = map(_core.physical_aval, ctx.avals_in)
    avals_out = map(_core.physical_aval, ctx.avals_out)
    results, token = emit(token, list(map(enter, operands, avals_in)))
    return list(map(leave, results, avals_out)), token


# The index, among the program's devices, of the device that runs it.
partition_id = _hlo.partition_id


_FROM_DEVICE_TO_DEVICE = 1  # XLA's type of channel (xla/xla_data.proto)


def max_over_devices(ctx: LoweringContext, value: Value, n: int) -> Value:
    """The elementwise maximum over the program's `n` devices.

    For use in a region that is manual over all of them.
    """
    groups = np.arange(n, dtype=np.int64).reshape(1, n)
    op = _hlo.AllReduceOp(
        [value.type],
        [value],
        replica_groups=_ir.DenseElementsAttr.get(groups),
        channel_handle=_hlo.ChannelHandle.get(
            ctx.module_context.new_channel(), _FROM_DEVICE_TO_DEVICE
        ),
        use_global_device_ids=_ir.BoolAttr.get(True),
    )
    scalar = _ir.RankedTensorType.get([], value.type.element_type)
    block = op.regions[0].blocks.append(scalar, scalar)
    with _ir.InsertionPoint(block):
        _hlo.return_([_hlo.maximum(*block.arguments)])
    _mark_each_device(ctx, op)
    return op.result


def mark_place(ctx: LoweringContext, place: object) -> None:
    """Notes in the program's text which device makes the next call.

    The note is the sharding of a constant that nothing uses. The call itself can't
    carry it (see `on_each_device`), and readers of StableHLO look for it.
    """
    constant = _hlo.ConstantOp(_ir.DenseElementsAttr.get(np.zeros((), np.int32)))
    if isinstance(place, _sharding_impls.SdyArrayList):
        place = _sharding_impls.SdyArrayList((place.shardings[0],))
    set_sharding(ctx, constant, place)


def device_of(
    program: Program, annotation: _sharding_impls.SdyArrayList | _xc.OpSharding | None
) -> Device | None:
    """The device on which JAX's annotation places a callback, or None."""
    if not program.devices:
        return None
    numbers: Sequence[int] = ()
    if isinstance(annotation, _sharding_impls.SdyArrayList):
        numbers = annotation.shardings[0].logical_device_ids
    elif annotation is not None and annotation.type == _xc.OpSharding.Type.MAXIMAL:
        numbers = annotation.tile_assignment_devices
    return program.devices[numbers[0]] if numbers else None
