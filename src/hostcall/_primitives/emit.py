"""What the lowerings of all primitives emit: a custom call, or JAX's own callback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hostcall import _jax
from hostcall._core import codes
from hostcall._core.errors import HostcallError, SpecError
from hostcall._engine import targets
from hostcall._engine.params.equation import Equation
from hostcall._jax.types import Aval, Effect, LoweringContext, Sharding, Value
from hostcall._primitives.across import OUTCOME_AVAL, Reach

# --- The custom call ------------------------------------------------------------------


def emit(
    program: _jax.Program,
    target: str,
    operands: Sequence[Value],
    *,
    effect: Effect | None,
    **how: Any,
) -> list[Value]:
    """Emits the custom call with the tokens that its order needs; returns the results.

    `effect` puts it in order; None if it is pure. `how` are the other parameters of
    `emit_with_token`.
    """

    def one(token: Value | None) -> tuple[list[Value], Value | None]:
        needs = effect is not None
        given = program, target, operands
        return emit_with_token(*given, token=token, returns_token=needs, **how)

    return _in_order(program.ctx, effect, one)


def _in_order(
    ctx: LoweringContext,
    effect: Effect | None,
    one: Callable[[Value | None], tuple[list[Value], Value | None]],
) -> list[Value]:
    """The results of `one`, which gets a token of this effect and returns another."""
    if effect is None:
        results, _ = one(None)
    elif _jax.is_ordered(effect):
        results, token = one(_jax.ordered_token(ctx, effect))
        _jax.set_ordered_token(ctx, effect, token)
    else:
        before, store = _jax.chain(ctx)
        results, token = one(before)
        store(token)
    return results


_TOKEN_ALONE = (
    "hostcall: a call with results and without array arguments, which comes after"
    " another effect or has order='ordered', can't be compiled for a program over"
    " several processes, since XLA would crash. Give it where=, which may be"
    " jnp.array(True), or an array that the function ignores; to a feed,"
    " feed(where=jnp.array(True))"
)


def emit_with_token(
    program: _jax.Program,
    target: str,
    operands: Sequence[Value],
    *,
    token: Value | None,
    returns_token: bool,
    source: Reach | None = None,
    prepare: Callable[[Sequence[Value]], tuple[Sequence[Value], Sequence[Aval]]]
    | None = None,
    **how: Any,
) -> tuple[list[Value], Value | None]:
    """Emits the custom call and returns (results, token).

    In a program that the compiler partitions over several devices, every device makes
    the call on whole values; inside shard_map or pmap, every device makes it on its own
    block. `source` is the device whose results all devices take, or says that they fail
    together. `prepare` makes each device's operands from the whole ones, in a program
    that the compiler partitions; it returns them and their avals. `how` are the other
    parameters of `_jax.custom_call`.
    """
    ctx = program.ctx
    alone = program.mesh is not None or program.size == 1
    if not alone and source is not None and token is not None and not operands:
        # XLA (of jaxlib 0.10 to 0.12) ends the process while it compiles a region that
        # a token alone enters and an all-reduce leaves.
        raise HostcallError(_TOKEN_ALONE, code="hc-device")

    def in_region(
        token: Value | None, operands: Sequence[Value]
    ) -> tuple[list[Value], Value | None]:
        avals_in: Sequence[Aval] = ctx.avals_in
        if prepare is not None and not alone:
            operands, avals_in = prepare(operands)
        avals_out = list(ctx.avals_out)
        if source is not None and source.tells:
            avals_out.append(OUTCOME_AVAL)
        values = (token, operands, avals_in, avals_out)
        if returns_token and _jax.has_symbolic(avals_out):
            results, token = _linked(program, target, *values, how)
        else:
            results, token = _jax.custom_call(
                program, target, *values, returns_token=returns_token, **how
            )
        if source is None:
            return results, token
        avals = _jax.physical_avals(ctx.avals_out)
        shared, outcome = source.share(program, results, avals)
        if outcome is None:
            return list(shared), token
        # Passes the results on, or fails on this device if the outcome says so.
        passed = {**how, "aliases": {1 + i: i for i in range(len(avals))}}
        values = (token, [outcome, *shared], [OUTCOME_AVAL, *avals], avals)
        given = program, targets.VERDICT_TARGET, *values
        return _jax.custom_call(*given, returns_token=token is not None, **passed)

    if alone:
        return in_region(token, operands)  # type: ignore[no-any-return]
    return _jax.on_each_device(program, in_region, token, operands, returns_token)


NUMBER = _jax.ShapedArray((), np.dtype(np.int32))


def _linked(
    program: _jax.Program,
    target: str,
    token: Value | None,
    operands: Sequence[Value],
    avals_in: Sequence[Aval],
    avals_out: Sequence[Aval],
    how: dict[str, Any],
) -> tuple[list[Value], Value]:
    """Emits a call with a token and symbolic shapes, which XLA does not put together.

    In place of the token the call takes and returns a number, which carries no
    information. A link before it and one behind it, of known shapes, have the token:
    (token, 0) -> (token, number), and (token, number) -> (token, number).
    """

    def link(token: Value | None, number: Value) -> tuple[Value, Value]:
        (number,), token = _jax.custom_call(
            program,
            targets.LINK_TARGET,
            token,
            [number],
            [NUMBER],
            [NUMBER],
            returns_token=True,
            has_side_effect=True,
            attributes={},
        )
        return token, number

    (zero,) = _jax.lower_traced(program.ctx, lambda: [np.int32(0)], (), ())
    token, number = link(token, zero)
    how = dict(how)
    if how.get("aliases"):
        how["aliases"] = {i + 1: o + 1 for i, o in how["aliases"].items()}
    (number, *results), _ = _jax.custom_call(
        program,
        target,
        None,
        [number, *operands],
        [NUMBER, *avals_in],
        [NUMBER, *avals_out],
        returns_token=False,
        **how,
    )
    token, _ = link(token, number)
    return results, token


def check_place(program: _jax.Program, params: Equation) -> None:
    """Refuses `on=device` inside a shard_map."""
    if program.mesh is not None and params.options.sharding is not None:
        raise SpecError(
            f"hostcall: `{params.callback.name}` has on=device inside shard_map or"
            " pmap, where each device makes its own call. Drop on=",
            code="hc-device",
        )


def refuse_some_axes(program: _jax.Program, name: str, remedy: str = "") -> None:
    """Refuses a shard_map that is manual over some mesh axes only."""
    if program.automatic:
        axes = sorted(map(str, program.automatic))
        text = (
            f"hostcall: `{name}` is called inside a shard_map that is manual over some"
            f" mesh axes only. Make it manual over {axes} too{remedy}"
        )
        raise NotImplementedError(codes.ended(text, "hc-device"))


# --- Platforms that the engine does not serve -----------------------------------------

_JAXS_OWN = ("oneapi", "rocm", "tpu")


def check_platform(ctx: LoweringContext, what: str) -> None:
    """Refuses platforms for which JAX has no callback either."""
    platforms = _jax.platforms(ctx)
    if len(platforms) != 1 or platforms[0] not in _JAXS_OWN:
        raise HostcallError(
            f"hostcall: {what} is lowered for"
            f" {', '.join(platforms)}. The engine serves cpu and cuda, also in one"
            f" program, and JAX's own callback serves {', '.join(_JAXS_OWN)}, each in a"
            " program of its own. Lower it for these, or run that part on the CPU: give"
            ' it arrays that are there, jax.device_put(x, jax.devices("cpu")[0])',
            code="hc-device",
        )


def emit_through_jax(
    ctx: LoweringContext,
    run: Callable[..., list[np.ndarray]],
    operands: Sequence[Value],
    *,
    effect: Effect | None,
    sharding: Sharding | None,
    **how: Any,
) -> list[Value]:
    """Emits JAX's own callback, for platforms that the engine does not serve.

    `run` gets one array for each operand and returns one array for each result.

    On a TPU an effect has a token, ordered or not: without one, a callback without
    results is a send that nothing answers, so the program may end, and a barrier
    return, before the host has the values. (Elsewhere JAX makes a token only of
    another.) `how` are the other parameters of JAX's function.
    """
    place = _jax.place_of_callback(ctx, sharding)

    def one(token: Value | None) -> tuple[list[Value], Value | None]:
        results, token_out, _ = _jax.emit_python_callback(
            ctx,
            run,
            token,
            list(operands),
            ctx.avals_in,
            ctx.avals_out,
            returns_token=effect is not None,
            sharding=place,
            **how,
        )
        return list(results), token_out

    return _in_order(ctx, effect, one)
