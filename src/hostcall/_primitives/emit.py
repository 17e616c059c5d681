"""What the lowerings of all primitives share: tokens, slots, and JAX's own path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hostcall import _jax, _native
from hostcall._errors import HostcallError
from hostcall._order import ORDERED, Order


def ordinal(device: Any) -> int:
    """The number under which XLA tells handlers of this device.

    On CPUs that is its id, which counts on from process to process.
    """
    return int(device.id if device.platform == "cpu" else device.local_hardware_id)


def by_ordinal(client: Any | None) -> dict[int, Any]:
    """The client's devices; none in a cross-lowering."""
    if client is None:
        return {}
    return {ordinal(device): device for device in client.local_devices()}


def local_devices(ctx: Any, client: Any | None) -> list[Any] | None:
    """Of a program over several devices those of this process; None: of one."""
    devices = _jax.program_devices(ctx)
    if devices is None or client is None:
        return None
    return [d for d in devices if d.process_index == client.process_index()]


def take_slot(plan: Any, signature: int) -> tuple[Any, dict[str, np.uint64]]:
    """(slot, attributes by which the program finds it). The slot has to be kept alive
    as long as the program.
    """
    slot = _native.Slot(plan)
    return slot, {
        "slot": np.uint64(slot.number),
        "signature": np.uint64(signature),
    }


def emit(
    ctx: Any,
    target: str,
    operands: Sequence[Any],
    attributes: dict[str, np.uint64],
    *,
    order: Order,
    has_side_effect: bool,
    aliases: dict[int, int] | None = None,
    ordered: Any = ORDERED,
    source: int | None = None,
) -> list[Any]:
    """The custom call, with the tokens that its order needs; gives the results.

    `ordered` is the effect whose token an ordered call has, `source` the number of the
    device whose results all take.
    """
    token, store = None, None
    if order == "ordered":
        token = _jax.ordered_token(ctx, ordered)
    elif order == "unordered":
        token, store = _jax.chain(ctx)
    results, token_out = _jax.emit_custom_call(
        ctx,
        target,
        operands,
        token=token,
        returns_token=order != "pure",
        has_side_effect=has_side_effect,
        attributes=attributes,
        aliases=aliases,
        source=source,
    )
    if order == "ordered":
        _jax.set_ordered_token(ctx, ordered, token_out)
    elif store is not None:
        store(token_out)
    return results


# --- Platforms that the engine does not serve -----------------------------------------

_JAXS_OWN = ("rocm", "tpu")


def check_platform(ctx: Any, what: str) -> None:
    """Refuses where JAX has no callback either."""
    platforms = tuple(ctx.module_context.platforms)
    if len(platforms) != 1 or platforms[0] not in _JAXS_OWN:
        raise HostcallError(
            f"hostcall: {what} is lowered for"
            f" {', '.join(platforms)}. The engine of this version serves one platform"
            " at a time: cpu and cuda, and rocm and tpu through JAX's own callback. Run"
            ' that part on the CPU: jax.jit(f, device=jax.devices("cpu")[0])'
        )


def emit_through_jax(
    ctx: Any,
    run: Callable[..., list[np.ndarray]],
    operands: Sequence[Any],
    *,
    order: Order,
    has_side_effect: bool,
    sharding: Any,
    ordered: Any = ORDERED,
    partitioned: bool = False,
) -> list[Any]:
    """JAX's own callback of `run`, in its order; gives the results."""
    in_order = order == "ordered"
    results, token = _jax.emit_jax_callback(
        ctx,
        run,
        operands,
        token=_jax.ordered_token(ctx, ordered) if in_order else None,
        has_side_effect=has_side_effect,
        sharding=sharding,
        partitioned=partitioned,
    )
    if in_order:
        _jax.set_ordered_token(ctx, ordered, token)
    return results
