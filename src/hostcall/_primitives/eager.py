"""Calls outside of any compiled program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hostcall import _jax
from hostcall._core import failures
from hostcall._engine import plans, targets
from hostcall._engine.info import CallInfo
from hostcall._engine.params.call import CallParams
from hostcall._engine.plans import Entrance
from hostcall._runtime import fork, host_device


def run_now(
    operands: Sequence[Any],
    params: CallParams,
    info_type: Callable[..., CallInfo] = CallInfo,
) -> list[Any]:
    """Calls the function now, without compiling anything and without keeping anything.

    The same native code runs as in a compiled program, on NumPy's buffers. An exception
    of the function propagates as it is.
    """
    targets.start()
    fork.refuse(f"`{params.callback.name}` is called")
    if params.order == "ordered":
        for failure in failures.failures_of_effects():
            plans.logger.error(
                "an ordered call continues after a failed program: %s", failure
            )
    place = _result_sharding(operands, params.sharding)
    device = host_device.above_here()
    arrays = [row_major(operand) for operand in operands]
    home = _some_device(place)
    info = info_type(params, {-1: home}, mesh=None)
    plan = plans.make_plan(params, arrays, info, Entrance(device=device))
    try:
        results = plan.invoke(arrays)
    except ValueError as error:
        info.hint(error)
        raise
    if place is None:
        return [_jax.put_on_device(r, home, committed=False) for r in results]
    return [jax.device_put(result, place) for result in results]


def run_and_keep(*operands: Any, params: CallParams) -> list[Any]:
    """`run_now`; an exception is also kept for `hc.errors.last_error()`."""
    try:
        return run_now(operands, params)
    except BaseException as error:
        failures.keep(error, handed_over=True)
        raise


def row_major(operand: Any) -> np.ndarray:
    array = (
        _jax.to_numpy(operand)
        if isinstance(operand, jax.Array)
        else np.asarray(operand)
    )
    # np.ascontiguousarray makes a scalar one-dimensional.
    return np.ascontiguousarray(array).reshape(array.shape)


def _result_sharding(operands: Any, wanted: Any) -> Any:
    """Where an eager call's results go, which is where jit would put them.

    If an operand is sharded over a mesh, they are replicated on that mesh. Otherwise
    they go to the device of a committed operand, and without one to the default device
    (None).
    """
    if wanted is not None:
        return wanted
    for operand in operands:
        if not isinstance(operand, jax.Array) or not _jax.is_committed(operand):
            continue
        sharding = operand.sharding
        if isinstance(sharding, jax.sharding.NamedSharding):
            return jax.sharding.NamedSharding(
                sharding.mesh, jax.sharding.PartitionSpec()
            )
        return sharding if len(sharding.device_set) == 1 else _first_device(sharding)
    return None


def _first_device(sharding: Any) -> Any:
    device = min(sharding.device_set, key=lambda d: d.id)
    return jax.sharding.SingleDeviceSharding(device)


def _some_device(place: Any) -> Any:
    if place is not None:
        return min(place.device_set, key=lambda device: device.id)
    return _jax.here()
