"""Calls outside of any program: calls, host functions, taps, prints and drop-ins.

An eager call goes one way. `bind_or_call` sees that nothing is traced and that all
operands are arrays, and makes the call at once: `start` refuses what no call may do
now, `plan_here` makes the plan that a program would have, and the engine runs that on
NumPy's arrays. Nothing is compiled, and nothing of the function is kept: a program that
calls fresh lambdas for hours must not use more and more memory. What depends on shapes
and dtypes alone is kept by the functions that make it (plans.py, placing.py).

Drop-ins and buffer callbacks go this way too when a function is called first; the end
of this file says when they are compiled, as JAX compiles all of its own.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

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

# For each array its part of the whole, as an index.
Block: TypeAlias = tuple[tuple[slice, ...], ...]

# --- One call -------------------------------------------------------------------------


def bind_or_call(
    primitive: Primitive, operands: Sequence[jax.Array], **params: Any
) -> list[jax.Array]:
    """Binds an equation; makes its call at once if nothing is traced."""
    if _jax.traces_nothing() and _jax.are_arrays(operands):
        # What JAX's `bind` would call in the end, 20 us later.
        return primitive.impl(*operands, **params)  # type: ignore[no-any-return]
    return primitive.bind(*operands, **params)  # type: ignore[no-any-return]


def call_now(*operands: jax.Array | np.ndarray, params: Equation) -> list[jax.Array]:
    """Makes the call; raises what the hooks of its kind say.

    The exception is kept for `hc.errors.last_error()` too.
    """
    try:
        start(params)
        # This waits for arrays that are not ready, and raises what they failed with.
        arrays = [row_major(operand) for operand in operands]
        sharding = _result_sharding(operands)
        home = chosen_here(params, _devices_of(sharding))
        hooks, plan = plan_here(params, home, arrays)
    except BaseException as error:
        failures.store(error, handed_over=True)
        raise
    results = [
        _jax.put_on_device(value, home, committed=False)
        if sharding is None
        else _jax.put_with_sharding(value, sharding)
        for value in _invoked(hooks, plan, arrays)
    ]
    # With jax_debug_nans a jitted program runs again without jit to find the operation:
    # then this call is what JAX looks for.
    if _jax.refuses_special():
        _jax.refuse_special(results, params.checked_as)
    return results


def start(params: Equation) -> None:
    """What comes before every eager call and tap."""
    targets.start()
    if _native.forked():
        raise process.refusal(f"`{params.callback.name}` is {params.participle}")
    if params.options.order == "ordered":
        _go_on_after_failures(params.word)


def plan_here(
    params: Equation,
    home: Device,
    arrays: Sequence[np.ndarray],
    block: Block | None = None,
) -> tuple[CallHooks, _native.Plan]:
    """(the hooks, the plan) of a call that the calling thread makes itself.

    Args:
        params: what is called.
        home: the device that the call stands for.
        arrays: its operands on the host; the mask first if there is one.
        block: of a tap that delivers blocks, where each array's block lies.
    """
    placement = alone(home, host_device.host_device_here())
    if block is not None:
        placement = replace(placement, blocks={-1: block})
    # Made anew for each call, since they lead to the function, which nothing may keep.
    hooks = params.hooks(params, placement)
    return hooks, plans.make_plan(hooks, arrays)


def _invoked(
    hooks: CallHooks, plan: _native.Plan, arrays: list[np.ndarray]
) -> list[np.ndarray]:
    """The results of the function, or the error that its kind of call raises."""
    try:
        return plan.invoke(arrays)
    except Exception as error:
        raised = hooks.eager_error(error)
        try:
            if raised is error:
                raise
            raise raised from error
        finally:  # breaks the reference cycle of the exception with this frame
            del raised
    except BaseException as error:  # KeyboardInterrupt, SystemExit
        failures.store(error, handed_over=True)
        raise


def _go_on_after_failures(word: str) -> None:
    """Logs the failed programs after which an ordered call or tap is made."""
    for failure in failures.failures_of_effects():
        text = "an ordered %s continues after a failed program: %s"
        logger.error(text, word, str(failure))  # a handler may keep what it gets


# --- Arrays ---------------------------------------------------------------------------


def row_major(operand: jax.Array | np.ndarray) -> np.ndarray:
    """The values of an operand in the order in which the engine reads them."""
    array = _jax.to_numpy(operand) if isinstance(operand, jax.Array) else operand
    # JAX may give a number of Python's, in a class of its own (TypedFloat).
    if isinstance(array, np.ndarray) and array.flags.c_contiguous:
        return array
    # np.ascontiguousarray would make a scalar one-dimensional.
    return np.asarray(array, order="C")


def _result_sharding(operands: Sequence[jax.Array | np.ndarray]) -> Sharding | None:
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


def _devices_of(sharding: Sharding | None) -> list[Device]:
    """The devices of a call's results, that with the smallest number first."""
    if sharding is None:
        return [_jax.here()]
    return sorted(sharding.device_set, key=lambda device: device.id)


def first_device(devices: Iterable[Device]) -> Device:
    """The device with the smallest number; the default device if there is none."""
    return min(devices, key=lambda device: device.id, default=None) or _jax.here()


# --- Drop-ins and buffer callbacks ----------------------------------------------------
#
# JAX compiles every eager callback, which takes 5 to 8 ms for each fresh lambda, and
# keeps what it compiled. Here the first call of a function is made at once and compiles
# nothing. Only an equal call that comes while the function is still alive is compiled:
# what the function gets are jax.Arrays, which a program makes faster.


def is_compiled(operands: Sequence[object], params: Equation) -> bool:
    """Whether an eager call is compiled: it was made before, or JAX's transfer guards
    have a say, since a program would move operands that are no jax.Arrays yet.
    """
    all_arrays = all(isinstance(operand, jax.Array) for operand in operands)
    is_guarded = not all_arrays and _jax.guards_transfers_to_devices()
    return is_guarded or seen_before(params, params.callback.function)


_SEEN_AT_MOST = 4096
# Hash of params -> reference to function, the oldest first. Changed by single steps,
# without a lock, which a fork could leave locked.
_seen: dict[int, weakref.ref[Callable[..., Any]]] = {}


def seen_before(params: Hashable, fn: Callable[..., Any]) -> bool:
    """Whether an equal eager call of `fn`, which is still alive, was made before."""
    key = hash(params)
    reference = _seen.pop(key, None)
    with contextlib.suppress(TypeError):  # no weak reference to it: never compiled
        _seen[key] = weakref.ref(fn)
    with contextlib.suppress(RuntimeError):  # another thread was faster
        while len(_seen) > _SEEN_AT_MOST:
            _seen.pop(next(iter(_seen)), None)
    return reference is not None and reference() is fn


def compile_alone(
    primitive: Primitive, operands: Sequence[jax.Array], params: Equation
) -> list[jax.Array]:
    """Compiles the equation alone. An error of JAX's NaN check names the function."""
    try:
        results: list[jax.Array] = _jax.apply_primitive(
            primitive, *operands, params=params
        )
    except FloatingPointError as error:
        text = f"{error} of {params.callback.described()}"
        raise FloatingPointError(text) from None
    return results


def as_jax_takes(
    operands: Sequence[jax.typing.ArrayLike],
) -> list[jax.Array | np.ndarray]:
    """The operands of a drop-in with the dtypes that JAX gives them."""
    return [x if isinstance(x, jax.Array) else _jax.to_host(x) for x in operands]
