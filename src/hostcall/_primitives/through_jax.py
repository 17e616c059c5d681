"""Platforms that the engine does not serve: JAX's own callback brings the values.

JAX's callback copies the arrays to the host, at its own cost, and there the engine runs
on them: so rows, masks, dtypes and errors are the same as elsewhere. Where JAX has no
callback either, the equation is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from hostcall import _jax
from hostcall._core.errors import HostcallError
from hostcall._engine.params.equation import Equation
from hostcall._jax.types import Aval, Device, Emitted, Sharding, Value
from hostcall._primitives.kept_alive import refuse_export

_JAXS_OWN = ("oneapi", "rocm", "tpu")  # where JAX has a callback, and the engine not

_NO_SMALL_ELEMENTS = (
    "callback that reads {0} right: on this platform calls go through JAX's own. Pass"
    " the values as int8, x.astype(jnp.int8)"
)
_THROUGH_JAX = (
    "on {} calls go through JAX's own callback, which holds on to this process. Export"
    ' it for platforms=("cpu", "cuda"), or compile the function itself where it runs'
)

_DEVICE_NUMBER = _jax.ShapedArray((), np.dtype(np.uint32))

# (device, *arrays) -> results. The device is that which calls, None if it is not known;
# there is one array for each operand, and one for each result.
Run = Callable[..., list[np.ndarray]]


def check_platform(program: _jax.Program, params: Equation) -> None:
    """Refuses platforms for which JAX has no callback either."""
    platforms = program.platforms
    if len(platforms) != 1 or platforms[0] not in _JAXS_OWN:
        raise HostcallError(
            f"hostcall: {params.shown} is lowered for"
            f" {', '.join(platforms)}. The engine serves cpu and cuda, also in one"
            f" program, and JAX's own callback serves {', '.join(_JAXS_OWN)}, each in a"
            " program of its own. Lower it for these, or run that part on the CPU: give"
            ' it arrays that are there, jax.device_put(x, jax.devices("cpu")[0])',
            code="hc-device",
        )


def emit_through_jax(
    program: _jax.Program,
    run: Run,
    operands: Sequence[Value],
    *,
    params: Equation,
    has_side_effect: bool,
    sharding: Sharding | None,
    partitioned: bool = False,
) -> list[Value]:
    """Emits JAX's own callback, which calls `run`.

    JAX does not tell which device calls. Where each of several does, the number of the
    device is one more operand.

    On a TPU an effect has a token, ordered or not: without one, a callback without
    results is a send that nothing answers, so the program may end, and a barrier
    return, before the host has the values. (Elsewhere JAX makes a token only of
    another.)

    Args:
        program: the program.
        run: what is called on the host.
        operands: the values of the equation.
        params: the parameters of the equation.
        has_side_effect: as for JAX's function.
        sharding: says which device calls, if one does.
        partitioned: as for JAX's function: each device calls for its own part.
    """
    if program.is_exported:
        refuse_export(params.callback, _THROUGH_JAX.format(*program.platforms))
    ctx = program.ctx
    _refuse_small_elements([*ctx.avals_in, *ctx.avals_out])
    avals_in: Sequence[Aval] = ctx.avals_in
    devices = program.devices if program.mesh is not None else None
    # This checks the sharding, so it comes before anything that reads it.
    annotation = _jax.place_of_callback(ctx, sharding)
    if not devices:
        called = partial(run, _jax.caller(program, sharding, partitioned=partitioned))
    else:
        called = partial(_by_number, run, devices)
        operands = [_jax.partition_id(), *operands]
        avals_in = [_DEVICE_NUMBER, *avals_in]

    def emit(token: Value | None, returns_token: bool) -> Emitted:
        results, token, _ = _jax.emit_python_callback(
            ctx,
            called,
            token,
            list(operands),
            avals_in,
            ctx.avals_out,
            returns_token=returns_token,
            has_side_effect=has_side_effect,
            sharding=annotation,
            partitioned=partitioned,
        )
        return results, token

    return _in_order(program, params, emit)


def _in_order(
    program: _jax.Program,
    params: Equation,
    emit: Callable[[Value | None, bool], Emitted],
) -> list[Value]:
    """The results of `emit`, which gets the token that the order needs.

    Its second argument says whether it returns one, too.
    """
    if params.effect is None:
        results, _ = emit(None, False)
        return list(results)
    token_in, leave = _jax.in_order(program.ctx, params.effect)
    results, token_out = emit(token_in, True)
    leave(token_out)
    return list(results)


def _by_number(
    run: Run, devices: Sequence[Device], number: np.ndarray, *operands: np.ndarray
) -> list[np.ndarray]:
    """What JAX calls where each of several devices does, with its number in front."""
    return run(devices[int(number)], *operands)


def _refuse_small_elements(avals: Sequence[Aval]) -> None:
    """Refuses elements smaller than a byte where this JAX reads them wrong."""
    if _jax.CALLBACKS_TAKE_SMALL_ELEMENTS:
        return
    for aval in avals:
        if _jax.is_smaller_than_a_byte(aval.dtype):
            _jax.refuse(_jax.Part.CALLS, _NO_SMALL_ELEMENTS.format(aval.dtype))
