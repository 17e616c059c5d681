"""Programs with host calls on JAX's fast dispatch.

JAX dispatches a program that has any effect in Python, which takes 50 to 100 us where
its C++ takes 4. It does so to hand runtime tokens from program to program. On one CPU
device they order nothing that XLA does not order anyway:

  * A program with host calls runs on the thread that dispatches it (see
    `run_where_dispatched`), which other threads of XLA's may help. If its inputs are
    ready, it has ended when its dispatch returns.
  * If an input is not ready, or a program of the same thread has not ended, XLA puts
    the program behind that thread's last one, and dispatch returns at once. It does so
    for each program over one device (ExecuteHelper in xla/pjrt/cpu/cpu_client.cc: the
    last enqueue event is one of the inputs), so the order is kept.

So such a program is lowered as one without effects. Its jaxpr becomes one equation that
holds the whole program, and makes the tokens of its ordered calls inside. What the
thread that dispatches it waits for is one of its results (signs.py).

Programs with other effects beside, over several devices, for other platforms and for
export keep the way with tokens. Ordered programs over one device and over several are
put in order by `wrap_dispatches` (dispatch.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from jax._src import core as _core
from jax._src import effects as _effects
from jax._src import util as _util
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import pxla as _pxla

from hostcall._jax import types as _t
from hostcall._jax.signs import FastProgram, needs_hidden, with_hidden
from hostcall._jax.tracing import own_effects
from hostcall._jax.versions import changed, open_jaxpr

# --- A program as one equation without effects ----------------------------------------

_program_p = _core.Primitive("host_calls")
_program_p.multiple_results = True


def _lower(
    ctx: _t.LoweringContext, *operands: _t.Value, jaxpr: _t.Jaxpr
) -> list[_t.Value]:
    ordered = _effects.ordered_effects.filter_in(jaxpr.effects)
    results, _ = _mlir.jaxpr_subcomp(
        ctx.module_context,
        open_jaxpr(jaxpr),
        ctx.name_stack,
        _mlir.TokenSet.create(ordered),
        [_mlir.ir_constant(const) for const in jaxpr.consts],
        *operands,
        dim_var_values=ctx.dim_var_values,
        const_lowering=ctx.const_lowering,
        outer_traceback=ctx.traceback,
    )
    return list(results)


_mlir.register_lowering(_program_p, _lower, cacheable=False)


def _without_effects(jaxpr: _t.Jaxpr) -> _t.Jaxpr:
    invars = [_core.Var(aval) for aval in jaxpr.in_avals]
    outvars = [_core.Var(aval) for aval in jaxpr.out_avals]
    eqn = _core.new_jaxpr_eqn(invars, outvars, _program_p, {"jaxpr": jaxpr}, set())
    parts = {"invars": invars, "outvars": outvars, "eqns": [eqn]}
    return changed(jaxpr, consts=[], constvars=[], **parts)


# --- Which programs -------------------------------------------------------------------

# Primitives whose effects are those of the engine's calls; JAX's own ones while
# `replace_lowering` lowers them.
ENGINE_CALLS: set[_t.Primitive] = set()


def _are_engine_calls(jaxpr: _t.Jaxpr) -> bool:
    """Whether all effects are made by the engine's calls."""
    others = {*own_effects.filter_not_in(jaxpr.effects)}
    return not others or all(
        eqn.primitive in ENGINE_CALLS for eqn in _makers(jaxpr, others)
    )


def _makers(jaxpr: _t.Jaxpr, effects: set[_t.Effect]) -> Iterator[_t.JaxprEquation]:
    """The equations by which a program has these effects, at any depth."""
    for eqn in jaxpr.eqns:
        if effects.isdisjoint(eqn.effects):
            continue
        inner = list(_core.jaxprs_in_params(eqn.params))
        if not inner:
            yield eqn
        for each in inner:
            yield from _makers(each, effects)


def _is_for_one_cpu(args: Sequence[object]) -> bool:
    """Whether a program is lowered to run on one CPU device.

    `args` are those of `_cached_lowering_to_hlo`, which has no signature to ask: of the
    two integers among them, the second is the number of devices.
    """
    numbers = [arg for arg in args if type(arg) is int]
    return len(numbers) == 2 and numbers[1] == 1 and args[-1] == ("cpu",)


def _has_refs(args: Sequence[object]) -> bool:
    """Whether some results are what a program writes to Refs, which nobody gets.

    Then the third of the arguments from the end says which arguments these are.
    """
    return args[-3] is not None


def is_for_export(options: Mapping[str, object]) -> bool:
    """Whether a program is lowered to leave the process, by the named arguments of
    `_cached_lowering_to_hlo`; also if these don't tell.
    """
    parameters = options.get("lowering_parameters")
    return not isinstance(parameters, _mlir.LoweringParameters) or parameters.for_export


def _dispatch_fast() -> None:
    """From now on, JAX's fast dispatch serves the programs that it can."""
    plain = _pxla._cached_lowering_to_hlo

    @_util.weakref_lru_cache
    def lowered(jaxpr: _t.Jaxpr, *args: object, **options: object) -> object:
        one = jaxpr.effects and _is_for_one_cpu(args) and not is_for_export(options)
        if not (one and _are_engine_calls(jaxpr)):
            return plain(jaxpr, *args, **options)
        hidden = needs_hidden(jaxpr) or _has_refs(args)
        module, kept_alive, *rest = plain(_without_effects(jaxpr), *args, **options)
        if hidden:
            with_hidden(module)
        return (module, [*(kept_alive or ()), FastProgram(hidden)], *rest)

    _pxla._cached_lowering_to_hlo = lowered


if hasattr(_pxla, "_cached_lowering_to_hlo"):  # else, in a later JAX, all have tokens
    _dispatch_fast()
