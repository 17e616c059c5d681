"""The floor under the lowering of a call: the same work in a row, for one kind of call.

It lowers a pure function of one float32 scalar. It knows no option, mask, batch, key,
layer or second device, shares no slot, and has no other kind of equation beside it.
Whatever else is there, a call needs it: the checks of what the user gave, the trees,
the place in the source, the plan, its counters, the key that JAX's disk cache wants,
the name that profilers show, and the custom call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import core
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

from hostcall import _jax, _native
from hostcall._core import mistakes, signatures, source, spec
from hostcall._core.callback import CallSpec
from hostcall._core.options import CallOptions
from hostcall._engine.counters import costs
from hostcall._engine.hooks import CallHooks
from hostcall._engine.params.equation import CallParams
from hostcall._engine.place_numbers import places
from hostcall._engine.placement import Placement
from hostcall._primitives.kept_alive import KeptAlive

SCALAR = core.ShapedArray((), np.dtype(np.float32))
_call_p = core.Primitive("by_hand")
_call_p.multiple_results = True
_call_p.def_abstract_eval(lambda x, *, params: [SCALAR])


def call(fn: Callable[..., Any], result: Any, x: Any) -> Any:
    name = mistakes.check_function(fn, "call(fn, result, x)", awaits=True).name
    operands, template = spec.flatten_arguments((x,), {})
    assert signatures.accepts(fn, 1, ())
    results = spec.parse_result(result, name)
    trees = template, results, (None,)
    place = source.users_place(fn)
    callback = CallSpec(spec.Opaque(fn), *trees, CallOptions(), place)
    params = CallParams(callback=callback, avals=results.avals, masked=False)
    return results.unflatten(_call_p.bind(*operands, params=params))


def _leaf() -> _native.Leaf:
    return _native.Leaf(
        dtype=SCALAR.dtype,
        bits=spec.packed_bits(SCALAR.dtype)[0],
        is_signed=False,
        shape=(),
        batched=[],
        convert=None,
        fill=None,
    )


def _lowered(ctx: Any, x: Any, *, params: CallParams) -> list[Any]:
    program = _jax.program_of(ctx)
    placement = Placement(devices=program.by_ordinal, mesh=program.mesh)
    hooks = CallHooks(params, placement)
    native = params.native
    plan = _native.Plan(
        **native,
        function=params.callback.function,
        runner=None,
        sends=False,
        args=[_leaf()],
        results=[_leaf()],
        grid=(),
        mask=None,
        hooks=hooks,
        plan_of_block=None,
        device=None,
        enter=None,
        leave=None,
        counters=costs.note(params),
        place=places.number_of(params.callback),
        returns_outcome=False,
        called_by_other_process=False,
        team=None,
        guard=None,
        inside=_native.Inside.NEVER,
        keeps_mesh=False,
        kind=params.native_kind(placement),
        text="",
    )
    key = params.key((SCALAR,), program.name)
    kept = KeptAlive(_native.Slot(plan, key, False), hooks.name, "")
    ctx.module_context.add_keepalive(kept)
    number = ir.IntegerType.get_unsigned(64)
    attributes = {"key": key, "count": kept.slot.count}
    with _jax.named(ctx, params.callback.label):
        made = mlir.custom_call(
            "hostcall_call",
            result_types=[x.type],
            operands=[x],
            api_version=4,
            backend_config={
                k: ir.IntegerAttr.get(number, v) for k, v in attributes.items()
            },
            has_side_effect=False,
            operand_layouts=[()],
            result_layouts=[()],
        )
    return list(made.results)


mlir.register_lowering(_call_p, _lowered)


def check() -> None:
    """That a program with such a call runs."""
    got = jax.jit(lambda x: call(np.sin, SCALAR, x))(np.float32(1))
    assert abs(float(got) - np.sin(1.0)) < 1e-6, got
