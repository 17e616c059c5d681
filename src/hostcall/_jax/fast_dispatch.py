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

Over several CPU devices of one process XLA puts no program behind the thread's last
one. So there ordered calls keep their tokens. Unordered ones promise an order in their
own program only, and JAX's tokens of unordered effects order nothing: these programs
are lowered without effects too. Their hidden result, which each device makes, is their
sign.

On a GPU XLA makes all calls of a program while it is dispatched, and the GPU has one
stream for what is left of it. So there no program over one GPU needs tokens, ordered or
not. It has mostly not ended when its dispatch returns, so its sign is the hidden result
too.

Programs with other effects beside, for other platforms and for export keep the way with
tokens. Ordered programs over different devices are put in order by device_order.py.
docs/design/order.md has a table of all cases, with XLA's functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.interpreters import mlir as _mlir

from hostcall._jax import types as _t
from hostcall._jax.door import core as _core
from hostcall._jax.door import distributed as _distributed
from hostcall._jax.door import util as _util
from hostcall._jax.installing import lost
from hostcall._jax.needs import Part
from hostcall._jax.program import are_host_callbacks_ours, is_one_served
from hostcall._jax.program_order import (
    as_one_equation,
    check_tokens_alone,
    order_of_calls,
)
from hostcall._jax.signs import (
    FastProgram,
    has_only_ours,
    needs_hidden,
    with_hidden,
)
from hostcall._jax.tracing import ENGINE_CALLS, JAXS_CALLS, own_effects
from hostcall._jax.tracing import is_ordered as is_ordered_effect
from hostcall._jax.versions import COLLECTIVES_NEED_NO_TOKENS, GPUS_NEED_NO_TOKENS

# An ordered program that is lowered without tokens keeps this text alive, by which it
# is known where it is dispatched (device_order.py).
ORDERED_WITHOUT_TOKENS = "hostcall: ordered, without tokens"


# --- Which programs -------------------------------------------------------------------


def _are_engine_calls(jaxpr: _t.Jaxpr) -> bool:
    """Whether all effects are made by the engine's calls."""
    # Effects that others may have too, JAX's own callbacks for example.
    shared = {*own_effects.filter_not_in(jaxpr.effects)}
    return all(eqn.primitive in ENGINE_CALLS for eqn in _makers(jaxpr, shared))


def _makers(jaxpr: _t.Jaxpr, effects: set[_t.Effect]) -> Iterator[_t.JaxprEquation]:
    """The equations by which a program has these effects, at any depth."""
    for eqn in jaxpr.eqns:
        if effects.isdisjoint(eqn.effects):
            continue
        inner_jaxprs = list(_core.jaxprs_in_params(eqn.params))
        if not inner_jaxprs:
            yield eqn
        for inner in inner_jaxprs:
            yield from _makers(inner, effects)


class _Target(NamedTuple):
    """Where a program is lowered to run.

    Attributes:
        platform: the only one; "" if there are several, or if it may leave the process.
        devices: how many; 0 if the platform is "".
    """

    platform: str
    devices: int


_ELSEWHERE = _Target(platform="", devices=0)


def _target_of(args: Sequence[object], options: Mapping[str, object]) -> _Target:
    """Where a program is to run, by the arguments of `_cached_lowering_to_hlo`.

    That function has no signature to ask: of the two integers among its arguments, the
    second is the number of devices.
    """
    platforms = args[-1]
    numbers = [arg for arg in args if type(arg) is int]
    if not isinstance(platforms, tuple) or not is_one_served(platforms):
        return _ELSEWHERE
    if len(numbers) != 2 or is_for_export(options):
        return _ELSEWHERE
    return _Target(platform=platforms[0], devices=numbers[1])


def _needs_no_tokens(target: _Target, is_ordered: bool) -> bool:
    """Whether XLA keeps a program's host calls in order as JAX's tokens would.

    | platform | devices | its calls | without tokens |
    |---|---|---|---|
    | CPU | one | any | yes |
    | CPU | several | unordered | since jaxlib 0.12, if one process runs it |
    | CPU | several | ordered | no: XLA puts it behind no program over one device |
    | GPU | one | any | since jaxlib 0.12 |
    | GPU | several | any | no: XLA's compiler ends the process for some of them |

    XLA's runtime would keep those over several GPUs in order too. But its compiler
    merges equal constants (HloCSE), of which the partitioner has put some behind
    tokens, and stops there: a feed's items for the rows of a sharded array make such a
    program. It happens in regions that one token alone enters (`_entering` in
    operations.py), and those of a shard_map are JAX's.

    With jaxlib 0.10.2 JAX's own programs with collectives on CPU devices end the
    process if many of them are dispatched without a wait on fewer cores than devices
    ("only 2 of 4 arrived"). Host calls make them longer.
    """
    if target.platform == "cuda":
        return GPUS_NEED_NO_TOKENS and target.devices == 1
    if target.platform != "cpu":
        return False
    if target.devices == 1:
        return True
    alone = _distributed.global_state.num_processes in (None, 1)
    return COLLECTIVES_NEED_NO_TOKENS and alone and not is_ordered


