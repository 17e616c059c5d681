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
    last enqueue event is one of the inputs), so the order is kept. The same makes
    `marks` right: a program that is dispatched now has to wait for all of them.

So such a program is lowered as one without effects. Its jaxpr becomes one equation that
holds the whole program, and makes the tokens of its ordered calls inside.

Programs with other effects beside, over several devices, for other platforms and for
export keep the way with tokens. Ordered programs over one device and over several are
put in order by `wrap_dispatches` (dispatch.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from jax._src import compiler as _compiler
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import effects as _effects
from jax._src import util as _util
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import xla_client as _xla_client
from jax._src.lib.mlir import ir as _ir

from hostcall._jax import types as _t
from hostcall._jax.versions import changed, open_jaxpr
from hostcall._native import current

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
    parts = {"invars": invars, "outvars": outvars, "eqns": [eqn], "effects": set()}
    return changed(jaxpr, consts=[], constvars=[], **parts)


# --- Which programs -------------------------------------------------------------------

# The effects that nothing but an engine's call has.
own_effects = _effects.EffectTypeSet()
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
        if one and _are_engine_calls(jaxpr):
            wait_for_programs_on(args[1])
            jaxpr = _without_effects(jaxpr)
        return plain(jaxpr, *args, **options)

    _pxla._cached_lowering_to_hlo = lowered


if hasattr(_pxla, "_cached_lowering_to_hlo"):  # else, in a later JAX, all have tokens
    _dispatch_fast()


# --- Programs that are waited for, and programs over several devices ------------------
#
# Both need programs that do nothing, one for each CPU device: what XLA puts behind them
# or before them is in order with all that the thread has dispatched.

_clients: set[_t.Client] = set()  # of such programs


def wait_for_programs_on(client: _t.Client) -> None:
    """From now on, `marks` has those of this CPU client: a program is lowered for it,
    or comes to it from another process.
    """
    _clients.add(client)


def forget_fast_dispatches() -> None:
    """For a forked child, in which nothing can run."""
    _clients.clear()


def marks() -> list[_t.Token]:
    """Things to wait for. They are ready when the programs have ended that the calling
    thread has dispatched before. Cost: 10 us for each CPU device.

    In a callback there are none: the programs that it dispatches have ended by then
    (_runtime/host_device.py). XLA may have no place for another one: a client admits
    32, which may all be waiting in callbacks.
    """
    if current() is not None:
        return []
    clients = list(_clients)
    devices = [device for client in clients for device in client.local_devices()]
    return [run_nothing(device) for device in devices]


def run_nothing(device: _t.Device, *tokens: _t.Token) -> _t.Token:
    """Dispatches a program that does nothing, after these tokens; returns its own."""
    operands = ", ".join(f"%{i}: tensor<0xi1>" for i in range(len(tokens)))
    program = _compiled(f"func.func public @main({operands})", device)
    return program.execute_sharded(list(tokens), with_tokens=True).consume_token()


@functools.cache
def _compiled(main: str, device: _t.Device) -> _xla_client.LoadedExecutable:
    options = _compiler.get_compile_options(
        1, 1, np.array([[device]]), backend=device.client
    )
    with _mlir.make_ir_context(), _ir.Location.unknown():
        return _compiler.backend_compile_and_load(
            device.client,
            _ir.Module.parse(f"module @nothing {{ {main} {{ return }} }}"),
            _pxla._create_device_list((device,)),
            options,
            [],
        )


def when_waiting_for_effects(then: Callable[[], None]) -> None:
    """`jax.effects_barrier` waits for programs without tokens too, then calls this."""
    plain = _dispatch.RuntimeTokenSet.block_until_ready

    @functools.wraps(plain)
    def block_until_ready(self: _dispatch.RuntimeTokenSet) -> None:
        for mark in marks():
            mark.block_until_ready()
        plain(self)
        then()

    _dispatch.RuntimeTokenSet.block_until_ready = block_until_ready
