"""What a callback can ask about the call it is in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hostcall import _native, _workers
from hostcall._order import Order


@dataclass(frozen=True)
class Current:
    """The call that the calling thread is in (`hc.current()`).

    Attributes:
        name: the function's.
        place: the user's line that wrote the call: `file`, `line`, `function`.
        order: "pure", "unordered" or "ordered".
        device: the `jax.Device` whose program calls; of an eager call, the device that
            its results go to.
        mesh_coords: inside shard_map and pmap, axis name -> index of `device` on
            the mesh; else empty.
        row: this row's index along each batch axis that the rows run over, the
            outermost vmap first; empty without one.
    """

    name: str
    place: Any
    order: Order
    device: Any
    mesh_coords: dict[Any, int]
    row: tuple[int, ...]

    def at_row(self, row: tuple[int, ...]) -> Current:
        return replace(self, row=tuple(row))


def current() -> Current | None:
    """The host call that the calling thread is in, or None outside of one.

    Cost: nothing until asked; then a few microseconds.
    """
    found = _native.current()
    if found is None:  # on a thread that works for a call, its stand-in
        return _workers.stand_in()
    info, ordinal, row = found
    device = info.devices.get(ordinal)
    return Current(
        name=info.name,
        place=info.place,
        order=info.params.order,
        device=device,
        mesh_coords=_coords(info.mesh, device),
        row=row or (),
    )


def _coords(mesh: Any | None, device: Any) -> dict[Any, int]:
    if mesh is None or device is None:
        return {}
    ids = np.vectorize(lambda d: d.id, otypes=[int])(mesh.devices)
    places = np.argwhere(ids == device.id)
    if not len(places):
        return {}
    return {name: int(i) for name, i in zip(mesh.axis_names, places[0], strict=True)}
