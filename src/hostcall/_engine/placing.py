"""The decisions about where a call is made: `placed` and `hosted`, with their tables.

`placed` decides which devices of a program make a call, and `hosted` on which thread
and with which device of the host. `alone` is for calls outside of programs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import jax

from hostcall import _jax
from hostcall._core import config
from hostcall._engine.params.equation import CallParams, Equation
from hostcall._engine.placement import Placement, Reach, Team
from hostcall._jax.types import Device
from hostcall._native import Inside
from hostcall._runtime import host_device

if TYPE_CHECKING:
    from hostcall._job.after_failure import Failures


@lru_cache(maxsize=64)  # each eager call asks, and there are few devices
def alone(device: Device | None, host: Device | None) -> Placement:
    """Of a call that Python makes itself, with arrays that it has on the host.

    Args:
        device: the device that the call stands for; None if it is not known.
        host: JAX's default device inside the function; None if no plan is made.
    """
    return Placement(devices={-1: device}, host_device=host)


def placed_through_jax(
    program: _jax.Program, device: Device | None, job: Failures | None = None
) -> Placement:
    """Of a call that JAX's own callback makes for this device, if that is known."""
    placement = alone(device, host_device.host_device_for(None))
    return replace(
        placement,
        mesh=program.mesh,
        program_devices=program.devices,
        job=job,
    )


# --- In a program ---------------------------------------------------------------------


def placed(
    program: _jax.Program,
    equation: CallParams,
    leader: Device | None,
    job: Failures | None,
) -> Placement:
    """Decides how the devices of a program make a call.

    | the program's devices | in a mesh | team | who takes whose results |
    |---|---|---|---|
    | one | either | none | its own |
    | several, not known, one process | no | ONCE, the first that comes | the caller's |
    | several, not known, one process | yes | EACH | its own |
    | several, not known, several processes | either | none | its own |
    | several, known | yes | EACH, of those here | its own |
    | several, known | no | ONCE, of those here | the leader's |

    A "mesh" is that of a shard_map or pmap, where each device has a block of its own
    and calls for it. The devices of a program over an abstract mesh are not known; of
    several processes nothing then says how many of them are here. An export over
    concrete shardings knows its devices. It may run on others, so what it writes names
    none (_export/texts.py).

    In the last row, over several processes: a process that does not have the leader
    makes no call. It takes results, if there are any, from the leader's process.

    With fail="together", over several processes, on memory of the host: what is not
    known from taking results is told beside it. So each of the rows has a `reach`.

    A sharded feed is the exception: each device takes its part of the item from a lane
    of its own, in no team.

    Args:
        program: the program.
        equation: what is called.
        leader: the device that calls for all; None for the program's first.
        job: where failures are noted if several processes run the program.
    """
    alike = Placement(
        devices=program.by_ordinal,
        mesh=program.mesh,
        program_devices=program.devices,
        job=job,
    )
    if equation.devices:
        return alike
    # A call that works in place in GPU memory has no host memory for the outcome.
    on_host = program.platforms == ("cpu",) or not equation.on_buffers
    fail = equation.options.fail or config.settings.fail
    fails_together = program.across and on_host and fail == "together"
    devices = program.devices
    if program.local is None or not devices:
        placement = _with_unknown_devices(alike, program)
    elif program.mesh is not None:
        team = Team("EACH", size=len(program.local), leader=None)
        placement = replace(alike, team=team)
    else:
        leader = leader or devices[0]
        assert leader in devices, "chosen.py refuses others"
        placement = _led(alike, program.local, leader)
        is_taken = bool(equation.avals) or fails_together
        if is_taken and len(program.local) < len(devices):
            reach = Reach(len(devices), devices.index(leader), returns_outcome=on_host)
            calling = leader.process_index
            placement = replace(placement, reach=reach, calling_process=calling)
    if fails_together and placement.reach is None:
        origins = tuple(device.process_index for device in devices or ())
        return replace(placement, reach=Reach(program.size), origins=origins)
    return placement


def _with_unknown_devices(alike: Placement, program: _jax.Program) -> Placement:
    if program.size == 1 or jax.process_count() > 1:
        return alike
    mode: Literal["ONCE", "EACH"] = "ONCE" if program.mesh is None else "EACH"
    return replace(alike, team=Team(mode, size=program.size, leader=None))


def _led(alike: Placement, local: list[Device], leader: Device) -> Placement:
    """Of a call that the leader makes for all devices.

    In a process that does not have it, the first device stands for it: the team must
    know which of them asks whether the program may go on.
    """
    is_elsewhere = leader not in local
    caller = _jax.ordinal(local[0] if is_elsewhere else leader)
    team = Team("ONCE", size=len(local), leader=caller)
    return replace(alike, team=team, called_by_other_process=is_elsewhere)


# --- On the host ----------------------------------------------------------------------


def hosted(
    placement: Placement,
    equation: Equation,
    client: Any | None,
    platforms: tuple[str, ...],
) -> Placement:
    """The same with what the plan's host code needs: a device, and a thread.

    XLA chooses the thread, and `inside` says what hostcall does about it
    (native/handlers/run_call.cc):

    | the call | a CPU program runs it on | `inside` |
    |---|---|---|
    | a tap | the tap's worker | NEVER |
    | on a GPU | the stream's thread | NEVER |
    | ordered or unordered, a drop-in | the dispatching thread | XLAS_THREADS |
    | such a one with JAX's own function | the dispatching thread | EVERYWHERE |
    | such a one whose arrays are not committed | the dispatching thread | EVERYWHERE |
    | pure | the dispatching thread, or one of XLA's pool | ASKED |

    A program with effects is made to run where it is dispatched
    (`_jax.run_where_dispatched`), except where it waits for inputs: then it runs on one
    of XLA's threads. There a function that starts a program of the process's own
    devices could wait for a thread of the same pool. Inside a host callback it does
    not, and entering one costs a scalar call most of its time, so a pure call enters
    one only when its guard has seen such a program (_runtime/host_device.py).

    Args:
        placement: the rest.
        equation: what is called.
        client: the client that runs the program; None for the process's own.
        platforms: those for which the program is lowered.
    """
    inside = Inside.NEVER
    if not equation.ignores_results and platforms == ("cpu",):
        inside = _inside_of(equation)
    if equation.is_jaxs_own:
        # JAX's own host functions (Pallas' interpreter) must find the device that JAX
        # would give them. They hand their arrays to threads that run programs on the
        # process's own client, and they rely on each program having run when its
        # dispatch returns, as a program does whose arrays are on that client.
        device = jax.local_devices(backend="cpu")[0]
    else:
        device = host_device.host_device_for(client)
    return replace(placement, host_device=device, inside=inside, packed=True)


def _inside_of(equation: Equation) -> Inside:
    """Which calls of a CPU program run inside a host callback; see `hosted`."""
    if not equation.runs_where_dispatched:
        return Inside.ASKED
    if equation.is_jaxs_own or equation.options.arrays == "free":
        return Inside.EVERYWHERE
    return Inside.XLAS_THREADS
