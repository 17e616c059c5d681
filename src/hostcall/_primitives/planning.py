"""The plan of a call or tap in a compiled program, lowered here or loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from hostcall import _jax, _native
from hostcall._engine import plans, targets
from hostcall._engine.info import CallInfo
from hostcall._runtime import host_device


class Team(NamedTuple):
    """How the devices of a program make a call together (native/base/team.h).

    Attributes:
        mode: the name of a `_native.TeamMode`.
        size: the number of this process's devices.
        leader: the ordinal of the device that calls; None for the first that comes.
    """

    mode: str
    size: int
    leader: int | None


def make_plan(
    client: Any | None,
    inside: _native.Inside,
    info: CallInfo,
    avals: Sequence[Any],
    *,
    tap: _native.TapSettings | None = None,
    team: Team | None = None,
    tells: bool = False,
    elsewhere: bool = False,
    text: str = "",
) -> _native.Plan:
    """Makes the plan of a call or tap in a program.

    Args:
        client: the client that runs the program.
        inside: which of its calls run inside one of XLA's host callbacks.
        info: the call or tap.
        avals: the avals of its operands; for a typed key, the aval of its uint32 block.
        tap: the settings of a tap, or None.
        team: how the devices of the program make the call together, or None.
        tells: whether the call has its outcome as one more result.
        elsewhere: whether another process makes the call.
        text: describes the call in other processes (travel.py), or "".
    """
    params = info.params
    settings = None
    if team is not None:
        mode = _native.TeamMode[team.mode]
        settings = _native.TeamSettings(mode=mode, size=team.size, leader=team.leader)
    return plans.make_plan(
        params,
        avals,
        info,
        _host_device(client, params),
        packed=True,
        team=settings,
        inside=inside if tap is None else _native.Inside.NEVER,
        tap=tap,
        tells=tells,
        elsewhere=elsewhere,
        text=text,
    )


def calls_inside(program: _jax.Program, params: Any) -> _native.Inside:
    """Which calls of an equation run inside one of XLA's host callbacks."""
    return inside_of(program.platforms, params)


def inside_of(platforms: tuple[str, ...], params: Any) -> _native.Inside:
    """The same, of a program for these platforms."""
    if platforms != ("cpu",) or not targets.has_host_callbacks():
        return _native.Inside.NEVER
    if not params.runs_where_dispatched:
        return _native.Inside.ASKED
    if params.is_jaxs_own or params.callback.arrays == "free":
        return _native.Inside.EVERYWHERE
    return _native.Inside.XLAS_THREADS


def _host_device(client: Any | None, params: Any) -> Any:
    """The device on which JAX code in callbacks of a program on `client` computes.

    JAX's own host functions (Pallas' interpreter) must find the device that JAX would
    give them. They hand their arrays to threads that run programs on the process's own
    client, and they rely on each program having run when its dispatch returns, as a
    program does whose arrays are on that client.
    """
    if params.is_jaxs_own:
        return jax.local_devices(backend="cpu")[0]
    return host_device.above(client)
