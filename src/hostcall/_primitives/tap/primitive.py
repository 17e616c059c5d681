"""The tap primitive: copies of values leave the program, which goes on at once.

A tap without results carries an effect, which keeps it in the program. A tap that
returns its arguments (`through`) has no effect: the use of its results keeps it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import jax
import numpy as np

from hostcall import _jax, _native
from hostcall._core import errors, process
from hostcall._core.errors import SpecError
from hostcall._core.source import source_of
from hostcall._engine import plans, targets
from hostcall._engine.counters import costs
from hostcall._engine.params.tap import TapParams
from hostcall._engine.plans import Entrance
from hostcall._jax.types import Aval, Device, Effect, JaxprEquation
from hostcall._primitives.axes import Batched, Dims, Operands, in_front, size_of
from hostcall._primitives.eager import first_device, go_on_after_failures, row_major
from hostcall._primitives.tap import parts
from hostcall._primitives.tap.parts import Index, block_index, whole
from hostcall._runtime import host_device

T = TypeVar("T")

tap_p = _jax.Primitive("host_tap")
tap_p.multiple_results = True
bind: Callable[..., list[jax.Array]] = tap_p.bind


# --- impl --------------------------------------------------------------------------


def _impl(*operands: jax.Array, params: TapParams) -> list[jax.Array]:
    """Queues the tap now. Compiles nothing, and leaves nothing behind."""
    targets.start()
    process.refuse(f"`{params.callback.name}` is tapped")
    results = list(params.arguments(operands)) if params.through else []
    if params.masked and np.size(operands[0]) == 1 and not row_major(operands[0]):
        return results
    go_on_after_failures(params)
    for home, place, blocks in _blocks(operands, params):
        if not _lets(params, home, params.flag_of(operands)):
            continue
        arrays = [row_major(block) for block in blocks]
        info = params.info({-1: home}, None)
        info.places = None if place is None else {-1: place}
        tap = params.settings(in_program=False)
        entry = Entrance(device=host_device.above_here(), tap=tap)
        plan = plans.make_plan(params, arrays, info, entry)
        plan.push(list(params.read(arrays)))
    return results


tap_p.def_impl(_impl)


# (device, index of each array's block, operands) of one delivery.
Block = tuple[Device, tuple[Index, ...] | None, list[jax.Array]]


def _blocks(operands: Operands, params: TapParams) -> list[Block]:
    """The deliveries of an eager tap in this process.

    Among devices that hold identical blocks, only the first taps.
    """
    sharded = [x for x in operands if isinstance(x, jax.Array) and len(x.devices()) > 1]
    on = params.options.on
    if on == "shards" and sharded:
        return _of_each_device(operands, sharded[0], params)
    home = params.options.device or first_device(_devices(operands))
    if on == "once":
        _refuse_parts(operands, params)
        # Each process runs this line, and one of them delivers.
        if home.process_index != _jax.process_of(home):
            return []
        return [(home, None, list(operands))]
    found, indices = [], []
    for number, x in enumerate(operands):
        index = whole(np.shape(x))
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            shards = x.addressable_shards
            part = parts.assembled(shards, x.shape)
            if part is None:
                raise parts.apart(params, number, x.shape, _jax.process_of(home))
            x, index = part
        found.append(x)
        indices.append(index)
    here = [d for d in _devices(operands) if d.process_index == _jax.process_of(d)]
    home = first_device(here) if here else home
    return [(home, tuple(params.arguments(indices)), found)]


def _of_each_device(
    operands: Operands, sharded: jax.Array, params: TapParams
) -> list[Block]:
    found: dict[str, Block] = {}
    for device in (shard.device for shard in sharded.addressable_shards):
        blocks, indices = [], []
        for x in operands:
            shards = x.addressable_shards if isinstance(x, jax.Array) else ()
            here = [shard for shard in shards if shard.device == device]
            blocks.append(here[0].data if here else x)
            index = here[0].index if here else whole(np.shape(x))
            indices.append(block_index(index, np.shape(x)))
        place = tuple(params.arguments(indices))
        found.setdefault(str(place), (device, place, blocks))
    return list(found.values())


def _refuse_parts(operands: Operands, params: TapParams) -> None:
    """Refuses values of which other processes hold parts: no program gathers them."""
    for x in operands:
        is_part = isinstance(x, jax.Array) and not x.is_fully_addressable
        if is_part and not x.is_fully_replicated:
            raise SpecError(
                f"hostcall: the tap `{params.callback.name}` was called outside of"
                f" jax.jit with an array of shape {list(x.shape)} that is sharded over"
                " several processes, so that this one has parts of it only. Tap in a"
                " function under jax.jit, which gathers it, or use on='process' or"
                " on='shards' for the parts",
                code="hc-device",
            )


def _devices(operands: Operands) -> list[Device]:
    """Those of the first array, which may be another process's."""
    arrays = [operand for operand in operands if isinstance(operand, jax.Array)]
    return [device for array in arrays[:1] for device in array.devices()]


