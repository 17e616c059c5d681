"""A debug callback with partitioned=True: each device calls for its own block."""

from __future__ import annotations

import json
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
from hostcall._primitives.blocks import Partitioned, emit_block, lower_blocks
from hostcall._primitives.emit import NUMBER

block_call_p = _jax.Primitive("host_block_call")


def _abstract_eval(number: Any, *operands: Any, equation: CallBlocks) -> Any:
    del number, operands, equation
    return NUMBER


def _lower(ctx: Any, number: Any, *operands: Any, equation: CallBlocks) -> Any:
    """The call of one device on its own, which takes and returns the number."""
    return emit_block(ctx, targets.TARGET, [number, *operands], equation)


block_call_p.def_abstract_eval(_abstract_eval)
_jax.register_lowering(block_call_p, _lower)


class CallBlocks(Partitioned):
    """What the parts of a call share."""

    def __init__(self, program: _jax.Program, params: DropInParams) -> None:
        super().__init__(program, self._info(params, program))

    @staticmethod
    def _info(params: DropInParams, program: Any) -> DropInInfo:
        info = DropInInfo(params, program.by_ordinal, None)
        info.job = targets.failures_over(program.across)
        return info

    def plan_of_block(self, block: str) -> _native.Plan:
        avals = self.avals(json.loads(block)["shapes"])
        info = self._info(_with_number(self.params), self)
        info.of_program = self.of_program
        return self.make_plan(info, [NUMBER, *avals])


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
    equation = CallBlocks(program, params)
    _jax.run_where_dispatched(program)
    call = partial(_call_block, equation=equation)
    return lower_blocks(
        program, operands, equation, lambda *shardings: call, unpartitioned=call
    )


def _call_block(number: Any, *blocks: Any, equation: CallBlocks) -> Any:
    return block_call_p.bind(number, *blocks, equation=equation)
