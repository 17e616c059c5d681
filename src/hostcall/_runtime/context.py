"""What a callback can ask about the call it is in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from hostcall import _native
from hostcall._core.order import Order
from hostcall._runtime import workers


@dataclass(frozen=True)
class Current:
    """The call that the calling thread is in (`hc.current()`).

    Attributes:
        name: the function's.
        place: the user's line that wrote the call: `file`, `line`, `function`.
        order: "pure", "unordered" or "ordered".
        device: the `jax.Device` whose program calls; of an eager call, the device that
            its results go to; of an eager tap, that of its first array.
        mesh_coords: inside shard_map and pmap, axis name -> index of `device` on
            the mesh; else empty.
        row: this row's index along each batch axis that the rows run over, the
            outermost vmap first; empty without one.
        transforms: of a tap that is delivered with the whole batch, one
            ("batch", {"batch_dims": ...}) for each vmap in the order they were
            applied, with 0 for each array that has its axis and None for others. A
            later one's axis is in front.
        rows: where a tap's `where` differs between the rows of such a batch, the
            indices of those that were delivered, one array for each vmap, the
            outermost first; else None.
        index: of a tap with sharding="shards", for each array the place of its block in
            the whole array, a tuple of slices; else None.
        grid: sizes of the batch axes that `row` counts along.
        mesh_shape: sizes of the mesh axes that `mesh_coords` counts along.
        stream: of a call on a GPU's memory (arrays="cuda", `hc.buffer_callback`) the
            address of XLA's stream; else None.
        run: XLA's number of the execution that a tap or buffer callback is of; -1 of an
            eager one; None in another call.
        step: the tap's number among all that were pushed; None in a call.
    """

    name: str
    place: Any
    order: Order
    device: Any
    mesh_coords: dict[Any, int]
    row: tuple[int, ...]
    transforms: tuple[tuple[str, dict[str, Any]], ...] = ()
    rows: tuple[np.ndarray, ...] | None = None
    index: tuple[tuple[slice, ...], ...] | None = None
    run: int | None = None
    step: int | None = None
    stream: int | None = None
    grid: tuple[int, ...] = ()
    mesh_shape: dict[Any, int] = field(default_factory=dict)

    def at_row(self, row: tuple[int, ...]) -> Current:
        return replace(self, row=tuple(row))


def current() -> Current | None:
    """The host call that the calling thread is in, or None outside of one.

    Cost: nothing until asked; then a few microseconds.
    """
    found = _native.current()
    if found is None:  # on a thread that works for a call, its stand-in
        return workers.stand_in()
    info, ordinal, row, run, step, stream = found
    device = info.devices.get(ordinal)
    return Current(
        name=info.name,
        place=info.place,
        order=info.params.order,
        device=device,
        mesh_coords=_coords(info.mesh, device),
        row=row or (),
        transforms=getattr(info.params, "transforms", ()),
        rows=None if run is None else getattr(_kept, "rows", None),
        index=(getattr(info, "places", None) or {}).get(ordinal),
        run=run,
        step=step,
        stream=stream,
        grid=getattr(info.params, "grid", ()),
        mesh_shape={} if info.mesh is None else dict(info.mesh.shape),
    )


def place_in_batch() -> tuple[tuple[Any, ...], tuple[int, ...]] | None:
    """Which of its likes the call of this thread is: (the batch, its index in it).

    Devices of a shard_map count as the outermost axes. The batch has (name, size) for
    each mesh axis and the size of each batch axis; the index a number for each. None
    where that is not known: the program was lowered without its devices, or an executor
    runs rows on the thread that waits for them. Cost: 0.1 us without a mesh.
    """
    found = _native.current()
    if found is not None and found[0].mesh is None:
        batch, index = found[0].params.grid, found[2] or ()
    else:
        here = current()
        assert here is not None
        batch = (*here.mesh_shape.items(), *here.grid)
        index = (*here.mesh_coords.values(), *here.row)
    return (batch, index) if len(batch) == len(index) else None


_kept = threading.local()


@contextmanager
def only_rows(rows: tuple[np.ndarray, ...]) -> Iterator[None]:
    """Of a batch only these rows are delivered."""
    before = getattr(_kept, "rows", None)
    _kept.rows = rows
    try:
        yield
    finally:
        _kept.rows = before


def _coords(mesh: Any | None, device: Any) -> dict[Any, int]:
    if mesh is None or device is None or isinstance(mesh, jax.sharding.AbstractMesh):
        return {}
    ids = np.vectorize(lambda d: d.id, otypes=[int])(mesh.devices)
    places = np.argwhere(ids == device.id)
    if not len(places):
        return {}
    return {name: int(i) for name, i in zip(mesh.axis_names, places[0], strict=True)}
