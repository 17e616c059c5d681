"""What one call of a recorder stores, from its values to their rows and blocks.

Where a program is traced, the values become fields, with the types of their columns.

A delivery holds values of shape (events, *axes of vmaps, *shape). The outermost vmap is
in front, and a value lacks the axes of vmaps that did not batch it; it is repeated
along them. So the rows of an event lie together, the innermost vmap's index fastest.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from hostcall._core.host_code import HostCode
from hostcall.errors import SpecError
from hostcall.tools._recorder.arrow import About, Columns
from hostcall.tools._recorder.worker import Worker
from hostcall.tools._values import failed, need, with_all_axes

Shape = tuple[int, ...]

# Values with more elements become arrays.
MOST_IN_A_COLUMN = 16
# Columns that the recorder adds.
ADDED = re.compile(r"(time|process|device|row\d*)?")  # and the table's name


@dataclass(frozen=True)
class Field:
    """A value that is recorded under a name.

    Attributes:
        name: the keyword; for a leaf of a pytree, with its path behind a dot.
        shape: the shape of one event, without the axes of a vmap.
        dtype: the dtype that is stored.
        is_array: whether it is stored as an array (reading.py), and not in a column.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    is_array: bool

    def types(self) -> dict[str, str]:
        """The type of each column or array as text, such as "float32[3]"."""
        if self.is_array:
            return {self.name: f"an array of {text_of(self.dtype, self.shape)}"}
        # No values are needed to see which columns there are, and of which dtypes.
        columns = columns_of(self.name, np.empty(0, self.dtype))
        return {
            name: text_of(column.dtype, self.shape) for name, column in columns.items()
        }


def columns_of(name: str, values: np.ndarray) -> Columns:
    """The columns with these values, of shape (rows, *shape)."""
    if values.dtype.kind == "c":  # Arrow has no complex numbers
        return {f"{name}.real": values.real, f"{name}.imag": values.imag}
    return {name: values}


def text_of(dtype: np.dtype, shape: Sequence[int]) -> str:
    """A type as files and messages have it: "float32[3]", "int64" of a scalar."""
    return f"{dtype.name}[{','.join(map(str, shape))}]" if shape else dtype.name


def fields_of(values: dict[str, Any], in_parts: bool) -> dict[Field, jax.Array]:
    """The fields of a call with their arrays. Pytrees are flattened: `{"w": x}` to
    "grads.w".

    Args:
        values: the keywords.
        in_parts: whether devices tap parts of them.
    """
    arrays_by_field = {}
    # One keyword at a time: JAX would sort the keys of a dict, and the columns have the
    # order in which the user wrote them.
    for keyword, tree in values.items():
        leaves, _ = jax.tree_util.tree_flatten_with_path({keyword: tree})
        for path, leaf in leaves:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            _check_name(name)
            array = _array(name, leaf)
            # A block of a small value must find its place, and columns have no places.
            is_array = array.size > MOST_IN_A_COLUMN or (in_parts and array.ndim > 0)
            dtype = _stored(array.dtype)
            if name == "step":  # of any integer dtype; counted steps are int64
                dtype = np.dtype(np.int64)
            field = Field(name, array.shape, dtype, is_array)
            arrays_by_field[field] = array
    return arrays_by_field


def _check_name(name: str) -> None:
    """Refuses names that can't be those of columns and folders."""
    if "/" in name:
        first, _, rest = name.partition("/")
        raise unrecordable(
            f"a recorder can't store a value under the name {name!r}: names of arrays"
            ' are names of folders, which can\'t have "/". Write'
            f" rec(**{{{name.replace('/', '.')!r}: value}}), or as a tree:"
            f" rec({first}={{{rest.replace('/', '.')!r}: value}})"
        )
    # Of a lone surrogate this makes "?", which is another name.
    encoded = name.encode("utf-8", "replace")
    is_of_a_folder = encoded.decode() == name and len(encoded) <= 255
    is_hidden = name.startswith(".")
    if ADDED.fullmatch(name) or "\0" in name or is_hidden or not is_of_a_folder:
        raise unrecordable(
            f"a recorder can't store a value under the name {name!r}. It adds the"
            " columns time, process, device and row itself, and names of arrays are"
            " names of folders, of 255 bytes at most"
        )


def _array(name: str, leaf: object) -> jax.Array:
    """A value as an array; refuses what is none, or has nothing to record."""
    try:
        array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    except (TypeError, OverflowError) as error:
        raise unrecordable(
            f"a recorder stores numbers and arrays, and {name}= is {leaf!r},"
            f" {type(leaf).__name__}"
        ) from error
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise unrecordable(f"{name}= is a PRNG key. Record jax.random.key_data(key)")
    if not array.size:
        raise unrecordable(
            f"{name}= has the shape {array.shape}, so there is nothing to record"
        )
    if name == "step":
        is_integer = array.ndim == 0 and jnp.issubdtype(array.dtype, jnp.integer)
        wanted = "step= of a recorder should be an integer scalar"
        need(is_integer, wanted, array, "hc-record")
    return array


