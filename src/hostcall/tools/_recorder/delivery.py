"""What a tap brings: the function that a recorder taps, and the rows and blocks of it.

A delivery holds values of shape (events, *axes of vmaps, *shape). The outermost vmap is
in front, and a value lacks the axes of vmaps that did not batch it; it is repeated
along them. So the rows of an event lie together, the innermost vmap's index fastest.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import hostcall as hc
from hostcall._core.host_code import HostCode
from hostcall.errors import HostcallError
from hostcall.tools._recorder.fields import Field
from hostcall.tools._recorder.inbox import Inbox
from hostcall.tools._recorder.stream import About

Columns = dict[str, np.ndarray]


class Place(HostCode):
    """The function that a recorder taps, one for each set of fields.

    JAX compares the function when a program is traced again, so it must stay the same
    object. Programs keep it alive after the recorder is closed; so it refers to the
    inbox, not to the recorder. Its methods run on the worker of taps.

    Args:
        inbox: where deliveries go.
        fields: what the values of a delivery are.
        shapes: the shape of an entry of each array of the run. The worker of taps,
            which is one thread, adds to it.
    """

    stays = (
        "a hc.Recorder writes to a run of this process. Leave it out, or tap a"
        " registered function (hc.register), which may record where the program runs"
    )

    def __init__(
        self,
        inbox: Inbox,
        fields: tuple[Field, ...],
        shapes: dict[str, tuple[int, ...]],
    ) -> None:
        self._inbox = inbox
        self._shapes = shapes
        self.fields = fields
        self.names = [field.name for field in fields]
        kept = [n for n, name in enumerate(self.names) if name != "step"]
        self.arrays = [n for n in kept if fields[n].is_array]
        self.columns = [n for n in kept if not fields[n].is_array]

    def events(self, *values: np.ndarray) -> None:
        """Gets a batch of events, stacked."""
        if not all(value.size for value in values):  # a vmap over no rows
            return
        delivery = Delivery(self, time.time(), values, hc.current())
        if self.arrays or delivery.here.index is not None:
            self._refuse(delivery)
        self._inbox.put(delivery, sum(value.nbytes for value in values))

    def event(self, *values: np.ndarray) -> None:
        """Gets one event."""
        self.events(*(value[None] for value in values))

    def _refuse(self, delivery: Delivery) -> None:
        """Raises for values that have no place in the run."""
        here = delivery.here
        what = None
        if here.index is not None and here.transforms:
            what = "on='shards' or on='process' is under vmap"
        elif here.rows is not None:
            what = "where= differs between the rows of a vmap"
        elif "step" in self.names and any(delivery.flags(self.names.index("step"))):
            what = "step= differs between the rows of a vmap"
        if what is not None:
            names = ", ".join(name for name in self.names if name != "step")
            raise HostcallError(
                f"hostcall: the values {names} can't be recorded where {what}. Record"
                " arrays in a call of their own, outside of the vmap",
                code="hc-record",
            )
        for number in self.arrays:
            name, shape = self.names[number], delivery.block(number).whole
            known = self._shapes.setdefault(name, shape)
            if shape != known:
                raise HostcallError(
                    f"hostcall: the array {name!r} is recorded with the shape {shape},"
                    f" and its earlier entries have the shape {known}: the size of a"
                    " vmap or mesh has changed. Use another name or folder",
                    code="hc-record",
                )


class Block(NamedTuple):
    """A part of an entry of an array that grows.

    Attributes:
        whole: the shape of the entry.
        corner: where the part begins.
        shape: the shape of the part.
    """

    whole: tuple[int, ...]
    corner: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass
class Delivery:
    """What a tap brought.

    Attributes:
        place: the call of the recorder, with its fields.
        time: when it was delivered, in seconds since 1970.
        values: one array for each field, with an axis for the events in front.
        here: `hc.current()` of the delivery.
    """

    place: Place
    time: float
    values: tuple[np.ndarray, ...]
    here: Any

    @property
    def events(self) -> int:
        return len(self.values[0])

    def flags(self, number: int) -> tuple[bool, ...]:
        """Whether a value has the axis of each vmap, the outermost vmap first."""
        return tuple(
            how["batch_dims"][number] is not None
            for _, how in reversed(self.here.transforms)
        )

    def tables(
        self, steps: np.ndarray, process: int | None
    ) -> Iterator[tuple[str, About, Columns]]:
        """The rows that this adds to each array, and to the table, which has no name.

        Args:
            steps: the numbers of the events, or of each row if the program gives them.
            process: this process, if the job has several.
        """
        for number in self.place.arrays:
            field, block = self.place.fields[number], self.block(number)
            (text,) = field.types().values()
            # In shard_map `where` may pick some shards: others may never come.
            sparse = self.here.index is None
            values = self.values[number].astype(field.dtype, copy=False)
            columns = {
                # Rows of an event have one step (`Place._refuse`).
                "step": steps[:: len(steps) // self.events],
                "time": np.full(self.events, self.time),
                "at": np.tile(block.corner, (self.events, 1)),
                "value": values.reshape(self.events, *block.shape),
            }
            yield field.name, About(process or 0, text, block.whole, sparse), columns
        if self.place.columns:
            yield "", About(process or 0), self._columns(steps, process)

    def block(self, number: int) -> Block:
        """Where a value lies in an entry of its array."""
        here, own = self.here, self.values[number].shape[1:]
        if here.index is not None:
            corner = tuple(part.start for part in here.index[number])
            return Block(self.place.fields[number].shape, corner, own)
        at = tuple(here.mesh_coords.values())
        return Block(
            (*here.mesh_shape.values(), *own),
            (*at, *[0] * len(own)),
            (*[1] * len(at), *own),
        )

    def _columns(self, steps: np.ndarray, process: int | None) -> Columns:
        grid, places = self._grid
        rows = self.events * math.prod(grid)
        out = {
            "step": steps if len(steps) == rows else np.repeat(steps, math.prod(grid)),
            "time": np.full(rows, self.time),
        }
        if process is not None:
            out["process"] = np.full(rows, process, np.int32)
        if self.here.mesh_coords:
            out["device"] = np.full(rows, self.here.device.id, np.int32)
        for name, index in places.items():
            out[name] = np.tile(index, self.events)
        for number in self.place.columns:
            field, value = self.place.fields[number], self.rows_of(number)
            if field.dtype.kind == "c":
                out[f"{field.name}.real"] = value.real
                out[f"{field.name}.imag"] = value.imag
            else:
                out[field.name] = value
        return out

    def rows_of(self, number: int) -> np.ndarray:
        """The values of a field in the table, one for each row."""
        grid, _ = self._grid
        field = self.place.fields[number]
        value = self.values[number].astype(field.dtype, copy=False)
        if not grid:
            return value
        flags = self.flags(number)
        if self.here.rows is not None:
            flags = (any(flags),)
        axes = (slice(None) if flag else None for flag in flags)
        value = value[(slice(None), *axes)]
        whole = np.broadcast_to(value, (self.events, *grid, *field.shape))
        return whole.reshape(self.events * math.prod(grid), *field.shape)

    @functools.cached_property
    def _grid(self) -> tuple[tuple[int, ...], Columns]:
        """The sizes of the axes of vmaps, and the place of each row of an event."""
        grid: tuple[int, ...]
        if self.here.rows is not None:  # `where` left some rows, along one axis
            places = [np.asarray(index, np.int64) for index in self.here.rows]
            grid = (len(places[0]) if places else 1,)
        else:
            sizes = dict[int, int]()
            for number, value in enumerate(self.values):
                axes = [axis for axis, flag in enumerate(self.flags(number)) if flag]
                sizes.update(zip(axes, value.shape[1:], strict=False))
            grid = tuple(size for _, size in sorted(sizes.items()))
            places = [index.ravel() for index in np.indices(grid)]
        several = len(places) > 1  # the outermost vmap is "row0"
        return grid, {f"row{n if several else ''}": at for n, at in enumerate(places)}
