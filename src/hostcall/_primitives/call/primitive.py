"""The call primitive itself: impl, abstract eval, JVP, transpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar

import jax

from hostcall import _jax
from hostcall._core import errors
from hostcall._core.host_code import own
from hostcall._engine.params.call import CallParams
from hostcall._jax.types import Aval, Effect, Primitive
from hostcall._primitives.eager import run_and_keep

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
    _jax.def_effectful_abstract_eval(primitive, _abstract_eval)
    _jax.run_once_in_while_loops(primitive, would_run_twice)
    return primitive


def _abstract_eval(
    *operands: Aval, params: CallParams
) -> tuple[list[Aval], set[Effect]]:
    pure = params.effect is None
    return _jax.result_avals(params.out_avals, operands, pure), params.effects


def _impl(*operands: jax.Array, params: CallParams) -> list[jax.Array]:
    results = run_and_keep(*operands, params=params)
    _jax.refuse_special(results, params.callback.described)
    return results


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


call_p = define("host_call", _impl, would_run_twice)
bind: Callable[..., list[jax.Array]] = call_p.bind


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


def _no_jvp(params: CallParams) -> errors.DerivativeError:
    return errors.DerivativeError(
        f"hostcall: the call of `{params.callback.name}` has no derivative"
        f" ({params.callback.place}). {_why_and_what(params)} Or put jax.custom_jvp or"
        " jax.custom_vjp around the call, or keep the derivative out with"
        " jax.lax.stop_gradient on its arguments"
    )


def _why_and_what(params: CallParams) -> str:
    """Why a call has no derivative, and what to write first."""
    fn, name = params.callback.function, params.callback.name
    why = own(fn).no_derivative()
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