def _rules(platforms: object) -> Mapping[_t.Primitive, _t.LoweringRule]:
    """The rules of host calls in a program for these platforms: JAX's own callbacks are
    among them where the engine makes them.
    """
    if isinstance(platforms, tuple) and is_one_served(platforms):
        return dict(ENGINE_CALLS)
    # Elsewhere a callback of JAX's is lowered by JAX, with a token of JAX's.
    return {p: rule for p, rule in ENGINE_CALLS.items() if p not in JAXS_CALLS}


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


# What `_cached_lowering_to_hlo` returns: (module, keepalives, host callbacks, ...).
_Lowered: TypeAlias = tuple[Any, ...]


def _with_sign(
    lowered: _Lowered, target: _Target, jaxpr: _t.Jaxpr, args: Sequence[object]
) -> _Lowered:
    """Makes of a lowered program without effects one that leaves a sign."""
    module, keepalives, *rest = lowered
    if keepalives and isinstance(keepalives[-1], FastProgram):
        return lowered  # from JAX's cache, which has the same module and list
    if keepalives is None:
        keepalives = []
    # The call that ran last says that its program has ended only on one CPU device.
    ends_with_calls = target == _Target("cpu", devices=1)
    # Elsewhere the sign is kept after nearly every dispatch, so it must be one that
    # nobody can delete or donate: a training step donates its state.
    hidden = not ends_with_calls or needs_hidden(jaxpr) or _has_refs(args)
    if hidden:
        with_hidden(module)
    # Another library's custom call may still run when ours have ended.
    asks_sign = not ends_with_calls or not has_only_ours(module)
    # The last of them: _mark_of looks for it there (signs.py).
    keepalives.append(FastProgram(hidden, asks_sign))
    return (module, keepalives, *rest)


def _signed_if_pure(
    lowered: _Lowered, target: _Target, jaxpr: _t.Jaxpr, args: Sequence[object]
) -> _Lowered:
    """The same for a program on a GPU whose callbacks are all pure drop-ins.

    JAX would keep a token of its first dispatch, since it has host callbacks, and of no
    later one, which are fast. If the first one failed, every `jax.effects_barrier`
    would raise that again. With a sign each dispatch is waited for, and its failure is
    raised once.
    """
    if target.platform != "cuda" or lost(Part.FAST):
        return lowered
    is_served = _needs_no_tokens(target, is_ordered=False)
    if not is_served or not are_host_callbacks_ours(lowered[2]):
        return lowered
    return _with_sign(lowered, target, jaxpr, args)


def lowering_in_order(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The host calls of each program are in one order, and JAX's fast dispatch serves
    the programs that it can (patches.py).
    """

    @_util.weakref_lru_cache
    def lowered(jaxpr: _t.Jaxpr, *args: object, **options: object) -> object:
        effects = jaxpr.effects
        target = _target_of(args, options)
        # Most programs; a program with pure calls alone is one of them, and JAX
        # dispatches it fast by itself.
        if not effects:
            result = plain(jaxpr, *args, **options)
            return _signed_if_pure(result, target, jaxpr, args)
        is_ordered = any(map(is_ordered_effect, effects))
        order = order_of_calls(jaxpr, _rules(args[-1]))
        # Over several devices a token may get into a region that XLA can't compile; on
        # one device there are no regions.
        if target.devices != 1:
            check_tokens_alone(jaxpr if order is None else order.jaxpr(jaxpr))
        is_fast = _needs_no_tokens(target, is_ordered) and _are_engine_calls(jaxpr)
        if lost(Part.FAST) or not is_fast:
            if order is not None:
                jaxpr = as_one_equation(jaxpr, effects, order)
            return plain(jaxpr, *args, **options)
        without_effects = as_one_equation(
            jaxpr,
            effects=(),
            order=order,
            keepalives=(ORDERED_WITHOUT_TOKENS,) if is_ordered else (),
        )
        result = plain(without_effects, *args, **options)
        return _with_sign(result, target, jaxpr, args)

    return lowered  # type: ignore[no-any-return]
