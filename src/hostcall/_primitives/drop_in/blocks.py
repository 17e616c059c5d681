"""A debug callback with partitioned=True: each device calls for its own block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from hostcall import _jax, _native
from hostcall._core.spec import Results, Static, Template
from hostcall._engine import targets
from hostcall._engine.params.drop_in import DropInInfo, DropInParams
from hostcall._primitives.blocks import NUMBER, Equation, emit_block, lower_blocks

block_call_p = _jax.Primitive("host_block_call")


def _abstract_eval(number: Any, *operands: Any, equation: Equation) -> Any:
    del number, operands, equation
    return NUMBER


def _lower(ctx: Any, number: Any, *operands: Any, equation: Equation) -> Any:
    """The call of one device on its own, which takes and returns the number."""
    info = DropInInfo(_with_number(equation.params), equation.by_ordinal, None)
    info.across = equation.across
    avals = _jax.physical_avals(ctx.avals_in)
    return emit_block(ctx, targets.TARGET, [number, *operands], equation, info, avals)


block_call_p.def_abstract_eval(_abstract_eval)
_jax.register_lowering(block_call_p, _lower)


def _with_number(params: DropInParams) -> DropInParams:
    """The same call, with the number as its first argument and as its result."""
    callback = params.callback
    fn, template = callback.function, callback.template

    def call(number: Any, *leaves: Any) -> np.ndarray:
        args, kwargs = template.fill(leaves)
        fn(*args, **kwargs)
        return np.zeros((), np.int32)

    call.__qualname__ = callback.name
    return replace(
        params,
        callback=replace(
            callback,
            fn=Static(call),
            template=Template.flat(None, *template.keys),
            results=Results(jax.tree.structure(0), (NUMBER,), (None,)),
            fills=(None,),
        ),
        avals=(NUMBER,),
        results_as="leaves",
    )


def lower(
    program: _jax.Program, operands: Sequence[Any], params: DropInParams
) -> list[Any]:
    """The lowering in a partitioned program."""
    targets.start_on(program.client)
    _native.bury()
    equation = Equation(program, params)
    _jax.run_where_dispatched(program)
    call = partial(_call_block, equation=equation)
    return lower_blocks(
        program, operands, equation, lambda *shardings: call, unpartitioned=call
    )


def _call_block(number: Any, *blocks: Any, equation: Equation) -> Any:
    return block_call_p.bind(number, *blocks, equation=equation)
