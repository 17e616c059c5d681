"""The call primitive: a host function with results.

The operands are the call's arrays, with the mask of `where=` in front if there is one.
Everything static is in one parameter, `params`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn, TypeVar

import jax
import numpy as np

from hostcall import _jax
from hostcall._core import config, errors
from hostcall._core.errors import HostcallError
from hostcall._core.order import effects_with
from hostcall._engine import plans
from hostcall._engine.info import CallInfo, Team
from hostcall._engine.params.equation import CallParams
from hostcall._jax.types import Aval, Device, Effect, Primitive, Value
from hostcall._native import Plan
from hostcall._primitives.batching import batch
from hostcall._primitives.chosen import chosen_in
from hostcall._primitives.eager import row_major, run_and_keep
from hostcall._primitives.lowering import (
    EngineCall,
    emit_through_jax,
    info_through_jax,
    job_of,
    put,
    register,
)
from hostcall._primitives.outcome import Reach

P = TypeVar("P", bound=CallParams)


def define(
    name: str,
    impl: Callable[..., list[jax.Array]],
    would_run_twice: Callable[[dict[str, CallParams]], Exception],
) -> Primitive:
    """A primitive of calls, with the rules that all kinds of calls share.

    `would_run_twice` is the error of a while loop that would run the call once more for
    a derivative.
    """
    primitive = _jax.Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(impl)
    primitive.def_effectful_abstract_eval(_abstract_eval)
    _jax.once_in_while_loops[primitive] = would_run_twice
    return primitive


def _abstract_eval(
    *operands: Aval, params: CallParams
) -> tuple[list[Aval], frozenset[Effect]]:
    effects = effects_with(params.effect)
    return _jax.result_avals(params.out_avals, operands, not effects), effects


def would_run_twice(equation: dict[str, CallParams]) -> errors.DerivativeError:
    callback = equation["params"].callback
    return errors.DerivativeError(
        f"hostcall: jax.linearize or jax.grad of a while_loop that calls"
        f" {callback.described()}, with order={callback.options.order!r}, on whose"
        " results its derivative or its condition depends. JAX would run the loop, and"
        " the call, once more for the derivative. Use lax.scan, with where= for steps"
        " that make no call: it keeps the results. Or use jax.jvp, which runs the loop"
        " once, or order='pure' if the call may run again. If the loop has no"
        " derivative, put jax.lax.stop_gradient around what it starts with"
    )


call_p = define("host_call", run_and_keep, would_run_twice)
bind: Callable[..., list[jax.Array]] = call_p.bind
_jax.batchers[call_p] = partial(batch, call_p)


# --- JVP, transpose ----------------------------------------------------------------


def refuse_derivatives(
    primitive: Primitive,
    jvp: Callable[[P], Exception],
    transpose: Callable[[P], Exception],
) -> None:
    """`jvp` and `transpose` make the errors, from the parameters of an equation."""

    def no_jvp(primals: object, tangents: object, *, params: P) -> NoReturn:
        raise jvp(params)

    def no_transpose(cotangents: object, *operands: object, params: P) -> NoReturn:
        raise transpose(params)

    _jax.jvps[primitive] = no_jvp
    _jax.transposes[primitive] = no_transpose


def refuse_derivatives_as_jax(primitive: Primitive, text: str) -> None:
    """The same for one of JAX's callbacks; `text` has fields for the rule that it has
    not, and for the function of JAX that gives one.
    """
    refuse_derivatives(
        primitive,
        lambda params: ValueError(text.format("JVP", "jvp")),
        lambda params: ValueError(text.format("transpose", "vjp")),
    )


def _no_jvp(params: CallParams) -> errors.DerivativeError:
    return errors.DerivativeError(
        f"hostcall: the call of `{params.callback.name}` has no derivative"
        f" ({params.callback.place}). {_why_and_what(params)} Or put jax.custom_jvp or"
        " jax.custom_vjp around the call, or keep the derivative out with"
        " jax.lax.stop_gradient on its arguments"
    )


def _why_and_what(params: CallParams) -> str:
    """Why a call has no derivative, and what to write first."""
    name, why = params.callback.name, params.callback.seen.own.no_derivative()
    if why:  # an object's method
        return why
    rule = f"f = hc.host({name}, result=...) with a rule: f.defvjp(fwd, bwd)"
    if params.effect is None:
        return (
            f"Write {rule}, f.defjvp(rule), or hc.derivatives.finite_difference(f)"
            " without one."
        )
    begin = (
        f"It has order={params.options.order!r}, and derivatives run a function again,"
        " or not at all."
    )
    if not params.avals:
        return (
            f"{begin} To send values out under derivatives, write hc.tap({name}, ...)."
        )
    return f"{begin} If it needs no order, write {rule}."


def _no_transpose(params: CallParams) -> errors.DerivativeError:
    return errors.DerivativeError(
        f"hostcall: the call of `{params.callback.name}` can't be transposed"
        f" ({params.callback.place}). If it is linear, say so with"
        " jax.custom_derivatives.linear_call, or give the cotangents with"
        " jax.custom_vjp around the call"
    )


refuse_derivatives(call_p, _no_jvp, _no_transpose)


# --- lowering ----------------------------------------------------------------------


def lower(
    program: _jax.Program,
    *operands: Value,
    params: CallParams,
    avals: Sequence[Aval] | None = None,
) -> list[Value]:
    """The lowering for the platforms that the engine serves.

    `avals` are those of the operands, if not as JAX says: for a typed key, that of its
    uint32 block.
    """
    leader = chosen_in(program, params)
    call = prepare(program, params, avals or program.ctx.avals_in, leader)
    with _jax.named(program.ctx, params.callback.label):
        return call.emit(operands, params.effect)


def prepare(
    program: _jax.Program,
    params: CallParams,
    avals: Sequence[Aval],
    leader: Device | None,
) -> EngineCall:
    """Puts the call's plan into a slot that lives as long as the program; returns what
    emits the call.

    Args:
        program: the program.
        params: the parameters of the call.
        avals: those of its operands; for a typed key, that of its uint32 block.
        leader: the device that calls; None for the program's first.
    """
    info = params.info(params, program.by_ordinal, program.mesh)
    info.job = job_of(program)
    reach = _place(program, info, leader)
    attributes = put(program, info, avals)
    if params.runs_where_dispatched:
        _jax.run_where_dispatched(program)
    return EngineCall(
        program,
        params.target,
        attributes,
        has_side_effect=params.effect is not None,
        aliases=dict(params.aliases),
        reach=reach,
    )


def _place(
    program: _jax.Program, info: CallInfo, leader: Device | None
) -> Reach | None:
    """Decides how the devices of the program make the call, and notes it in `info`.

    Returns how the outcome of the call reaches all processes; None if it stays where it
    is.
    """
    params, local, mesh = info.params, program.local, program.mesh
    devices, reach = program.devices, None
    # A call that works in place in GPU memory has no host memory to write the outcome
    # to.
    on_host = program.platforms == ("cpu",) or not params.on_buffers
    fail = params.options.fail or config.settings.fail
    together = program.across and on_host and fail == "together"
    if params.devices:  # a sharded feed: each takes its part, and makes no call
        return None
    if local is None or not devices:
        # A lowering that does not know the program's devices (over an abstract mesh):
        # the first device that arrives makes the call. With several processes, nothing
        # says how many of the devices are in this one. (An export over concrete
        # shardings knows its devices, and comes below. It may run on others, so what
        # it writes names none: _export/texts.py.)
        if program.size > 1 and jax.process_count() == 1:
            info.team = Team("ONCE" if mesh is None else "EACH", program.size, None)
    elif mesh is not None:
        info.team = Team("EACH", len(local), None)
    else:
        leader = leader or devices[0]
        assert leader in devices, "chosen.py refuses others"
        info.elsewhere = leader not in local
        caller = _jax.ordinal(local[0] if info.elsewhere else leader)
        info.team = Team("ONCE", len(local), caller)
        if len(local) < len(devices) and (params.avals or together):
            reach = Reach(len(devices), devices.index(leader), on_host)
            info.caller = leader.process_index
    if reach is None and together:
        reach = Reach(program.size)
        info.origins = [device.process_index for device in devices or ()]
    info.tells = reach is not None and reach.tells
    return reach


# --- Platforms that the engine does not serve -----------------------------------------


def lower_through_jax(
    program: _jax.Program,
    *operands: Value,
    params: CallParams,
    partitioned: bool = False,
) -> list[Value]:
    """The lowering for any platform that JAX's callback serves; see `register`."""
    job = job_of(program)
    made: dict[object, tuple[CallInfo, Plan]] = {}

    def planned(
        device: Device | None, operands: Sequence[Aval | np.ndarray]
    ) -> tuple[CallInfo, Plan]:
        shapes = tuple(operand.shape for operand in operands)  # blocks differ in them
        if (device, shapes) not in made:
            info = info_through_jax(program, params, device)
            info.job = job
            made[device, shapes] = info, plans.make_plan(info, operands)
        return made[device, shapes]

    planned(None, _jax.physical_avals(program.ctx.avals_in))

    def run(device: Device | None, *arrays: jax.Array) -> list[np.ndarray]:
        hosts = [row_major(array) for array in arrays]
        info, plan = planned(device, hosts)
        try:
            results: list[np.ndarray] = plan.invoke(hosts)
        except Exception as error:
            text = info.on_error(error, None, ())
            code = error.code if isinstance(error, HostcallError) else None
            raise HostcallError(text, code=code) from error
        return results

    return emit_through_jax(
        program,
        run,
        operands,
        params=params,
        has_side_effect=params.effect is not None,
        sharding=params.options.sharding,
        partitioned=partitioned,
    )


register(call_p, lower, lower_through_jax)
