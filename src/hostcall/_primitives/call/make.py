"""Makes a call that its face has checked and flattened.

`hc.call`, HostFunctions and objects all end here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hostcall._core.arguments import conflict
from hostcall._core.callback import Callback, Policy
from hostcall._core.coroutines import is_coroutine_function
from hostcall._core.source import Place
from hostcall._core.spec import Results, Static, Template
from hostcall._engine.gpu_arrays import OnDevice
from hostcall._engine.options import POLICY, refuse_pairs
from hostcall._engine.params.call import CallParams
from hostcall._primitives.call import batching, lowering  # noqa: F401  (they register)
from hostcall._primitives.call.primitive import bind

# The options that an equation has; others are its callback's.
_OF_EQUATIONS = ("order", "vmap_method", "sharding", "keep")


def make(
    options: Mapping[str, Any],
    fn: Any,
    template: Template,
    results: Results,
    fills: tuple[bytes | None, ...],
    place: Place,
    operands: Sequence[Any],
    mask: Any,
    owner: Any = None,
) -> list[Any]:
    """Binds the call and returns one array for each leaf of its results.

    Args:
        options: as `hc.call` and `hc.host` take them, checked; `order` at least. Also
            `sharding`, of the device that calls, and `keep`, as in `call_kept`.
        fn: the function.
        template: how to rebuild its arguments from arrays.
        results: what it returns.
        fills: for each result, what a masked row gets.
        place: the user's line.
        operands: one array for each array of `template`. A typed key is passed as its
            uint32 block, here and in the results.
        mask: the condition of `where=`, or None.
        owner: the HostFunction whose policy the options have, or None.
    """
    options = dict(options)
    if not is_coroutine_function(fn):  # a plain rule of a coroutine function
        options.pop("concurrency", None)
    policy = Policy.of(options, owner)
    how = {key: options.pop(key) for key in _OF_EQUATIONS if key in options}
    others = {key: each for key, each in options.items() if key not in POLICY}
    callback = Callback(
        fn=Static(fn),
        template=template,
        results=results,
        fills=fills,
        policy=policy,
        place=place,
        **others,
    )
    if mask is not None:
        operands = [mask, *operands]
    if callback.arrays == "cuda":
        return _make_on_device(callback, operands, mask, how)
    if callback.policy.coalesce is not None and len(operands) == (mask is not None):
        raise conflict(
            f"`{callback.name}`",
            "coalesce= and no array among its arguments, so it could not tell how many"
            " calls were merged: pass one, or leave out coalesce=",
        )
    masked = mask is not None
    params = CallParams(callback=callback, avals=results.avals, masked=masked, **how)
    return bind(*operands, params=params)


def _make_on_device(
    callback: Callback, operands: Sequence[Any], mask: Any, how: dict[str, Any]
) -> list[Any]:
    method = how.get("vmap_method")
    given = {"arrays": "cuda", "vmap_method": method, "where": mask}
    given |= {"timeout": callback.policy.timeout, "lend": callback.lend}
    refuse_pairs(f"`{callback.name}`", {**given, "on": how.get("sharding")})
    # Imported here, since most programs call no function on a GPU's memory.
    from hostcall._engine.params.buffer import BufferParams
    from hostcall._primitives.buffer import bind as bind_buffers

    fn = OnDevice(callback.fn, callback.results, callback.name)
    on_device = BufferParams(
        callback=replace(callback, fn=Static(fn), arrays="numpy", lend="buffers"),
        avals=callback.results.avals,
        order=how["order"],
        vmap_method=method or "sequential",
        masked=False,
    )
    return bind_buffers(*operands, params=on_device)
