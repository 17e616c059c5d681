"""The description of a tap, which its lowering and its loading make alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hostcall._engine.info import TapInfo
from hostcall._engine.params.tap import TapParams
from hostcall._primitives.tap.indices import whole


def arguments(operands: Any, params: TapParams) -> Any:
    """The operands without the mask, which is first, and the flag, which is last."""
    return operands[int(params.masked) : len(operands) - params.always]


def describe(
    params: TapParams, devices: dict[int, Any], mesh: Any | None, avals: Sequence[Any]
) -> TapInfo:
    """The description of a tap whose devices all have the whole values."""
    info = TapInfo(params, devices, mesh)
    if params.on != "once" and mesh is None:
        place = tuple(whole(aval.shape) for aval in arguments(avals, params))
        info.places = dict.fromkeys(devices, place)
    return info
