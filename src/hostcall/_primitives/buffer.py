"""The primitive behind `hc.buffers.buffer_callback`.

It lowers to one custom call for all platforms. The CPU handler and the CUDA handler
have the same name, so a module that is lowered for both platforms needs no choice
between them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import jax
import jax.numpy as jnp

from hostcall import _jax
from hostcall._core.callback import CallSpec
from hostcall._core.option_checks import check
from hostcall._core.options import CallOptions
from hostcall._core.spec import Opaque
from hostcall._engine.gpu_arrays import OnDevice
from hostcall._engine.params.buffer import BufferParams
from hostcall._jax.types import LoweringContext, Value
from hostcall._primitives import call
from hostcall._primitives.batching import Batched, Dims, Operands, batch, size_of
from hostcall._primitives.eager import (
    as_jax_takes,
    bind_or_call,
    call_now,
    compile_alone,
    is_compiled,
)
from hostcall._primitives.lowering import start_lowering
from hostcall._primitives.some_axes import refuse_some_axes


def _impl(*operands: jax.Array, params: BufferParams) -> list[jax.Array]:
    """Compiles the equation, except at a function's first call on the CPU.

    On a GPU, only a program has a stream for the function to work on.
    """
    if not _on_host(operands) or is_compiled(operands, params):
        return compile_alone(buffer_p, operands, params)
    return call_now(*as_jax_takes(operands), params=params)


def _on_host(operands: Operands) -> bool:
    """Whether a call with these operands runs on one CPU device."""
    devices = {
        device
        for operand in operands
        if isinstance(operand, jax.Array) and operand.committed
        for device in operand.devices()
    }
    # Without a committed operand the call runs on the default device.
    homes = devices or {_jax.here()}
    return len(homes) == 1 and all(device.platform == "cpu" for device in homes)


buffer_p = call.define("buffer_callback", _impl, call.would_run_twice)


def bind(*operands: jax.Array, params: BufferParams) -> list[jax.Array]:
    return bind_or_call(buffer_p, operands, params=params)


def make(
    callback: CallSpec, operands: Operands, mask: jax.Array | None
) -> list[jax.Array]:
    """Binds a call with arrays="cuda", which works on a GPU's memory."""
    options = cast(CallOptions, callback.options)
    # Which of the place's options and of the function's policy may not meet.
    check(f"`{callback.name}`", options.met(callback.policy.at_least(), mask), {})
    method = options.vmap_method or "sequential"
    on_device = replace(
        callback,
        fn=Opaque(OnDevice(callback.fn, callback.results, callback.name)),
        # For the engine the arrays are Buffers, which need no conversion.
        options=replace(options, arrays="numpy", vmap_method=method),
    )
    avals = callback.results.avals
    params = BufferParams(callback=on_device, avals=avals, masked=False)
    return bind(*operands, params=params)


# --- batching ------------------------------------------------------------------------


def _batch(operands: Operands, dims: Dims, *, params: BufferParams) -> Batched:
    if params.options.vmap_method is None:
        _jax.refuse_vmap(buffer_p, operands, dims)
    size = size_of(operands, dims)
    operands = list(operands)
    dims = list(dims)
    # An operand whose memory becomes a batched result's must have the batch's size.
    for number, _ in params.aliases:
        if dims[number] is None:
            x = operands[number]
            operands[number] = jnp.broadcast_to(x, (size, *jnp.shape(x)))
            dims[number] = 0
    return batch(buffer_p, operands, dims, params=params, innermost=True)


_jax.batchers[buffer_p] = _batch


# --- JVP, transpose ------------------------------------------------------------------


call.refuse_derivatives_as_jax(
    buffer_p,
    "Buffer callbacks do not support {}. Please use `jax.custom_{}` to use callbacks"
    " while taking gradients.",
)


# --- lowering ------------------------------------------------------------------------


def lower(ctx: LoweringContext, *operands: Value, params: BufferParams) -> list[Value]:
    """The lowering of our primitive, and of JAX's (_compat/redirects.py)."""
    program = start_lowering(ctx)
    for platform in program.platforms:
        if platform not in _jax.SERVED:
            raise ValueError(
                f"`buffer_callback` not supported on {platform} backend."
                " (hostcall serves cpu and cuda.)"
            )
    if params.effect is not None:
        refuse_some_axes(program, params.callback.name)
    avals = _jax.physical_avals(ctx.avals_in)
    return call.lower(program, *operands, params=params, avals=avals)


_jax.register_lowering(buffer_p, lower, wants_devices=False)
