"""What a callback can find out about its own call (`hc.current()`)."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from hostcall import _jax, _native
from hostcall._core.order import Order
from hostcall._runtime import workers


@dataclass  # frozen, it would take four times as long to make
class Current:
    """The call that the calling thread is in (`hc.current()`).

    Attributes:
        name: the name of the function.
        place: the user's line that wrote the call: `file`, `line`, `function`.
        order: "pure", "unordered" or "ordered".
        device: the `jax.Device` whose program makes the call. In an eager call, the
            device of its results; in an eager tap, the device of its first array.
        mesh_coords: inside shard_map and pmap, axis name -> index of `device` on
            the mesh; else empty.
        row: the index of this row along each batch axis, the outermost vmap first;
            empty if the function does not run row by row.
        transforms: in a tap that is delivered with the whole batch, one
            ("batch", {"batch_dims": ...}) for each vmap in the order of application,
            with 0 for each array that has its axis and None for others. The axis of a
            later vmap is in front. Else empty.
        rows: the indices of the delivered rows, one array for each vmap, the outermost
            first, if `where` of such a tap differs between rows; else None.
        index: in a tap with on="shards", the place of each array's
            block in the whole array, as a tuple of slices; else None.
        block: the same as numbers: which block each array's is, along each axis; None
            where `index` is.
        devices: the devices of the program, in its order, those of other processes
            too; `device` alone outside of programs. Empty if they are not known, as for
            a shard_map over an abstract mesh.
        process: the number of this process in the job (`jax.process_index()`).
        processes: how many processes the job has. Without `jax.distributed` it is 1.
        execution: in hc.watch, how many executions of this place came before
            in this run of the program on this device, called or not; else None.
        grid: the sizes of the batch axes that `row` indexes.
        mesh_shape: the sizes of the mesh axes that `mesh_coords` indexes.
        stream: in a call on a GPU's memory (arrays="cuda", or in
            `hc.buffers.buffer_callback`) the address of XLA's stream; else None.
        run: XLA's number of the program's execution, the same on all its devices; -1
            outside of compiled programs.
        step: the number of the tap among all taps of the process; None in a call.
        runs: in a tap with batch=, an array of `run` of each delivered tap, in the
            order of the leading axis; there, `run` is the first tap's. Else None.
        steps: the same of `step`.
    """

    name: str
    place: Any
    order: Order
    device: Any
    mesh_coords: dict[Any, int]
    mesh_shape: dict[Any, int]
    row: tuple[int, ...]
    transforms: tuple[tuple[str, dict[str, Any]], ...] = ()
    rows: tuple[np.ndarray, ...] | None = None
    index: tuple[tuple[slice, ...], ...] | None = None
    run: int | None = None
    step: int | None = None
    runs: np.ndarray | None = None
    steps: np.ndarray | None = None
    stream: int | None = None
    execution: int | None = None
    grid: tuple[int, ...] = ()
    devices: tuple[Any, ...] = ()
    process: int = 0
    processes: int = 1

    @property
    def block(self) -> tuple[tuple[int, ...], ...] | None:
        if self.index is None:
            return None
        return tuple(tuple(map(_number_of, slices)) for slices in self.index)

    def at_row(self, row: tuple[int, ...]) -> Current:
        return replace(self, row=tuple(row))


def _number_of(block: slice) -> int:
    """Which block this is along its axis."""
    # Blocks of one array are equally large, so a block's start tells its number. They
    # are empty along an axis without elements, and all begin at 0 there.
    size = block.stop - block.start
    return int(block.start // (size or 1))


def current() -> Current | None:
    """The host call that the calling thread is in, or None outside of one.

    Cost: nothing until asked; then a few microseconds.
    """
    call = _native.current()
    if call is None:  # a worker thread may run this function for another thread's call
        return workers.stand_in()
    hooks, ordinal, row, run, step, stream, events, execution = call
    placement = hooks.placement
    runs = None
    steps = None
    if events is not None:  # of a batch of taps: all runs, then all steps
        runs, steps = np.frombuffer(events, np.int64).reshape(2, -1)
    device = placement.devices.get(ordinal)
    devices = placement.program_devices
    if devices is None:  # outside of programs
        devices = (device,)
    blocks = placement.blocks or {}
    mesh_shape = {} if placement.mesh is None else dict(placement.mesh.shape)
    process, processes = _jax.place_in_job()
    return Current(
        name=hooks.name,
        place=hooks.place,
        order=hooks.callback.options.order,
        device=device,
        mesh_coords=_coords(placement.mesh, device),
        row=row or (),
        transforms=hooks.equation.transforms,
        # In a call, the variable may be of the tap whose function made that call.
        rows=None if step is None else kept_rows.get(),
        index=blocks.get(ordinal),
        run=run,
        step=step,
        runs=runs,
        steps=steps,
        stream=stream,
        execution=execution,
        grid=hooks.equation.grid,
        mesh_shape=mesh_shape,
        devices=devices,
        process=process,
        processes=processes,
    )


def place_in_batch(
    call: Current | None = None,
) -> tuple[tuple[Any, ...], tuple[int, ...]] | None:
    """Where a call, this thread's or `call`, is in its batch: (axes, index along each).

    The devices of a shard_map count as the outermost axes. The axes are (name, size)
    for each mesh axis, then the size of each batch axis. None if the index is not
    known: the program was lowered without its devices, or an executor runs rows on the
    thread that waits for them. Cost: 0.1 us without a mesh.
    """
    on_this_thread = _native.current() if call is None else None
    if on_this_thread is not None and on_this_thread[0].placement.mesh is None:
        # The quick way, which makes no `Current`.
        hooks, _, row, *_ = on_this_thread
        batch = hooks.equation.grid
        index = row or ()
    else:
        if call is None:
            call = current()
        assert call is not None, "only host code asks"
        batch = (*call.mesh_shape.items(), *call.grid)
        index = (*call.mesh_coords.values(), *call.row)
    # Axes without an index: see above.
    return (batch, index) if len(batch) == len(index) else None


# The rows of a batch that a tap delivers without the others.
kept_rows: contextvars.ContextVar[tuple[np.ndarray, ...] | None] = (
    contextvars.ContextVar("hostcall_rows", default=None)
)


def _coords(mesh: Any | None, device: Any) -> dict[Any, int]:
    """The index of the device along each axis of the mesh; empty if it has none."""
    # An abstract mesh knows no devices: the program may run on any.
    if mesh is None or isinstance(mesh, jax.sharding.AbstractMesh):
        return {}
    positions = np.argwhere(mesh.devices == device)
    if not len(positions):
        return {}
    axes = zip(mesh.axis_names, positions[0], strict=True)
    return {name: int(index) for name, index in axes}
