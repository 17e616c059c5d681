"""Slots: where the engine keeps the plan of a compiled call or tap.

The program's text can't hold a Python function. It holds the key of the call instead,
which says what the call is, and a count that tells it from other live calls with the
same key. Under these the engine keeps the plan (function, dtypes, shapes). The slot is
tied to the executable, and is freed with it.

So the text of a program depends on what it calls, not on what else was compiled, nor in
which order or process: JAX's compilation cache finds it again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from hostcall import _jax, _native
from hostcall._core.errors import ExportError
from hostcall._core.source import is_anonymous
from hostcall._engine import keys, plans, targets
from hostcall._engine.info import CallInfo
from hostcall._engine.params.call import Callback
from hostcall._runtime import host_device

# A number of this process, mixed into the keys of exported programs. Another
# process that loads such a program has another number, and so refuses it. Programs that
# are not exported do not have it, so that JAX's compilation cache finds them again.
_PROCESS = int.from_bytes(os.urandom(7), "little")


def make_plan(
    client: Any | None,
    inside: _native.Inside,
    info: CallInfo,
    avals: Sequence[Any],
    *,
    tap: _native.TapSettings | None = None,
    team: _native.TeamSettings | None = None,
    tells: bool = False,
    elsewhere: bool = False,
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
    """
    params = info.params
    return plans.make_plan(
        params,
        avals,
        info,
        _host_device(client, params),
        packed=True,
        team=team,
        inside=inside if tap is None else _native.Inside.NEVER,
        tap=tap,
        tells=tells,
        elsewhere=elsewhere,
    )


def put(
    program: _jax.Program, info: CallInfo, avals: Sequence[Any], **more: Any
) -> dict[str, Any]:
    """Makes a plan, and puts it into a slot that lives as long as the program.

    Returns the attributes by which the program finds it. `more` are parameters of
    `make_plan`.
    """
    key = _key(program, info, avals)
    inside = calls_inside(program, info.params)
    plan = make_plan(program.client, inside, info, avals, **more)
    slot = _native.Slot(plan, key, program.across)
    keep(program, slot, info.name)
    return {"key": np.uint64(key), "count": np.uint64(slot.count)}


def _key(program: _jax.Program, info: CallInfo, avals: Sequence[Any]) -> int:
    """The key of a call; that of an exported program, which is loaded without being
    lowered, can be found in this process only.

    Raises ExportError for an export of a function that can't be identified.
    """
    key = keys.key_of(info.params, avals)
    if not program.is_exported:
        return key
    if is_anonymous(info.callback.function):
        refuse_export(
            info.callback,
            "a lambda, a partial or a function inside another shares its name with"
            " others, and where the program is loaded nothing would tell them apart."
            " Define it with `def` at the top of a module (such a program can be"
            " called in the process that exported it; others still refuse it)",
        )
    return key ^ _PROCESS


def calls_inside(program: _jax.Program, params: Any) -> _native.Inside:
    """Which calls of an equation run inside one of XLA's host callbacks."""
    if program.platforms != ("cpu",) or not targets.has_host_callbacks():
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


def refuse_export(callback: Callback, reason: str) -> NoReturn:
    raise ExportError(
        f"hostcall: a program that calls `{callback.name}` (at {callback.place}) can't"
        f" be exported: {reason}"
    )


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


def keep(program: _jax.Program, thing: Any, name: str) -> None:
    """Ties a slot, or what holds slots, to the executable of this program."""
    _jax.keep_alive(program, Kept(thing, name))
