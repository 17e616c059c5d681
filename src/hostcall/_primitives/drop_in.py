"""The drop-ins' primitives: impl, abstract eval, batching, derivatives, remat, Refs.

They have the names of JAX's own primitives. Their equations are calls with other
effects, refusals and checks (see `_engine/params/drop_in.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from hostcall import _jax
from hostcall._core.order import effects_with
from hostcall._core.spec import Opaque, Results, Template, flatten_arguments
from hostcall._engine import targets
from hostcall._engine.params.drop_in import DropInParams
from hostcall._engine.params.equation import Equation
from hostcall._engine.placement import Placement
from hostcall._jax.types import Aval, Effect, LoweringContext, Value
from hostcall._primitives import call
from hostcall._primitives.batching import Batched, Dims, Operands, batch
from hostcall._primitives.blocks import Partitioned, Places, lower_blocks
from hostcall._primitives.eager import (
    as_jax_takes,
    bind_or_call,
    call_now,
    compile_alone,
    is_compiled,
)
from hostcall._primitives.lowering import NUMBER, job_of, start_lowering

_NAMES = ("pure_callback", "io_callback", "debug_callback", "debug_print")
PRIMITIVES = {name: _jax.Primitive(name) for name in _NAMES}
for _p in PRIMITIVES.values():
    _p.multiple_results = True


def bind(*operands: jax.Array, params: DropInParams) -> list[jax.Array]:
    primitive = PRIMITIVES[params.primitive]
    _jax.share_rooflines(PRIMITIVES)
    if params.primitive == "debug_callback" and any(map(_is_key, operands)):
        _jax.look_at_keys(primitive)
    return bind_or_call(primitive, operands, params=params)


def _is_key(operand: object) -> bool:
    return isinstance(operand, jax.Array) and _jax.is_key_dtype(operand.dtype)


# --- impl --------------------------------------------------------------------------


def _impl(*operands: jax.Array, params: DropInParams) -> list[jax.Array]:
    """Makes or compiles the call; a failure raises JaxRuntimeError in both cases.

    An eager debug callback raises the function's own exception instead, as JAX's does.
    """
    if params.kind == "pure" and not params.avals:
        return []  # as in a compiled program, which drops a call without results
    if params.kind == "debug":
        blocks, params = _open_keys(operands, params)
        return call_now(*as_jax_takes(blocks), params=params)
    if not _at_home(operands, params) or is_compiled(operands, params):
        return compile_alone(PRIMITIVES[params.primitive], operands, params)
    return call_now(*as_jax_takes(operands), params=params)


def _at_home(operands: Operands, params: DropInParams) -> bool:
    """Whether JAX would find nothing to refuse about the operands' devices.

    JAX refuses operands that are committed to different devices, and some of what
    `sharding=` may say.
    """
    device_sets = {
        frozenset(operand.devices())
        for operand in operands
        if isinstance(operand, jax.Array) and operand.committed
    }
    return params.options.sharding is None and len(device_sets) <= 1


def _open_keys(
    operands: Operands, params: DropInParams
) -> tuple[list[jax.Array], DropInParams]:
    """Replaces typed keys by their uint32 blocks, and marks them in the template.

    A debug callback gets typed keys when it is called eagerly. In a program it gets
    their blocks.
    """
    if not any(map(_is_key, operands)):
        return list(operands), params
    blocks, template = flatten_arguments(*params.callback.template.unflatten(operands))
    return blocks, replace(params, callback=replace(params.callback, template=template))


# --- abstract eval -----------------------------------------------------------------


def _abstract_eval(
    *operands: Aval, params: DropInParams
) -> tuple[list[Aval], frozenset[Effect]]:
    del operands
    _jax.need(_jax.Part.DROP_INS)
    return list(params.out_avals), effects_with(params.effect)


# --- batching ----------------------------------------------------------------------


def _batch(operands: Operands, dims: Dims, *, params: DropInParams) -> Batched:
    primitive = PRIMITIVES[params.primitive]
    if params.kind == "io" and params.options.order == "ordered":
        raise ValueError("Cannot `vmap` ordered IO callback.")
    if params.kind == "pure" and params.options.vmap_method is None:
        _jax.refuse_vmap(primitive, operands, dims)
    if params.partitioned:  # only the compiler knows which rows a device has
        return _jax.unroll(primitive, operands, dims, {"params": params})
    return batch(primitive, operands, dims, params=params, innermost=True)


# --- JVP, transpose ----------------------------------------------------------------


REFUSALS = {
    "pure_callback": "Pure callbacks do not support {}. Please use `jax.custom_{}` to"
    " use callbacks while taking gradients.",
    "io_callback": "IO callbacks do not support {}.",
}


def _debug_jvp(
    primals: Sequence[jax.Array], tangents: object, *, params: DropInParams
) -> tuple[list[jax.Array], list[jax.Array]]:
    del tangents
    return bind(*primals, params=params), []


def _debug_transpose(
    cotangents: object, *operands: object, params: DropInParams
) -> list[None]:
    del cotangents, params
    return [None for _ in operands]


# --- lowering ----------------------------------------------------------------------


def lower(ctx: LoweringContext, *operands: Value, params: DropInParams) -> list[Value]:
    """The lowering of our primitives, and on CPUs of JAX's (_compat/redirects.py)."""
    program = start_lowering(ctx)
    if params.kind == "debug" and program.automatic:
        axes = sorted(program.automatic, key=str)
        return _lower_once_along(ctx, operands, axes, params)
    if not _jax.is_served(ctx):
        # Through JAX's own callback, which refuses what JAX refuses.
        return call.lower_through_jax(
            program, *operands, params=params, partitioned=params.partitioned
        )
    if params.partitioned and program.is_partitioned:
        call_blocks = CallBlocks(program, params)
        # Said here, since a part's plan is made when the program is loaded.
        _jax.run_where_dispatched(program)
        return lower_blocks(program, operands, call_blocks)
    place = _jax.place_of_callback(ctx, params.options.sharding)
    if program.is_partitioned:
        _jax.mark_place(ctx, place)
    avals = _jax.physical_avals(ctx.avals_in)
    return call.lower(program, *operands, params=params, avals=avals)


