"""What one call of a recorder stores: its values, and the types of their columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcall.errors import SpecError
from hostcall.tools._recorder.arrow import Columns
from hostcall.tools._values import need

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
        is_array: whether it is stored as an array (arrays.py), and not in a column.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    is_array: bool

    def types(self) -> dict[str, str]:
        """The type of each column or array as text, such as "float32[3]"."""
        if self.is_array:
            return {self.name: f"an array of {text_of(self.dtype, self.shape)}"}
        parts = columns_of(self.name, np.empty(0, self.dtype)).items()
        return {name: text_of(part.dtype, self.shape) for name, part in parts}


def columns_of(name: str, values: np.ndarray) -> Columns:
    """The columns with these values, of shape (rows, *shape)."""
    if values.dtype.kind != "c":
        return {name: values}
    return {f"{name}.real": values.real, f"{name}.imag": values.imag}


def text_of(dtype: np.dtype, shape: Sequence[int]) -> str:
    return f"{dtype.name}[{','.join(map(str, shape))}]" if shape else dtype.name


def fields_of(values: dict[str, Any], in_parts: bool) -> dict[Field, jax.Array]:
    """The fields of a call with their arrays. Pytrees are flattened: `{"w": x}` to
    "grads.w".

    Args:
        values: the keywords.
        in_parts: whether devices or processes tap parts of them.
    """
    found = {}
    for keyword, tree in values.items():  # JAX would sort them
        for path, leaf in jax.tree_util.tree_flatten_with_path({keyword: tree})[0]:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            array = _array(name, leaf)
            is_array = array.size > MOST_IN_A_COLUMN or (in_parts and array.ndim > 0)
            dtype = np.dtype(np.int64) if name == "step" else _stored(array.dtype)
            found[Field(name, array.shape, dtype, is_array)] = array
    return found


def _array(name: str, leaf: object) -> jax.Array:
    if ADDED.fullmatch(name) or "/" in name or name.startswith("."):
        raise wrong(
            f"a recorder can't store a value under the name {name!r}. It adds the"
            " columns time, process, device and row itself, and names of arrays are"
            " names of folders"
        )
    try:
        array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    except TypeError as error:
        raise wrong(
            f"a recorder stores numbers and arrays, and {name}= is {leaf!r},"
            f" {type(leaf).__name__}"
        ) from error
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise wrong(f"{name}= is a PRNG key. Record jax.random.key_data(key)")
    if not array.size:
        raise wrong(
            f"{name}= has the shape {array.shape}, so there is nothing to record"
        )
    is_step = array.ndim == 0 and jnp.issubdtype(array.dtype, jnp.integer)
    wanted = "step= of a recorder should be an integer scalar"
    need(name != "step" or is_step, wanted, array, "hc-record")
    return array


def wrong(what: str) -> SpecError:
    return SpecError(f"hostcall: {what}", code="hc-record")


def _stored(jax_dtype: np.dtype) -> np.dtype:
    """The NumPy dtype that holds every value of a dtype of JAX's exactly."""
    dtype = np.dtype(jax_dtype)
    if dtype.isbuiltin == 1:
        return dtype
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(np.float32)  # bfloat16 and the eight-bit floats
    return np.dtype(np.uint8 if dtype.name.startswith("u") else np.int8)
