"""The lowering of a buffer callback: one custom call for all platforms.

The CPU handler and the CUDA handler have the same name, so a module that is lowered for
both platforms needs no choice between them.
"""

from __future__ import annotations

from typing import Any

from hostcall import _jax
from hostcall._engine import targets
from hostcall._engine.params.buffer import BufferInfo, BufferParams
from hostcall._primitives.buffer.primitive import buffer_p
from hostcall._primitives.call import lowering as call_lowering
from hostcall._primitives.emit import refuse_some_axes


def lower(ctx: Any, *operands: Any, params: BufferParams) -> list[Any]:
    """The lowering of our primitive, and of JAX's (_compat/lowerings.py)."""
    program = _jax.program_of(ctx)
    for platform in program.platforms:
        if platform not in _jax.SERVED:
            raise ValueError(
                f"`buffer_callback` not supported on {platform} backend."
                " (hostcall serves cpu and cuda.)"
            )
    if params.order != "pure":
        refuse_some_axes(program, params.callback.name)
    graph = params.command_buffer
    return call_lowering.lower(
        program,
        operands,
        _jax.physical_avals(ctx.avals_in),
        params,
        BufferInfo,
        target=targets.GRAPH_TARGET if graph else targets.BUFFER_TARGET,
        aliases=dict(params.aliases),
    )


_jax.register_lowering(buffer_p, lower, wants_devices=False)