def _lower_once_along(
    ctx: LoweringContext,
    operands: Sequence[Value],
    automatic: list[Hashable],
    params: DropInParams,
) -> list[Value]:
    """A debug callback in a shard_map that is manual over some mesh axes only: it runs
    once along the others.
    """

    def once(*values: jax.Array) -> list[jax.Array]:
        return list(_jax.on_first_of(automatic, lambda: bind(*values, params=params)))

    return _jax.lower_by(ctx, once, *operands)


# --- partitioned=True: each device calls for its own block ----------------------------


class CallBlocks(Partitioned):
    """A call with partitioned=True."""

    target = targets.TARGET

    def __init__(self, program: _jax.Program, params: DropInParams) -> None:
        super().__init__(program, params, job=job_of(program))
        self._numbered = _with_number(params)

    def of_block(
        self, avals: list[Aval], places: Places
    ) -> tuple[Equation, Placement, list[Aval]]:
        del places
        return self._numbered, self.placement, [NUMBER, *avals]


def _with_number(params: DropInParams) -> DropInParams:
    """The same call, with the number as its first argument and as its result."""
    callback = params.callback
    fn = callback.function
    template = callback.template

    def numbered(number: Any, *leaves: Any) -> np.ndarray:
        args, kwargs = template.unflatten(leaves)
        fn(*args, **kwargs)
        return np.zeros((), np.int32)

    # Messages, statistics and profiles call it by the user's name.
    numbered.__qualname__ = callback.name
    return replace(
        params,
        callback=replace(
            callback,
            fn=Opaque(numbered),
            template=Template.flat(None, *template.keys),
            results=Results(jax.tree.structure(0), (NUMBER,), (None,)),
            fills=(None,),
        ),
        avals=(NUMBER,),
        results_as="leaves",
    )


# --- registration ------------------------------------------------------------------


for _name, _p in PRIMITIVES.items():
    _p.def_impl(_impl)
    _p.def_effectful_abstract_eval(_abstract_eval)
    _jax.batchers[_p] = _batch
    _jax.register_lowering(_p, lower)
    if _name in REFUSALS:
        call.refuse_derivatives_as_jax(_p, REFUSALS[_name])
        continue
    _jax.jvps[_p] = _debug_jvp
    _jax.transposes[_p] = _debug_transpose
    _jax.keep_under_remat(_p)
    _jax.discharge_in_place(_p)
