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
from hostcall._core import errors
from hostcall._core.errors import HostcallError
from hostcall._core.order import effects_with
from hostcall._engine import plans
from hostcall._engine.hooks import CallHooks
from hostcall._engine.params.equation import CallParams
from hostcall._engine.placing import placed, placed_through_jax
from hostcall._jax.types import Aval, Device, Effect, Primitive, Value
from hostcall._native import Plan
from hostcall._primitives.batching import batch
from hostcall._primitives.chosen import chosen_in
from hostcall._primitives.eager import call_now, row_major
from hostcall._primitives.lowering import (
    EngineCall,
    job_of,
    make_slot,
    register,
)
from hostcall._primitives.through_jax import emit_through_jax

P = TypeVar("P", bound=CallParams)


def define(
    name: str,
    impl: Callable[..., list[jax.Array]],
    would_run_twice: Callable[[dict[str, CallParams]], Exception],
) -> Primitive:
    """A primitive of calls, with the rules that all kinds of calls share.

    Args:
        name: of the primitive.
        impl: makes an eager call.
        would_run_twice: makes the error of a while loop that would run the call once
            more for a derivative, from the call's equation.
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
    is_pure = not effects
    return _jax.result_avals(params.out_avals, operands, is_pure), effects


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


call_p = define("host_call", call_now, would_run_twice)
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
    name = params.callback.name
    why = params.callback.facts.host_code.no_derivative()
    if why:  # an object's method
        return why
    rule = f"f = hc.host({name}, result=...) with a rule: f.defvjp(fwd, bwd)"
    if params.effect is None:
        return (
            f"Write {rule}, f.defjvp(rule), or hc.derivatives.finite_difference(f)"
            " without one."
        )
    reason = (
        f"It has order={params.options.order!r}, and derivatives run a function again,"
        " or not at all."
    )
    if not params.avals:
        return (
            f"{reason} To send values out under derivatives, write hc.tap({name}, ...)."
        )
    return f"{reason} If it needs no order, write {rule}."


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
    placement = placed(program, params, leader, job_of(program))
    attributes = make_slot(program, params, placement, avals)
    if params.runs_where_dispatched:
        _jax.run_where_dispatched(program)
    return EngineCall(
        program,
        params.target,
        attributes,
        has_side_effect=params.effect is not None,
        aliases=dict(params.aliases),
        reach=placement.reach,
    )


# --- Platforms that the engine does not serve -----------------------------------------


def lower_through_jax(
    program: _jax.Program,
    *operands: Value,
    params: CallParams,
    partitioned: bool = False,
) -> list[Value]:
    """The lowering for any platform that JAX's callback serves; see `register`."""
    job = job_of(program)
    plans_by_device: dict[object, tuple[CallHooks, Plan]] = {}

    def planned(
        device: Device | None, operands: Sequence[Aval | np.ndarray]
    ) -> tuple[CallHooks, Plan]:
        # With partitioned=True a device's blocks may have other shapes than the whole.
        shapes = tuple(operand.shape for operand in operands)
        if (device, shapes) not in plans_by_device:
            placement = placed_through_jax(program, device, job)
            hooks = params.hooks(params, placement)
            plan = plans.make_plan(hooks, operands)
            plans_by_device[device, shapes] = (hooks, plan)
        return plans_by_device[device, shapes]

    # So that an error of the plan is raised while the program is lowered.
    planned(None, _jax.physical_avals(program.ctx.avals_in))

    def run(device: Device | None, *arrays: jax.Array) -> list[np.ndarray]:
        hosts = [row_major(array) for array in arrays]
        hooks, plan = planned(device, hosts)
        try:
            results: list[np.ndarray] = plan.invoke(hosts)
        except Exception as error:
            text = hooks.on_error(error, ())
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
