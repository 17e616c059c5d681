"""Calls outside of any compiled program."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from hostcall import _jax
from hostcall._core import failures, process
from hostcall._engine import plans, targets
from hostcall._engine.info import CallInfo
from hostcall._engine.params.equation import Equation
from hostcall._jax.types import Device, Sharding
from hostcall._runtime import host_device

logger = logging.getLogger("hostcall")


def prepare(
    operands: Sequence[jax.Array], params: Equation
) -> tuple[CallInfo, Callable[[], list[jax.Array]]]:
    """(what describes a call, a function that makes it now).

    Nothing is compiled or kept. The same native code runs as in a compiled program, on
    NumPy's buffers. An exception of the function propagates as it is.
    """
    targets.start()
    process.refuse(f"{params.shown} is called")
    go_on_after_failures(params)
    place = _result_sharding(operands, params.options.sharding)
    arrays = [row_major(operand) for operand in operands]
    home = first_device(() if place is None else place.device_set)
    info = params.info({-1: home}, None)
    info.device = host_device.above_here()
    plan = plans.make_plan(info, arrays)

    def run() -> list[jax.Array]:
        try:
            results = plan.invoke(arrays)
        except ValueError as error:
            info.hint(error)
            raise
        if place is None:
            return [_jax.put_on_device(r, home, committed=False) for r in results]
        return [jax.device_put(result, place) for result in results]

    return info, run


def run_and_keep(*operands: jax.Array, params: Equation) -> list[jax.Array]:
    """Makes the call; an exception is kept for `hc.errors.last_error()` too."""
    try:
        return prepare(operands, params)[1]()
    except BaseException as error:
        failures.keep(error, handed_over=True)
        raise


def go_on_after_failures(params: Equation) -> None:
    """Logs the failed programs after which an ordered call or tap is made."""
    if params.options.order != "ordered":
        return
    for failure in failures.failures_of_effects():
        text = "an ordered %s continues after a failed program: %s"
        logger.error(text, params.word, failure)


def row_major(operand: jax.Array | np.ndarray) -> np.ndarray:
    # np.ascontiguousarray would make a scalar one-dimensional.
    array = _jax.to_numpy(operand) if isinstance(operand, jax.Array) else operand
    return np.asarray(array, order="C")


def _result_sharding(
    operands: Sequence[jax.Array], wanted: Sharding | None
) -> Sharding | None:
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
        if len(sharding.device_set) > 1:
            device = first_device(sharding.device_set)
            return jax.sharding.SingleDeviceSharding(device)
        return sharding
    return None


def first_device(devices: Iterable[Device]) -> Device:
    """The device with the smallest number; the default device if there is none."""
    return min(devices, key=lambda device: device.id, default=None) or _jax.here()
