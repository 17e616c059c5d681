"""The tap primitive: copies of values leave the program, which goes on at once.

A tap without results carries an effect, which keeps it in the program. A tap that
returns its arguments (`through`) has no effect: the use of its results keeps it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax, _native
from hostcall._core import errors, failures, process
from hostcall._core.errors import SpecError
from hostcall._core.order import effects_of
from hostcall._core.source import source_of
from hostcall._engine import plans, targets
from hostcall._engine.counters import costs
from hostcall._engine.info import TapInfo
from hostcall._engine.params.tap import TapParams
from hostcall._engine.plans import Entrance
from hostcall._primitives.axes import in_front, size_of
from hostcall._primitives.eager import first_device, row_major
from hostcall._primitives.tap import parts
from hostcall._primitives.tap.parts import block_index, whole
from hostcall._runtime import delivery, host_device

tap_p = _jax.Primitive("host_tap")
tap_p.multiple_results = True
_jax.hold_weakly_in_caches(TapParams)
bind: Callable[..., list[Any]] = tap_p.bind


def flag_of(operands: Any, params: TapParams) -> bool:
    """The flag `always` of operands on the host; False if there is none."""
    return params.always and bool(np.asarray(operands[-1]))


# --- impl --------------------------------------------------------------------------


def _impl(*operands: Any, params: TapParams) -> list[Any]:
    """Queues the tap now. Compiles nothing, and leaves nothing behind."""
    targets.start()
    process.refuse(f"`{params.callback.name}` is tapped")
    delivery.start()
    results = list(params.arguments(operands)) if params.through else []
    if params.masked and np.size(operands[0]) == 1 and not row_major(operands[0]):
        return results
    if params.order == "ordered":
        for failure in failures.failures_of_effects():
            plans.logger.error(
                "an ordered tap continues after a failed program: %s", failure
            )
    for home, place, blocks in _blocks(operands, params):
        if not _lets(params, home, flag_of(operands, params)):
            continue
        arrays = [row_major(block) for block in blocks]
        info = TapInfo(params, {-1: home}, mesh=None)
        info.places = None if place is None else {-1: place}
        plan = plans.make_plan(
            params,
            arrays,
            info,
            Entrance(
                device=host_device.above_here(),
                tap=params.settings(in_program=False),
            ),
        )
        plan.push(list(params.read(arrays)))
    return results


tap_p.def_impl(_impl)


def _blocks(operands: Any, params: TapParams) -> list[tuple[Any, Any, list[Any]]]:
    """(device, place, operands) for each delivery of an eager tap in this process.

    Among devices that hold identical blocks, only the first taps.
    """
    sharded = [x for x in operands if isinstance(x, jax.Array) and len(x.devices()) > 1]
    if params.on == "shards" and sharded:
        return _of_each_device(operands, sharded[0], params)
    home, place = params.device or _home(operands), None
    if params.on == "once":
        _refuse_parts(operands, params)
        # Each process runs this line, and one of them delivers.
        if home.process_index != _jax.process_of(home):
            return []
        return [(home, place, list(operands))]
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
    operands: Any, sharded: jax.Array, params: TapParams
) -> list[tuple[Any, Any, list[Any]]]:
    found: dict[str, tuple[Any, Any, list[Any]]] = {}
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


def _refuse_parts(operands: Any, params: TapParams) -> None:
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


def _devices(operands: Any) -> list[Any]:
    arrays = [operand for operand in operands if isinstance(operand, jax.Array)]
    return [device for array in arrays[:1] for device in array.devices()]


def _home(operands: Any) -> Any:
    """The first device of the first array, which may be another process's."""
    return first_device(_devices(operands))


# --- every= and sample= outside any program ------------------------------------------
#
# A compiled program has native counters for its taps, one for each tap and device. An
# eager tap is no part of a program, so its counter is found by the line that wrote it.

# How many lines keep a counter. In a notebook each run of a cell makes new lines.
# Beyond this number the counter that was used longest ago is dropped, and its line
# starts counting anew.
_AT_MOST = 4096

_places: OrderedDict[Any, _native.Throttle] = OrderedDict()
_lock = threading.Lock()


