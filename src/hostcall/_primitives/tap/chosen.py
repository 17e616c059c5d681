"""The one device that taps, in an exported program over several devices.

A compiled program names this device by its ordinal. An exported program may run on any
devices, so it compares its own partition id instead, and the result is part of the
tap's mask. (So `hc.monitor.stats()` counts the other devices' executions as masked.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._engine.params.tap import TapParams
from hostcall._primitives import once
from hostcall._primitives.slots import refuse_export

_FLAG = _jax.ShapedArray((), np.dtype(np.bool_))


def chosen(program: _jax.Program, params: TapParams) -> int | None:
    """The index of the device that taps; None if the engine knows it by its ordinal,
    or if all devices tap.
    """
    if not program.is_exported or program.mesh is not None or program.size == 1:
        return None
    if params.device is not None:
        refuse_export(
            params.callback,
            f"it has on={params.device}, and the program may run on other devices."
            " Leave out on=: the first device of the program then taps",
        )
    return params.leader or 0


def with_mask(
    program: _jax.Program,
    operands: Sequence[Any],
    avals: Sequence[Any],
    params: TapParams,
) -> tuple[list[Any], list[Any], TapParams]:
    """The operands, their avals and the parameters of the same tap with a mask."""
    if params.masked:
        return list(operands), list(avals), params
    (true,) = _jax.lower_traced(program.ctx, lambda: [np.True_], (), ())
    return [true, *operands], [_FLAG, *avals], once.with_mask(params)


def only_on(
    program: _jax.Program, number: int, operands: Sequence[Any], avals: Sequence[Any]
) -> list[Any]:
    """The operands with a mask that is False on all devices but this one.

    Runs inside a region that is manual over all devices.
    """

    def both(mask: Any, device: Any) -> list[Any]:
        return [jnp.logical_and(mask, device == number)]

    given = (avals[0], jax.ShapeDtypeStruct((), np.uint32))
    values = (operands[0], _jax.partition_id())
    return [*_jax.lower_traced(program.ctx, both, given, values), *operands[1:]]
