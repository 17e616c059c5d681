"""The call primitive itself: impl, abstract eval, JVP, transpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from hostcall import _errors, _fork, _handlers, _host_device, _jax, _targets
from hostcall._callback import CallInfo, CallParams
from hostcall._order import effects_of

call_p = _jax.Primitive("host_call")
call_p.multiple_results = True
_jax.hold_weakly_in_caches(CallParams)


def bind(*operands: Any, params: CallParams) -> list[Any]:
    return call_p.bind(*operands, params=params)  # type: ignore[no-any-return]


# --- impl --------------------------------------------------------------------------


def _impl(*operands: Any, params: CallParams) -> list[Any]:
    try:
        results = run_now(operands, params)
    except BaseException as error:
        _errors.keep(error, handed_over=True)
        raise
    _jax.refuse_special(results, params.callback.described)
    return results


call_p.def_impl(_impl)


def run_now(
    operands: Sequence[Any],
    params: CallParams,
    info_type: Callable[..., CallInfo] = CallInfo,
) -> list[Any]:
    """Calls the function now. Compiles nothing, and leaves nothing behind.

    The same native code runs as in a compiled program, on NumPy's buffers. What the
    function raises comes out as it is.
    """
    _handlers.start()
    _fork.refuse(f"`{params.callback.name}` is called")
    if params.order == "ordered":
        for failure in _errors.failures_of_effects():
            _targets.logger.error("an ordered call goes on after: %s", failure)
    place = _result_sharding(operands, params.sharding)
    device = _host_device.above_here()
    arrays = [row_major(operand) for operand in operands]
    home = _some_device(place)
    info = info_type(params, {-1: home}, mesh=None)
    plan = _targets.make_plan(params, arrays, info, device, packed=False, number=0)
    results = plan.invoke(arrays)
    if place is None:
        return [_jax.put_on_device(r, home, committed=False) for r in results]
    return [jax.device_put(result, place) for result in results]


def row_major(operand: Any) -> np.ndarray:
    array = (
        _jax.to_numpy(operand)
        if isinstance(operand, jax.Array)
        else np.asarray(operand)
    )
    return np.ascontiguousarray(array).reshape(array.shape)


def _result_sharding(operands: Any, wanted: Any) -> Any:
    """Where an eager call's results go: where jit would put them.

    On the mesh of a sharded operand, replicated; else with a committed operand; else
    to the default device (None).
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


# --- abstract eval -----------------------------------------------------------------


def _abstract_eval(*operands: Any, params: CallParams) -> tuple[list[Any], set[Any]]:
    pure = params.order == "pure"
    avals = _jax.result_avals(params.out_avals, operands, pure)
    return avals, effects_of(params.order)


_jax.def_effectful_abstract_eval(call_p, _abstract_eval)


# --- JVP, transpose ----------------------------------------------------------------


def _jvp(primals: Any, tangents: Any, *, params: CallParams) -> NoReturn:
    del primals, tangents
    raise _errors.DerivativeError(
        f"hostcall: the call of `{params.callback.name}` has no derivative"
        f" ({params.callback.place}). Give one with jax.custom_jvp or jax.custom_vjp"
        " around the call, or keep the derivative out with"
        " jax.lax.stop_gradient on its arguments"
    )


def _transpose(cotangents: Any, *operands: Any, params: CallParams) -> NoReturn:
    del cotangents, operands
    raise _errors.DerivativeError(
        f"hostcall: the call of `{params.callback.name}` can't be transposed"
        f" ({params.callback.place}). If it is linear, say so with"
        " jax.custom_derivatives.linear_call, or give the cotangents with"
        " jax.custom_vjp around the call"
    )


_jax.jvps[call_p] = _jvp
_jax.transposes[call_p] = _transpose
