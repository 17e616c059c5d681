"""What the lowerings of all primitives share: tokens, slots, and JAX's own callback."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from hostcall import _jax, _native
from hostcall._core.errors import ExportError, HostcallError
from hostcall._core.order import ORDERED, Order
from hostcall._core.source import is_anonymous
from hostcall._engine import plans, targets
from hostcall._primitives.across import Source
from hostcall._runtime import host_device


def ordinal(device: Any) -> int:
    """The number that XLA gives a handler for this device.

    On CPUs it is the device's id, and ids count on from process to process.
    """
    return int(device.id if device.platform == "cpu" else device.local_hardware_id)


def by_ordinal(client: Any | None) -> dict[int, Any]:
    """Ordinal -> device, for the client's devices; empty in a cross-lowering."""
    if client is None:
        return {}
    return {ordinal(device): device for device in client.local_devices()}


def local_devices(ctx: Any, client: Any | None) -> list[Any] | None:
    """The devices of this process in a program over several devices.

    None for a program on one device, or if the lowering does not know the devices.
    """
    devices = _jax.program_devices(ctx)
    if devices is None or client is None:
        return None
    return [d for d in devices if d.process_index == client.process_index()]


def inside(ctx: Any, params: Any) -> _native.Inside:
    """Which calls of an equation run inside one of XLA's host callbacks."""
    if not _jax.is_for_cpu(ctx) or not targets.has_host_callbacks():
        return _native.Inside.NEVER
    if not params.runs_where_dispatched:
        return _native.Inside.ASKED
    if params.is_jaxs_own or params.callback.arrays == "free":
        return _native.Inside.EVERYWHERE
    return _native.Inside.XLAS_THREADS


def host_device_of(client: Any | None, params: Any) -> Any:
    """The device on which JAX code in callbacks of a program on `client` computes.

    JAX's own host functions (Pallas' interpreter) must find the device that JAX would
    give them. They hand their arrays to threads that run programs on the process's own
    client, and they rely on each program having run when its dispatch returns, as a
    program does whose arrays are on that client.
    """
    if params.is_jaxs_own:
        return jax.local_devices(backend="cpu")[0]
    return host_device.above(client)


# --- Slots ----------------------------------------------------------------------------

# A number of this process, mixed into the signatures of exported programs. Another
# process that loads such a program has another number, and so refuses it. Programs that
# are not exported do not have it, so that JAX's compilation cache finds them again.
_PROCESS = int.from_bytes(os.urandom(7), "little")


def signature_of(ctx: Any, params: Any, operands: Sequence[Any]) -> int:
    """A number that both the program's text and its plan hold.

    The engine compares the two, so that a loaded program does not call another's
    function. Raises ExportError for an export of a function that can't be identified.
    """
    number = plans.signature(params, operands)
    if not _jax.is_for_export(ctx):
        return number
    if is_anonymous(params.callback.function):
        refuse_export(
            params,
            "a lambda, a partial or a function inside another shares its name with"
            " others, and where the program is loaded nothing would tell them apart."
            " Define it with `def` at the top of a module (such a program can be"
            " called in the process that exported it; others still refuse it)",
        )
    return number ^ _PROCESS


def refuse_export(params: Any, reason: str) -> NoReturn:
    raise ExportError(
        f"hostcall: a program that calls `{params.callback.name}` (at"
        f" {params.callback.place}) can't be exported: {reason}"
    )


def take_slot(
    plan: Any, signature: int, across: bool = False
) -> tuple[Any, dict[str, np.uint64]]:
    """Returns (slot, attributes by which the program finds it).

    The slot must be kept alive as long as the program. `across` says that the program
    spans several processes.
    """
    slot = _native.Slot(plan, across)
    return slot, {
        "slot": np.uint64(slot.number),
        "signature": np.uint64(signature),
    }


class Kept:
    """Something that an executable keeps alive, and that can't leave the process."""

    def __init__(self, thing: Any, name: str) -> None:
        self.thing = thing
        self.name = name

    def __reduce__(self) -> NoReturn:
        raise ExportError(
            f"hostcall: a compiled program that calls `{self.name}` can't be"
            " serialized: the function stays in this process, and another process would"
            " call a function of its own instead. Compile the program where it runs;"
            " with JAX's compilation cache (jax_compilation_cache_dir) that costs"
            " little"
        )


def keep(ctx: Any, thing: Any, name: str) -> None:
    """Ties a slot, or what holds slots, to the executable of this lowering."""
    _jax.keep_alive(ctx, Kept(thing, name))


# --- The custom call ------------------------------------------------------------------


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
    source: Source | None = None,
) -> list[Any]:
    """Emits the custom call with the tokens that its order needs; returns the results.

    `ordered` is the effect whose token an ordered call takes and returns. `source` is
    the device whose results all devices take.
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
    """Refuses platforms for which JAX has no callback either."""
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
    """Emits JAX's own callback of `run`, in its order; returns the results."""
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
