"""A debug callback with partitioned=True: each device calls for its own block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from hostcall import _jax
from hostcall._core.spec import Results, Static, Template
from hostcall._engine import targets
from hostcall._engine.params.drop_in import DropInInfo, DropInParams
from hostcall._primitives.blocks import Partitioned, lower_blocks
from hostcall._primitives.emit import NUMBER


class CallBlocks(Partitioned):
    """What the parts of a call share."""

    target = targets.TARGET

    def __init__(self, program: _jax.Program, params: DropInParams) -> None:
        super().__init__(program, self._info(params, program))

    @staticmethod
    def _info(params: DropInParams, program: Any) -> DropInInfo:
        info = DropInInfo(params, program.by_ordinal, None)
        info.job = targets.failures_over(program.across)
        return info

    def of_block(
        self, avals: list[Any], places: Sequence[Any]
    ) -> tuple[DropInInfo, list[Any], None]:
        del places
        return self._info(_with_number(self.params), self), [NUMBER, *avals], None


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
    targets.start_lowering(program)
    equation = CallBlocks(program, params)
    _jax.run_where_dispatched(program)
    return lower_blocks(program, operands, equation)
