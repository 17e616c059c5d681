"""Calls outside of any compiled program."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from hostcall import _jax, _native
from hostcall._core import failures, process
from hostcall._engine import plans, targets
from hostcall._engine.hooks import CallHooks
from hostcall._engine.params.equation import Equation
from hostcall._engine.placing import alone
from hostcall._jax.types import Device, Primitive, Sharding
from hostcall._primitives.chosen import chosen_here
from hostcall._runtime import host_device

logger = logging.getLogger("hostcall")


def prepare(
    operands: Sequence[jax.Array], params: Equation
) -> tuple[CallHooks, Callable[[], list[jax.Array]]]:
    """(the hooks of a call, a function that makes it now).

    Nothing is compiled or kept. The same native code runs as in a compiled program, on
    NumPy's buffers. An exception of the function propagates as it is.
    """
    targets.start()
    if _native.forked():
        raise process.refusal(f"{params.shown} is called")
    if params.options.order == "ordered":
        go_on_after_failures(params.word)
    place = _result_sharding(operands)
    arrays = [row_major(operand) for operand in operands]
    devices = () if place is None else place.device_set
    in_order = sorted(devices, key=lambda device: device.id) or [_jax.here()]
    home = chosen_here(params, in_order)
    placement = alone(home, host_device.host_device_here())
    hooks = params.hooks(params, placement)
    plan = plans.make_plan(hooks, arrays)

    def run() -> list[jax.Array]:
        try:
            results = plan.invoke(arrays)
        except (TypeError, ValueError) as error:
            hooks.hint(error)
            raise
        if place is None:
            return [_jax.put_on_device(r, home, committed=False) for r in results]
        return [_jax.put_with_sharding(result, place) for result in results]

    return hooks, run


def run_and_keep(*operands: jax.Array, params: Equation) -> list[jax.Array]:
    """Makes the call; an exception is kept for `hc.errors.last_error()` too."""
    try:
        results = prepare(operands, params)[1]()
    except BaseException as error:
        failures.store(error, handed_over=True)
        raise
    if _jax.refuses_special():
        _jax.refuse_special(results, params.callback.described())
    return results


def run_compiled(
    primitive: Primitive, operands: Sequence[jax.Array], params: Equation
) -> list[jax.Array]:
    """Compiles the equation alone. An error of JAX's NaN check names the function."""
    try:
        out: list[jax.Array] = _jax.apply_primitive(primitive, *operands, params=params)
    except FloatingPointError as error:
        text = f"{error} of {params.callback.described()}"
        raise FloatingPointError(text) from None
    return out


def run_eagerly(
    primitive: Primitive, operands: Sequence[jax.Array], params: Equation
) -> list[jax.Array]:
    """Calls now; on failure raises what the equation's hooks choose."""
    arrays = [x if isinstance(x, jax.Array) else _jax.to_host(x) for x in operands]
    hooks, run = prepare(arrays, params)
    try:
        results = run()
    except Exception as error:
        raised = hooks.eager_error(error)
        failures.hand_over(error)
        try:
            if raised is error:
                raise
            raise raised from error
        finally:  # breaks the reference cycle of the exception with this frame
            del raised
    except BaseException as error:  # KeyboardInterrupt, SystemExit
        failures.store(error, handed_over=True)
        raise
    if _jax.refuses_special():
        what = f"{primitive.name} of {params.callback.described()}"
        _jax.refuse_special(results, what)
    return results


def go_on_after_failures(word: str) -> None:
    """Logs the failed programs after which an ordered call or tap is made."""
    for failure in failures.failures_of_effects():
        text = "an ordered %s continues after a failed program: %s"
        logger.error(text, word, str(failure))  # a handler may keep what it gets


def row_major(operand: jax.Array | np.ndarray) -> np.ndarray:
    # np.ascontiguousarray would make a scalar one-dimensional.
    array = _jax.to_numpy(operand) if isinstance(operand, jax.Array) else operand
    return np.asarray(array, order="C")


def _result_sharding(operands: Sequence[jax.Array]) -> Sharding | None:
    """Where an eager call's results go, which is where jit would put them, whichever
    device makes the call.

    If an operand is sharded over a mesh, they are replicated on that mesh. Otherwise
    they go to the device of a committed operand, and without one to the default device
    (None).
    """
    for operand in operands:
        if not isinstance(operand, jax.Array) or not operand.committed:
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


# --- Drop-ins and buffer callbacks ----------------------------------------------------
#
# JAX compiles every eager callback, which takes 5 to 8 ms for each fresh lambda, and
# keeps what it compiled. Here the first call of a function runs at once and compiles
# nothing. Only an equal call that comes while the function is still alive is compiled.

_SEEN_AT_MOST = 4096
# Hash of params -> reference to function, the oldest first. Changed by single steps,
# without a lock, which a fork could leave locked.
_seen: dict[int, weakref.ref[Callable[..., Any]]] = {}


def seen_before(params: Hashable, fn: Callable[..., Any]) -> bool:
    """Whether an equal eager call of `fn`, which is still alive, was made before."""
    found = _seen.pop(key := hash(params), None)
    with contextlib.suppress(TypeError):  # no weak reference to it: it runs each time
        _seen[key] = weakref.ref(fn)
    with contextlib.suppress(RuntimeError):  # another thread was faster
        while len(_seen) > _SEEN_AT_MOST:
            _seen.pop(next(iter(_seen)), None)
    return found is not None and found() is fn


def is_compiled(operands: Sequence[jax.Array], params: Equation) -> bool:
    """Whether an eager call is compiled: it was made before, or JAX's transfer guards
    apply, since a program would move operands that are no jax.Arrays yet to its device.
    """
    moves = not all(isinstance(x, jax.Array) for x in operands)
    guarded = moves and _jax.guards_transfers_to_devices()
    return guarded or seen_before(params, params.callback.function)
