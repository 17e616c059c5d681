"""The plan of a call or tap in a compiled program, lowered here or loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from hostcall import _native
from hostcall._engine import plans, targets
from hostcall._engine.info import CallInfo
from hostcall._engine.plans import Entrance
from hostcall._runtime import host_device


def make_plan(
    client: Any | None,
    platforms: tuple[str, ...],
    info: CallInfo,
    avals: Sequence[Any],
    entry: Entrance,
) -> _native.Plan:
    """Makes the plan of a call or tap in a program.

    Args:
        client: the client that runs the program.
        platforms: those for which the program was lowered.
        info: the call or tap.
        avals: the avals of its operands; for a typed key, the aval of its uint32 block.
        entry: how the engine is entered, without what the client says.
    """
    params = info.params
    inside = _native.Inside.NEVER
    if entry.tap is None:
        inside = _calls_inside(platforms, params)
    if params.is_jaxs_own:
        # JAX's own host functions (Pallas' interpreter) must find the device that JAX
        # would give them. They hand their arrays to threads that run programs on the
        # process's own client, and they rely on each program having run when its
        # dispatch returns, as a program does whose arrays are on that client.
        device = jax.local_devices(backend="cpu")[0]
    else:
        device = host_device.above(client)
    entry = replace(entry, device=device, packed=True, inside=inside)
    return plans.make_plan(params, avals, info, entry)


def _calls_inside(platforms: tuple[str, ...], params: Any) -> _native.Inside:
    """Which calls of an equation run inside one of XLA's host callbacks."""
    if platforms != ("cpu",) or not targets.has_host_callbacks():
        return _native.Inside.NEVER
    if not params.runs_where_dispatched:
        return _native.Inside.ASKED
    if params.is_jaxs_own or params.callback.arrays == "free":
        return _native.Inside.EVERYWHERE
    return _native.Inside.XLAS_THREADS
