"""What a tap brings: the function that a recorder taps, and the rows and blocks of it.

A delivery holds values of shape (events, *axes of vmaps, *shape). The outermost vmap is
in front, and a value lacks the axes of vmaps that did not batch it; it is repeated
along them. So the rows of an event lie together, the innermost vmap's index fastest.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import hostcall as hc
from hostcall._core.host_code import HostCode
from hostcall.errors import HostcallError
from hostcall.tools._recorder.fields import Field
from hostcall.tools._recorder.inbox import Inbox

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
        self.has_arrays = any(field.kind == "array" for field in fields)
        self.has_elements = any(field.kind == "elements" for field in fields)
        self.has_columns = any(
            field.kind != "array" and field.name != "step" for field in fields
        )

    def events(self, *values: np.ndarray) -> None:
        """Gets a batch of events, stacked."""
        delivery = Delivery(self, time.time(), values, hc.current())
        if self.has_arrays or delivery.here.index is not None:
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
        for number, field in enumerate(self.fields):
            if field.kind == "array":
                shape = delivery.block(number).whole
                known = self._shapes.setdefault(field.name, shape)
                if shape != known:
                    raise HostcallError(
                        f"hostcall: the array {field.name!r} is recorded with the shape"
                        f" {shape}, and its earlier entries have the shape {known}: the"
                        " size of a vmap or mesh has changed. Use another name or"
                        " folder",
                        code="hc-record",
                    )


class Block(NamedTuple):
    """A part of an entry of an array that grows.

    Attributes:
        whole: the shape of the entry.
        at: where the part lies.
        shape: the shape of the part.
        names: the names of the entry's axes; None for the value's own.
    """

    whole: tuple[int, ...]
    at: tuple[slice, ...]
    shape: tuple[int, ...]
    names: tuple[str | None, ...]


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

    def block(self, number: int) -> Block:
        """Where a value lies in an entry of its Zarr array."""
        here, shape = self.here, self.place.fields[number].shape
        own = self.values[number].shape[1:]
        if here.index is not None:
            return Block(shape, here.index[number], own, (None,) * len(shape))
        flags = self.flags(number)
        axes = zip(numbered("row", len(flags)), flags, strict=True)
        whole = tuple(slice(0, size) for size in own)
        at = tuple(slice(at, at + 1) for at in here.mesh_coords.values())
        return Block(
            (*here.mesh_shape.values(), *own),
            (*at, *whole),
            (*[1] * len(at), *own),
            (
                *map(str, here.mesh_shape),
                *(name for name, flag in axes if flag),
                *[None] * len(shape),
            ),
        )

    def columns(self, steps: np.ndarray, process: int | None) -> Columns:
        """The columns, each with one entry per row.

        Args:
            steps: the numbers of the events, or of each row if the program gives them.
            process: this process, if the job has several.
        """
        grid, places = self._grid()
        rows = self.events * math.prod(grid)
        out = {
            "step": steps if len(steps) == rows else np.repeat(steps, math.prod(grid)),
            "time": np.full(rows, self.time),
        }
        if process is not None:
            out["process"] = np.full(rows, process, np.int32)
        if self.here.mesh_coords or self.place.has_elements:
            out["device"] = np.full(rows, self.here.device.id, np.int32)
        for name, index in places.items():
            out[name] = np.tile(index, self.events)
        for number, field in enumerate(self.place.fields):
            if field.kind == "array" or field.name == "step":
                continue
            value = self.rows_of(number, grid)
            if field.dtype.kind == "c":
                out[f"{field.name}.real"] = value.real
                out[f"{field.name}.imag"] = value.imag
            else:
                out[field.name] = value
        return out

    def rows_of(self, number: int, grid: tuple[int, ...] | None = None) -> np.ndarray:
        """The values of a field, one for each row."""
        grid = self._grid()[0] if grid is None else grid
        field, value = self.place.fields[number], self.values[number]
        value = value.astype(field.dtype, copy=False)
        shape = field.shape if field.kind == "column" else ()
        if not grid:
            return value
        if field.kind == "column":
            flags = self.flags(number)
            if self.place.has_elements:  # a step, beside a block
                flags = (False,) * len(grid)
            elif self.here.rows is not None:
                flags = (any(flags),)
            axes = tuple(slice(None) if flag else None for flag in flags)
            value = value[(slice(None), *axes)]
        whole = np.broadcast_to(value, (self.events, *grid, *shape))
        return whole.reshape(self.events * math.prod(grid), *shape)

    def _grid(self) -> tuple[tuple[int, ...], Columns]:
        """The axes between the events and a value's own: sizes, and each row's place.

        They are the axes of vmaps, or those of a block whose elements are rows.
        """
        here, sizes = self.here, dict[int, int]()
        if here.rows is not None:  # `where` left some rows, along one axis
            names = numbered("row", len(here.rows))
            places = [np.asarray(index, np.int64) for index in here.rows]
            count = len(places[0]) if places else 1
            return (count,), dict(zip(names, places, strict=True))
        if self.place.has_elements:
            kinds = [field.kind for field in self.place.fields]
            block = here.index[kinds.index("elements")]
            grid, name = tuple(part.stop - part.start for part in block), "index"
            begin = [part.start for part in block]
        else:
            for number, value in enumerate(self.values):
                has = [axis for axis, flag in enumerate(self.flags(number)) if flag]
                sizes.update(zip(has, value.shape[1:], strict=False))
            grid, name = tuple(size for _, size in sorted(sizes.items())), "row"
            begin = [0] * len(grid)
        index = np.indices(grid) if grid else ()
        return grid, {
            axis: at.ravel() + first
            for axis, at, first in zip(
                numbered(name, len(grid)), index, begin, strict=True
            )
        }


def numbered(name: str, count: int) -> list[str]:
    """The names of nested axes, the outermost first: "row", or "row0" and "row1"."""
    return [name] if count == 1 else [f"{name}{axis}" for axis in range(count)]
