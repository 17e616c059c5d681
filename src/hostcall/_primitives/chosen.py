"""Which device makes a call or a tap: `on=`, for every kind and every program.

| the program | `on=` left out | `on=device` |
|---|---|---|
| runs on one device | that one | that one, if it is it |
| is split over several by the compiler | the first | it, if it is among them |
| is a shard_map or pmap | each device | refused |
| is exported | the first, or the first that comes | refused: it may run elsewhere |
| none: an eager call | the first that has its arrays | it, if it is among them |

Any other device is an error. The shard_map is refused in `lowering.register`, and the
export in _export/texts.py and the tap's lowering, which say why for their programs.
"""

from __future__ import annotations

from collections.abc import Sequence

from hostcall import _jax
from hostcall._core.errors import HostcallError
from hostcall._engine.params.equation import Equation
from hostcall._jax.types import Device
from hostcall._runtime import host_device


def chosen_of(params: Equation, devices: Sequence[Device], of: str) -> Device:
    """The device that makes this call, of these devices of a program or of arrays;
    raises if `on=` names another one.
    """
    device = params.options.device
    first = devices[0]
    if device is None or device in devices:
        return device or first
    # Host code has one device for all that it computes, whatever `on=` says.
    if host_device.nesting_level(first.client) > 0:
        return first
    names = ", ".join(map(str, devices))
    raise HostcallError(
        f"hostcall: {params.shown} has on={device}, which is not among the devices of"
        f" {of}: {names}. Name one of these, or leave out on=. Or have the program run"
        " where on= says: give it arrays that are there, jax.device_put(x, device)",
        code="hc-device",
    )


def chosen_in(program: _jax.Program, params: Equation) -> Device | None:
    """The device that makes this call in a program; None if each of several does, or if
    it is not known.
    """
    if program.mesh is not None or program.is_exported:
        return None
    devices = program.devices or (() if program.home is None else (program.home,))
    return chosen_of(params, devices, "the program") if devices else None


def chosen_here(params: Equation, devices: Sequence[Device]) -> Device:
    """The device of an eager call whose arrays are on these."""
    return chosen_of(params, devices, "its arrays")