def unrecordable(complaint: str) -> SpecError:
    """The error for values that a recorder can't store, where they are traced."""
    return SpecError(f"hostcall: {complaint}", code="hc-record")


def _stored(jax_dtype: np.dtype) -> np.dtype:
    """The NumPy dtype that holds every value of a dtype of JAX's exactly."""
    dtype = np.dtype(jax_dtype)
    if dtype.isbuiltin == 1:
        return dtype
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(np.float32)  # bfloat16 and the eight-bit floats
    return np.dtype(np.uint8 if dtype.name.startswith("u") else np.int8)  # int4, uint4


# --- On the worker of taps, and the writer's thread -----------------------------------


class Tapped(HostCode):
    """The function that a recorder taps, one for each set of fields.

    JAX compares the function when a program is traced again, so it must stay the same
    object. Programs keep it alive after the recorder is closed; so it refers to the
    writer, not to the recorder. Its methods run on the worker of taps.

    Args:
        writer: gets the deliveries.
        fields: what the values of a delivery are.
        shapes: the shape of an entry of each array of the run. The worker of taps,
            which is one thread, adds to it.

    Attributes:
        numbers: the position of each field among the values, by its name, without that
            of "step".
        step: the position of "step"; None if the calls are counted.
        arrays, columns: the positions of fields that are arrays, and of others.
    """

    stays = (
        "a hc.Recorder writes to a run of this process. Leave it out, or tap a"
        " registered function (hc.register), which may record where the program runs"
    )

    def __init__(
        self,
        writer: Worker[Events],
        fields: tuple[Field, ...],
        shapes: dict[str, Shape],
    ) -> None:
        self._writer = writer
        self._shapes = shapes
        self.fields = fields
        self.numbers = {field.name: n for n, field in enumerate(fields)}
        self.step = self.numbers.pop("step", None)
        self.arrays: list[int] = []
        self.columns: list[int] = []
        for number in self.numbers.values():
            kind = self.arrays if fields[number].is_array else self.columns
            kind.append(number)

    def events(self, *values: np.ndarray) -> None:
        """Gets a batch of events, stacked."""
        if not all(value.size for value in values):  # a vmap over no rows
            return
        current = hc.current()
        assert current is not None, "the worker of taps calls this"
        delivery = Events(self, time.time(), values, current)
        # Here, and not on the writer's thread: the error is the tap's, with its place.
        if self.arrays or current.index is not None:
            self._refuse(delivery)
        size = sum(value.nbytes for value in values)
        self._writer.put(delivery, size)

    def event(self, *values: np.ndarray) -> None:
        """Gets one event."""
        self.events(*(value[None] for value in values))

    def _refuse(self, delivery: Events) -> None:
        """Raises for values that have no place in the run."""
        current = delivery.current
        obstacle = None
        if current.index is not None and current.transforms:
            obstacle = "on='shards' is under vmap"
        elif current.rows is not None:
            obstacle = "where= differs between the rows of a vmap"
        elif self.step is not None and delivery.is_batched(self.step):
            obstacle = "step= differs between the rows of a vmap"
        if obstacle is not None:
            raise failed(
                f"the values {', '.join(self.numbers)} can't be recorded"
                f" where {obstacle}. Record arrays in a call of their own, outside of"
                " the vmap"
            )
        # Tracing does not know the sizes of a vmap or mesh around it, so the shape of
        # an entry is checked only now.
        for number in self.arrays:
            name = self.fields[number].name
            shape = delivery.block(number).entry_shape
            known = self._shapes.setdefault(name, shape)
            if shape != known:
                raise failed(
                    f"the array {name!r} is recorded with the shape {shape},"
                    f" and its earlier entries have the shape {known}: the size of a"
                    " vmap or mesh has changed. Use another name or folder"
                )


class EntryBlock(NamedTuple):
    """Where a value lies in an entry of its array.

    A value of shape (3,) in shard_map over 4 devices, from device 2: the entry has the
    shape (4, 3), the corner is (2, 0), and the value's shape there (1, 3).

    Attributes:
        entry_shape: the shape of the whole entry.
        corner: where the value begins in it.
        shape: the value's own shape there.
    """

    entry_shape: Shape
    corner: Shape
    shape: Shape