# --- every= and sample= outside any program ------------------------------------------
#
# A compiled program has native counters for its taps, one for each tap and device. An
# eager tap is no part of a program, so its counter is found by the line that wrote it.

# How many lines keep a counter. In a notebook each run of a cell makes new lines.
# Beyond this number the counter that was used longest ago is dropped, and its line
# starts counting anew.
_AT_MOST = 4096

_places: OrderedDict[Hashable, _native.Throttle] = OrderedDict()
_lock = threading.Lock()


def _lets(params: TapParams, device: Device, always: bool) -> bool:
    """Whether an eager tap is delivered, on this device; `always` is its flag.

    If not, `hc.monitor.stats()` counts it.
    """
    callback, how = params.callback, params.options
    if not how.thinned:
        return True
    key = callback.place, source_of(callback.function), device.platform, device.id, how
    with _lock:
        found = _places.pop(key, None) or _native.Throttle(params.settings())
        _places[key] = found
        while len(_places) > _AT_MOST:
            _places.popitem(last=False)
    return found.lets(costs.counters_of(callback), always)


# --- abstract eval -----------------------------------------------------------------


def _abstract_eval(
    *operands: Aval, params: TapParams
) -> tuple[list[Aval], set[Effect]]:
    avals = list(params.arguments(operands)) if params.through else []
    return avals, params.effects


_jax.def_effectful_abstract_eval(tap_p, _abstract_eval)


def _passed(operands: Sequence[T], equation: dict[str, TapParams]) -> Sequence[T]:
    """The operands that are the results of a tap."""
    params = equation["params"]
    return params.arguments(operands) if params.through else ()


_jax.run_once_in_while_loops(tap_p, passes=_passed)


# --- batching ----------------------------------------------------------------------


def batched(
    operands: Operands, dims: Dims, params: TapParams
) -> tuple[list[jax.Array], TapParams, tuple[int | None, ...]]:
    """The operands, the parameters and the arguments' axes under one more vmap."""
    if params.always and dims[-1] is not None:
        flag = _of_any_row(operands, dims, params)
        operands, dims = [*operands[:-1], flag], [*dims[:-1], None]
        if all(dim is None for dim in dims):  # the rows differ in the flag only
            return operands, params, tuple(params.arguments(dims))
    flags = [d is not None for d in dims]
    axes = tuple(0 if flag else None for flag in params.arguments(flags))
    params = params.with_axis(flags, size_of(operands, dims))
    return in_front(operands, dims), params, axes


def _of_any_row(operands: Operands, dims: Dims, params: TapParams) -> jax.Array:
    """The flag `always` of a batch: whether that of any row that is tapped is True."""
    first, *_, flag = in_front(operands, dims)
    if params.masked and dims[0] is not None:
        # The axes of inner vmaps are behind this one. Their rows share the flag.
        mask = first
        flag &= mask.reshape(len(mask), -1).any(1)
    return flag.any()  # type: ignore[no-any-return]


def _batch(operands: Operands, dims: Dims, *, params: TapParams) -> Batched:
    moved, params, axes = batched(operands, dims, params)
    outs = bind(*moved, params=params)
    return outs, axes[: len(outs)]


_jax.batchers[tap_p] = _batch


# --- JVP, transpose ----------------------------------------------------------------


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array], *, params: TapParams
) -> tuple[list[jax.Array], list[jax.Array]]:
    """A tap sees primals. The tangents of its results are those of its arguments."""
    outs = bind(*primals, params=params)
    return outs, list(params.arguments(tangents))[: len(outs)]


def _transpose(
    cotangents: Sequence[jax.Array], *operands: object, params: TapParams
) -> list[None]:
    """Drops a tap of tangents: a program of the transpose alone has no tangents."""
    del params
    if cotangents:
        raise errors.DerivativeError(
            "hostcall: tap_through of a tangent can't be transposed; use"
            " hc.derivatives.tap_tangent, or hc.derivatives.tap_cotangent for the"
            " cotangent"
        )
    return [None] * len(operands)


_jax.jvps[tap_p] = _jvp
_jax.transposes[tap_p] = _transpose


# --- Partial evaluation under remat --------------------------------------------------


def _partial_eval(
    saveable: object, unknown: Sequence[bool], inst: Sequence[bool], eqn: JaxprEquation
) -> tuple[
    JaxprEquation | None, JaxprEquation | None, list[bool], list[bool], list[object]
]:
    """Known values are tapped in the forward pass. The backward pass, which computes
    them again, taps them a second time only with remat="repeat".

    Returns (known equation, staged equation, unknown outputs, instantiated outputs,
    residuals).
    """
    del saveable
    n = len(eqn.outvars)
    residuals = [v for v, here in zip(eqn.invars, inst, strict=True) if not here]
    if any(unknown):
        return None, eqn, [True] * n, [True] * n, residuals
    if eqn.params["params"].options.remat == "repeat":
        return eqn, eqn, [False] * n, [True] * n, residuals
    return eqn, None, [False] * n, [False] * n, []


_jax.partial_eval_rules[tap_p] = _partial_eval
