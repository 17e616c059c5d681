"""Makes a call that its face has checked and flattened.

`hc.call`, HostFunctions, objects and the old `host_callback` all end here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hostcall._core.arguments import conflict
from hostcall._core.coroutines import is_coroutine_function
from hostcall._core.order import Order
from hostcall._core.source import Place
from hostcall._core.spec import Results, Static, Template
from hostcall._engine.gpu_arrays import OnDevice
from hostcall._engine.options import POLICY, refuse_pairs
from hostcall._engine.params.call import CallParams
from hostcall._engine.params.equation import Callback, Policy
from hostcall._primitives.call import batching, lowering  # noqa: F401  (they register)
from hostcall._primitives.call.primitive import bind


def make(
    callback: Callback,
    operands: Sequence[Any],
    *,
    order: Order = "pure",
    vmap_method: Any = None,
    sharding: Any = None,
    mask: Any = None,
    keep: int | None = None,
) -> list[Any]:
    """Binds the call and returns one array for each leaf of its results.

    Args:
        callback: the function, its trees and its own options.
        operands: one array for each array of `callback.template`. A typed key is
            passed as its uint32 block, here and in the results.
        order: as in `hc.call`. The caller has checked this and the next one.
        vmap_method: as in `hc.call`.
        sharding: of the device that calls, or None for the program's first.
        mask: the condition of `where=`, or None.
        keep: as in `call_kept`.
    """
    masked = mask is not None
    if masked:
        operands = [mask, *operands]
    if callback.arrays == "cuda":
        given = {"vmap_method": vmap_method, "where": mask, "on": sharding}
        given |= {"timeout": callback.policy.timeout, "lend": callback.lend}
        given["arrays"] = callback.arrays
        refuse_pairs(f"`{callback.name}`", given)
        # Imported here, since most programs call no function on a GPU's memory.
        from hostcall._engine.params.buffer import BufferParams
        from hostcall._primitives.buffer import bind as bind_buffers

        fn = OnDevice(callback.fn, callback.results, callback.name)
        on_device = BufferParams(
            callback=replace(callback, fn=Static(fn), arrays="numpy", lend="buffers"),
            avals=callback.results.avals,
            order=order,
            vmap_method=vmap_method or "sequential",
            masked=False,
        )
        return bind_buffers(*operands, params=on_device)
    if callback.policy.coalesce is not None and len(operands) == masked:
        raise conflict(
            f"`{callback.name}`",
            "coalesce= and no array among its arguments, so it could not tell how many"
            " calls were merged: pass one, or leave out coalesce=",
        )
    params = CallParams(
        callback=callback,
        avals=callback.results.avals,
        order=order,
        vmap_method=vmap_method,
        sharding=sharding,
        masked=masked,
        keep=keep,
    )
    return bind(*operands, params=params)


def make_with(
    options: Mapping[str, Any],
    fn: Any,
    template: Template,
    results: Results,
    fills: tuple[bytes | None, ...],
    place: Place,
    operands: Sequence[Any],
    mask: Any,
    owner: Any = None,
    **more: Any,
) -> list[Any]:
    """`make`, with the options as `HostFunction.options` gives them.

    `owner` is the HostFunction whose policy they have; `more` are fields of `Callback`
    and arguments of `make`.
    """
    options = {**options, **more}
    if not is_coroutine_function(fn):  # a plain rule of a coroutine function
        options.pop("concurrency", None)
    how = {key: options.pop(key) for key in _HOW if key in options}
    policy = {key: options.pop(key) for key in POLICY if key in options}
    callback = Callback(
        fn=Static(fn),
        template=template,
        results=results,
        fills=fills,
        policy=Policy.of(owner=owner, **policy),
        place=place,
        **options,
    )
    return make(callback, operands, mask=mask, **how)


_HOW = ("order", "vmap_method", "sharding")