@dataclass
class Events:
    """What a tap brought.

    Attributes:
        code: the call of the recorder, with its fields.
        time: when it was delivered, in seconds since 1970.
        values: one array for each field, with an axis for the events in front.
        current: `hc.current()` of the delivery.
    """

    code: Tapped
    time: float
    values: tuple[np.ndarray, ...]
    current: hc.typing.Current

    def __len__(self) -> int:
        """The number of events."""
        return len(self.values[0])

    def is_batched(self, number: int) -> bool:
        """Whether a value has the axis of a vmap."""
        for _, batched in self.current.transforms:
            if batched["batch_dims"][number] is not None:
                return True
        return False

    def tables(
        self, steps: np.ndarray, process: int | None
    ) -> Iterator[tuple[str, About, Columns]]:
        """The rows that this adds to each array, and to the table, which has no name.

        Args:
            steps: the numbers of the events, or of each row if the program gives them.
            process: this process, if the job has several.
        """
        for number in self.code.arrays:
            field = self.code.fields[number]
            (text,) = field.types().values()
            block = self.block(number)
            values = self.values[number].astype(field.dtype, copy=False)
            columns = {
                # Rows of an event have one step (`Tapped._refuse`).
                "step": steps[:: len(steps) // len(self)],
                "time": np.full(len(self), self.time),
                "at": np.tile(block.corner, (len(self), 1)),
                **columns_of("value", values.reshape(len(self), *block.shape)),
            }
            about = About(
                process=process or 0,
                type=text,
                whole=block.entry_shape,
                # In shard_map `where` may pick some shards: others may never come.
                sparse=self.current.index is None,
            )
            yield field.name, about, columns
        if self.code.columns:
            yield "", About(process or 0), self._columns(steps, process)

    def block(self, number: int) -> EntryBlock:
        """Where a value lies in an entry of its array."""
        current = self.current
        shape = self.values[number].shape[1:]
        if current.index is not None:  # on="shards": the compiler cut the value
            corner = tuple(part.start for part in current.index[number])
            return EntryBlock(self.code.fields[number].shape, corner, shape)
        # Each axis of the mesh is an axis of the entry, in front; a device has one
        # index of it.
        coords = current.mesh_coords.values()
        return EntryBlock(
            entry_shape=(*current.mesh_shape.values(), *shape),
            corner=(*coords, *[0] * len(shape)),
            shape=(*[1] * len(coords), *shape),
        )

    def _columns(self, steps: np.ndarray, process: int | None) -> Columns:
        """The rows of the table, those of an event together."""
        grid, indices = self._grid
        rows = len(self) * math.prod(grid)
        columns = {
            # One step for each event, or for each row already.
            "step": np.repeat(steps, rows // len(steps)),
            "time": np.full(rows, self.time),
        }
        if process is not None:
            columns["process"] = np.full(rows, process, np.int32)
        if self.current.mesh_coords:
            columns["device"] = np.full(rows, self.current.device.id, np.int32)
        for n, index in enumerate(indices):
            # Of nested vmaps the outermost is "row0".
            name = f"row{n}" if len(indices) > 1 else "row"
            columns[name] = np.tile(index, len(self))
        for number in self.code.columns:
            name = self.code.fields[number].name
            columns |= columns_of(name, self.rows_of(number))
        return columns

    def rows_of(self, number: int) -> np.ndarray:
        """The values of a field in the table, one for each row."""
        grid, _ = self._grid
        field = self.code.fields[number]
        value = self._spread[number].astype(field.dtype, copy=False)
        # A value that a vmap did not batch is repeated along its axis.
        repeated = np.broadcast_to(value, (len(self), *grid, *field.shape))
        return repeated.reshape(-1, *field.shape)

    @functools.cached_property
    def _spread(self) -> list[np.ndarray]:
        """The values with an axis for each vmap behind that of the events."""
        if self.current.rows is None:
            return with_all_axes(self.values, self.current.transforms, first=1)
        # `where` has left some rows of all vmaps together, along one axis.
        spread = []
        for number, value in enumerate(self.values):
            spread.append(value if self.is_batched(number) else value[:, None])
        return spread

    @functools.cached_property
    def _grid(self) -> tuple[Shape, list[np.ndarray]]:
        """(the sizes of the axes of vmaps, for each the index of each row of an event).

        vmaps over 2 and 3: (2, 3), [0 0 0 1 1 1] and [0 1 2 0 1 2].
        """
        if self.current.rows is not None:
            indices = [np.asarray(index, np.int64) for index in self.current.rows]
            count = len(indices[0]) if indices else 1
            return (count,), indices
        axes = slice(1, 1 + len(self.current.transforms))
        # A value that a vmap did not batch has the size 1 there.
        grid = np.broadcast_shapes(*[value.shape[axes] for value in self._spread])
        return grid, [index.ravel() for index in np.indices(grid)]
