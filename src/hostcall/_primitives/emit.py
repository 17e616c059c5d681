"""What the lowerings of all primitives share: tokens, slots, and JAX's own path."""

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


def inside(ctx: Any, params: Any) -> int | None:
    """Which calls of an equation run inside one of XLA's host callbacks."""
    if not _jax.is_for_cpu(ctx) or not targets.has_host_callbacks():
        return None
    if not params.runs_where_dispatched:
        return plans.ASKED
    if params.is_jaxs_own or params.callback.arrays == "free":
        return plans.EVERYWHERE
    return plans.ON_XLAS_THREADS


def host_device_of(client: Any | None, params: Any) -> Any:
    """Where JAX code in callbacks of a program on `client` computes by default.

    JAX's own code in a callback (Pallas' interpreter) finds what JAX gives it. It hands
    its arrays to threads that run programs on the process's own client, and relies on
    those having run when they are dispatched, as a program does whose arrays are there.
    """
    if params.is_jaxs_own:
        return jax.local_devices(backend="cpu")[0]
    return host_device.above(client)


# --- Slots ----------------------------------------------------------------------------

# Part of the signatures of exported programs, which another process may load: there it
# is another number, and they are refused. Programs that are not exported have none:
# JAX's compilation cache is to find them again.
_PROCESS = int.from_bytes(os.urandom(7), "little")


def signature_of(ctx: Any, params: Any, operands: Sequence[Any]) -> int:
    """What the program's text and the plan both have, so that a program does not call
    another's function. Refuses to export what nothing tells from others.
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
    """(slot, attributes by which the program finds it). The slot has to be kept alive
    as long as the program. `across`: the program is one over several processes.
    """
    slot = _native.Slot(plan, across)
    return slot, {
        "slot": np.uint64(slot.number),
        "signature": np.uint64(signature),
    }


class Kept:
    """What an executable keeps alive, and what can't leave the process with it."""

    def __init__(self, thing: Any, name: str) -> None:
        self.thing = thing
        self.name = name

    def __reduce__(self) -> NoReturn:
        raise ExportError(
            f"hostcall: a compiled program that calls `{self.name}` can't be"
            " serialized: the function stays in this process, and another would call"
            " one of its own in its place. Compile the program where it runs; with"
            " JAX's compilation cache (jax_compilation_cache_dir) that costs little"
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
    """The custom call, with the tokens that its order needs; gives the results.

    `ordered` is the effect whose token an ordered call has, `source` the device
    whose results all take.
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