def _lets(params: TapParams, device: Any, always: bool) -> bool:
    """Whether an eager tap is delivered, on this device; `always` is its flag.

    If not, `hc.monitor.stats()` counts it.
    """
    if params.every is None and params.sample is None:
        return True
    callback = params.callback
    where = callback.place, source_of(callback.function), device.platform, device.id
    key = (*where, params.every, params.sample)
    with _lock:
        found = _places.pop(key, None) or _native.Throttle(params.settings())
        _places[key] = found
        while len(_places) > _AT_MOST:
            _places.popitem(last=False)
    return found.lets(costs.counters_of(callback), always)


# --- abstract eval -----------------------------------------------------------------


def _abstract_eval(*operands: Any, params: TapParams) -> tuple[list[Any], set[Any]]:
    avals = list(params.arguments(operands)) if params.through else []
    return avals, effects_of(params.order)


_jax.def_effectful_abstract_eval(tap_p, _abstract_eval)


def _passed(operands: Sequence[Any], equation: dict[str, Any]) -> Sequence[Any]:
    """The operands that are the results of a tap."""
    params = equation["params"]
    return params.arguments(operands) if params.through else ()


_jax.run_once_in_while_loops(tap_p, passes=_passed)


# --- batching ----------------------------------------------------------------------


def batched(
    operands: Any, dims: Any, params: TapParams
) -> tuple[list[Any], TapParams, tuple[int | None, ...]]:
    """The operands, the parameters and the arguments' axes under one more vmap."""
    if params.always and dims[-1] is not None:
        *operands, flag = operands
        *dims, axis = dims
        operands.append(_of_any_row(flag, axis, operands, dims, params))
        dims.append(None)
        if all(dim is None for dim in dims):  # the rows differ in the flag only
            return operands, params, tuple(params.arguments(dims))
    flags = [d is not None for d in dims]
    axes = tuple(0 if flag else None for flag in params.arguments(flags))
    params = _with_axis(params, flags, size_of(operands, dims))
    return in_front(operands, dims), params, axes


def _of_any_row(
    flag: Any, axis: int, operands: Any, dims: Any, params: TapParams
) -> Any:
    """The flag `always` of a batch: whether that of any row that is tapped is True."""
    flag = jnp.moveaxis(flag, axis, 0)
    if params.masked and dims[0] is not None:
        # The axes of inner vmaps are behind this one. Their rows share the flag.
        mask = jnp.moveaxis(operands[0], dims[0], 0)
        flag &= mask.reshape(len(mask), -1).any(1)
    return flag.any()


def _with_axis(params: TapParams, flags: Sequence[bool], size: int) -> TapParams:
    """The parameters under one more vmap; its axis is first in the flagged operands."""
    if params.rows == "each":
        before = params.batched or ((),) * len(flags)
        batched = tuple((f, *b) for f, b in zip(flags, before, strict=True))
        return replace(params, grid=(size, *params.grid), batched=batched)
    return replace(
        params, flags=(*params.flags, tuple(flags)), sizes=(*params.sizes, size)
    )


def _batch(
    operands: Any, dims: Any, *, params: TapParams
) -> tuple[list[Any], tuple[Any, ...]]:
    moved, params, axes = batched(operands, dims, params)
    outs = bind(*moved, params=params)
    return outs, axes[: len(outs)]


_jax.batchers[tap_p] = _batch


# --- JVP, transpose ----------------------------------------------------------------


def _jvp(
    primals: Any, tangents: Any, *, params: TapParams
) -> tuple[list[Any], list[Any]]:
    """A tap sees primals. The tangents of its results are those of its arguments."""
    outs = bind(*primals, params=params)
    return outs, list(params.arguments(tangents))[: len(outs)]


def _transpose(cotangents: Any, *operands: Any, params: TapParams) -> list[Any]:
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


def _partial_eval(saveable: Any, unknown: Any, inst: Any, eqn: Any) -> Any:
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
    if eqn.params["params"].remat == "repeat":
        return eqn, eqn, [False] * n, [True] * n, residuals
    return eqn, None, [False] * n, [False] * n, []


_jax.partial_eval_rules[tap_p] = _partial_eval
