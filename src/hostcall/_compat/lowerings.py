"""Lowerings of JAX's own callback primitives to hostcall's engine.

`patch_jax` puts hostcall's functions under JAX's names, but that does not reach all
callbacks. Code that imported a function before the patch (most libraries import by
name) still binds JAX's primitive. And a few programs emit a callback themselves, below
all primitives. Both are caught here, where a program is lowered: the engine makes the
call, and all else (batching, derivatives, refusals) stays JAX's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hostcall import _jax
from hostcall._compat.buffer_callback import make_params as buffer_params
from hostcall._compat.pure_and_io import OPTIONS, trees_of
from hostcall._core.host_code import HostCode
from hostcall._core.options import CallOptions
from hostcall._core.order import Order
from hostcall._core.source import Place, look
from hostcall._core.spec import Results, Template
from hostcall._engine.params.drop_in import Kind, arrays_of, make_params
from hostcall._primitives import buffer, call, drop_in
from hostcall._primitives.lowering import begin

# What callbacks get, as the newest patch says; None if JAX is not patched. The patch
# writes it under its lock. Lowerings read it once each, without a lock.
chosen: str | None = None


# --- Primitives -----------------------------------------------------------------------


def _place(ctx: _jax.LoweringContext, fn: Callable[..., object]) -> Place:
    """The line that called; if JAX does not know it, the line of the function."""
    line = _jax.line_of(ctx)
    return look(fn).place if line is None else Place(*line)


def _lower(
    kind: Kind, ctx: _jax.LoweringContext, *operands: _jax.Value, **given: Any
) -> list[_jax.Value]:
    callback = given["callback"] if "callback" in given else _jax.print_callback(given)
    if kind == "debug" and "effect" in given:
        given["ordered"] = given["effect"] == _jax.ORDERED_DEBUG_EFFECT
    # The user's function and its arguments' tree, if JAX wrapped it as we know. Else
    # the wrapped function, with flat arguments.
    marks = (None,) * len(operands)
    fn, template = callback, Template.flat(*marks)
    if isinstance(callback, _jax.FlatCallback):
        fn, template = callback.callback_func, Template(callback.in_tree, marks)
    trees = template, Results.flat(_jax.physical_avals(ctx.avals_out))
    options = {key: given[key] for key in OPTIONS[kind]}
    options["arrays"] = arrays_of(chosen or "jax")
    params = make_params(kind, fn, trees, options, _place(ctx, fn))
    return drop_in.lower(ctx, *operands, params=params)


def _lower_buffer(
    ctx: _jax.LoweringContext, *operands: _jax.Value, **given: Any
) -> list[_jax.Value]:
    callback, avals = given["callback"], _jax.physical_avals(ctx.avals_out)
    order: Order = "unordered" if given["has_side_effect"] else "pure"
    params = buffer_params(
        callback,
        trees_of(given["in_tree"], given["out_tree"], tuple(avals)),
        _place(ctx, callback),
        CallOptions(order=order, vmap_method=given["vmap_method"]),
        aliases=tuple(given["input_output_aliases"]),
        command_buffer=given["command_buffer_compatible"],
    )
    return buffer.lower(ctx, *operands, params=params)


LOWERINGS: dict[_jax.Primitive, _jax.LoweringRule] = {
    _jax.pure_callback_p: functools.partial(_lower, "pure"),
    _jax.io_callback_p: functools.partial(_lower, "io"),
    _jax.debug_callback_p: functools.partial(_lower, "debug"),
    _jax.debug_print_p: functools.partial(_lower, "debug"),
    _jax.buffer_callback_p: _lower_buffer,
}


# --- emit_python_callback -------------------------------------------------------------


def emit_python_callback(
    ctx: _jax.LoweringContext,
    callback: Callable[..., Sequence[object]],
    token: _jax.Value | None,
    operands: Sequence[_jax.Value],
    operand_avals: Sequence[_jax.Aval],
    result_avals: Sequence[_jax.Aval],
    *,
    has_side_effect: bool,
    sharding: Any = None,
    **options: bool,
) -> tuple[Sequence[_jax.Value], _jax.Value | None, object]:
    """JAX's function of this name. `callback` gets NumPy arrays, returns a sequence."""
    if not _jax.is_served(ctx) or options.get("partitioned"):
        given = ctx, callback, token, operands, operand_avals, result_avals
        options |= {"has_side_effect": has_side_effect, "sharding": sharding}
        return _jax.emit_python_callback(*given, **options)  # type: ignore[no-any-return]
    avals = _jax.physical_avals(result_avals)
    params = make_params(
        "io" if has_side_effect else "pure",
        _Sequence(callback, len(avals)),
        (Template.flat(*(None,) * len(operands)), Results.flat(avals)),
        {"arrays": "numpy"},
        _place(ctx, callback),
    )
    program = begin(
        ctx.replace(avals_in=list(operand_avals), avals_out=list(result_avals))
    )
    made = call.prepare(
        program,
        params,
        _jax.physical_avals(operand_avals),
        _jax.device_of(program, sharding),
    )
    with _jax.named(ctx, params.callback.label):
        results, token_out = made.emit_with(token, operands, token is not None)
    return results, token_out, None


class _Sequence(HostCode):
    """A callback that returns a sequence with one value per result."""

    def __init__(self, callback: Callable[..., Sequence[object]], results: int) -> None:
        self._callback, self._results = callback, results

    def inside(self) -> Callable[..., object]:
        return self._callback

    def __call__(self, *args: np.ndarray) -> tuple[np.ndarray, ...]:
        out = self._callback(*args)
        if len(out) != self._results:
            raise RuntimeError(
                "Mismatched number of outputs from callback. Expected:"
                f" {self._results}, Actual: {len(out)}"
            )
        return tuple(map(np.asarray, out))
