"""What stands for JAX's callback primitives, and for `emit_python_callback`.

All of JAX's functions for callbacks bind one of five primitives, whenever a program
took the function. While JAX is patched, binding such a primitive binds one of
hostcall's, with the same call in its parameters. So programs are traced with
hostcall's equations, and have its batching, eager calls and printing.

Equations of JAX's primitives that are in programs already (a jaxpr that was traced
before the patch, a Pallas kernel) are redirected where they are lowered, with the same
translation of their parameters; what happens before that stays JAX's. And a few
programs emit a callback themselves, below all primitives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from hostcall import _jax
from hostcall._compat.buffer_callback import make_params as buffer_params
from hostcall._compat.debugging import print_params, template_of
from hostcall._compat.pure_and_io import raw_keys, trees_of
from hostcall._core.host_code import HostCode
from hostcall._core.mistakes import refuse_coroutines
from hostcall._core.options import CallOptions
from hostcall._core.order import Order
from hostcall._core.source import Place, users_place
from hostcall._core.spec import Results, Template
from hostcall._engine.params.drop_in import Kind, arrays_of, make_params
from hostcall._engine.params.equation import CallParams
from hostcall._primitives import buffer, call, drop_in
from hostcall._primitives.lowering import start_lowering

# What callbacks get, as the newest patch says; None if JAX is not patched. The patch
# writes it under its lock. Redirects read it once each, without a lock.
chosen: str | None = None


# --- Primitives -----------------------------------------------------------------------

# (the line that called, number of operands, parameters of JAX's primitive) ->
# parameters of hostcall's. Without a line it is that of the user's which runs now.
_Translation = Callable[[Place | None, int, _jax.Params], CallParams]


class Redirect(NamedTuple):
    """One of JAX's primitives, whose calls hostcall's primitive makes.

    Attributes:
        primitive: JAX's.
        our_module: the module of hostcall's, which binds and lowers it.
        translation: makes the parameters of hostcall's.
    """

    primitive: _jax.Primitive
    our_module: ModuleType
    translation: _Translation

    def bind(self, *operands: object, **jax_params: Any) -> object:
        if self.primitive in _DEBUG:
            # In a Pallas kernel it is device code, with rules for GPU and TPU. And a
            # library may have an effect of its own, on whose rules it relies.
            effect = jax_params.get("effect", _jax.DEBUG_EFFECT)
            if effect not in _DEBUG_EFFECTS or _jax.in_pallas_kernel():
                return _DEBUG[self.primitive](*operands, **jax_params)
        else:
            # Debug callbacks get typed keys, if they run at once; these never do.
            operands = tuple(map(raw_keys, operands))
        params = self.translation(None, len(operands), jax_params)
        return self.our_module.bind(*operands, params=params)

    def lower(
        self, ctx: _jax.LoweringContext, *operands: _jax.Value, **jax_params: Any
    ) -> list[_jax.Value]:
        params = self.translation(_place(ctx), len(operands), jax_params)
        return self.our_module.lower(ctx, *operands, params=params)  # type: ignore[no-any-return]


# How they are bound without a patch.
_DEBUG = {
    _jax.debug_callback_p: _jax.debug_callback_p.bind,
    _jax.debug_print_p: _jax.debug_print_p.bind,
}
_DEBUG_EFFECTS = (_jax.DEBUG_EFFECT, _jax.ORDERED_DEBUG_EFFECT)


def _place(ctx: _jax.LoweringContext) -> Place | None:
    """The line that called; None if JAX does not know it."""
    line = _jax.line_of(ctx)
    if line is None:
        return None
    file, number, function = line
    return Place(file, number, function)


def _call_back(
    kind: Kind, place: Place | None, operands: int, jax_params: _jax.Params
) -> CallParams:
    """The drop-in for JAX's pure, io or debug primitive with these parameters."""
    fn = jax_params["callback"]
    wrapped = _jax.parts_of_callback(fn)
    if wrapped is not None:  # JAX wrapped the user's function, in a way that we know
        fn, in_tree, static = wrapped
        template = template_of(in_tree, static)
    else:
        template = _flat_template(operands)
    refuse_coroutines(fn)  # a debug callback would drop the coroutine without a word
    results = Results.flat(jax_params.get("result_avals", ()))
    options = {
        # Only a debug callback's order is in its effect; others have a parameter.
        "ordered": jax_params.get("effect") == _jax.ORDERED_DEBUG_EFFECT,
        **jax_params,
        "arrays": arrays_of(chosen or "jax"),
    }
    return make_params(kind, fn, (template, results), options, place)


def _flat_template(arrays: int) -> Template:
    return Template.flat(*[None] * arrays)


def _print(place: Place | None, operands: int, jax_params: _jax.Params) -> CallParams:
    if jax_params["logging_record"] is not None:
        # It goes to a logger of JAX's, in a way that JAX's own function knows.
        logs = {**jax_params, "callback": _jax.print_callback(jax_params)}
        return _call_back("debug", place, operands, logs)
    return print_params(
        jax_params["fmt"],
        jax_params["in_tree"],
        dict(jax_params["static_args"]),
        print_options=jax_params["np_printoptions"],
        options=jax_params,
        place=place,
    )


def _buffer(place: Place | None, operands: int, jax_params: _jax.Params) -> CallParams:
    del operands  # their tree has their number
    order: Order = "unordered" if jax_params["has_side_effect"] else "pure"
    trees = trees_of(
        jax_params["in_tree"], jax_params["out_tree"], jax_params["result_avals"]
    )
    return buffer_params(
        jax_params["callback"],
        trees=trees,
        place=place or users_place(),
        options=CallOptions(order=order, vmap_method=jax_params["vmap_method"]),
        aliases=tuple(jax_params["input_output_aliases"]),
        command_buffer=jax_params["command_buffer_compatible"],
    )


REDIRECTS = (
    Redirect(_jax.pure_callback_p, drop_in, functools.partial(_call_back, "pure")),
    Redirect(_jax.io_callback_p, drop_in, functools.partial(_call_back, "io")),
    Redirect(_jax.debug_callback_p, drop_in, functools.partial(_call_back, "debug")),
    Redirect(_jax.debug_print_p, drop_in, _print),
    Redirect(_jax.buffer_callback_p, buffer, _buffer),
)


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
    # The engine does not serve this platform, or knows no such call.
    if not _jax.is_served(ctx) or options.get("partitioned"):
        options |= {"has_side_effect": has_side_effect, "sharding": sharding}
        return _jax.emit_python_callback(  # type: ignore[no-any-return]
            ctx, callback, token, operands, operand_avals, result_avals, **options
        )
    avals = _jax.physical_avals(result_avals)
    trees = _flat_template(len(operands)), Results.flat(avals)
    params = make_params(
        "io" if has_side_effect else "pure",
        _Sequence(callback, len(avals)),
        trees=trees,
        options={"arrays": "numpy"},
        place=_place(ctx),
    )
    # The context is that of the equation around, with other operands and results.
    own_context = ctx.replace(
        avals_in=list(operand_avals), avals_out=list(result_avals)
    )
    program = start_lowering(own_context)
    prepared = call.prepare(
        program,
        params,
        _jax.physical_avals(operand_avals),
        _jax.device_of(program, sharding),
    )
    with _jax.named(ctx, params.callback.label):
        results, token_out = prepared.emit_with(token, operands, token is not None)
    return results, token_out, None


class _Sequence(HostCode):
    """A callback that returns a sequence with one value per result."""

    def __init__(self, callback: Callable[..., Sequence[object]], results: int) -> None:
        self._callback = callback
        self._results = results

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
