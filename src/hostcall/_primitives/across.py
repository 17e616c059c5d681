"""The results of a call that one process makes, in all processes of its program.

By a sum over the devices, to which all but the caller's give zeros, of the bits as
integers: exact for every dtype (NaNs and -0.0 too), and in the memory of one value,
however many devices there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax


class Source:
    """The device whose results all others take.

    Attributes:
        number: its place among the devices of the program.
        devices: how many there are.
    """

    def __init__(self, number: int, devices: int) -> None:
        self.number = number
        self.devices = devices

    def share(self, ctx: Any, results: Sequence[Any], avals: Sequence[Any]) -> Any:
        """The results on all devices, from what each has in a manual region."""

        avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]

        def masked(device: Any, *values: Any) -> list[Any]:
            here = device == self.number
            return [jnp.where(here, part, 0) for x in values for part in bits(x)]

        def back(*parts: Any) -> list[Any]:
            rest = iter(parts)
            return [from_bits(aval.dtype, rest) for aval in avals]

        with jax.enable_x64(True):  # else there are no integers of 64 bits
            device = jax.ShapeDtypeStruct((), np.uint32)
            shapes = jax.eval_shape(masked, device, *avals)
            parts = _jax.lower_traced(
                ctx, masked, (device, *avals), (_jax.partition_id(), *results)
            )
            parts = [
                _jax.sum_over_devices(ctx, part, shape, self.devices)
                for part, shape in zip(parts, shapes, strict=True)
            ]
            return _jax.lower_traced(ctx, back, shapes, parts)


def bits(x: Any) -> list[Any]:
    """Unsigned integers of whole bytes, which XLA can add up on every platform; of a
    complex array those of its two parts.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*bits(x.real), *bits(x.imag)]
    x = x.astype(_whole_bytes(x.dtype))
    return [jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")]


def from_bits(dtype: Any, parts: Any) -> Any:
    """The array of this dtype that `bits` made the next of these parts of."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = np.finfo(dtype).dtype
        return jax.lax.complex(from_bits(part, parts), from_bits(part, parts))
    values = jax.lax.bitcast_convert_type(next(parts), _whole_bytes(dtype))
    return values.astype(dtype)


def _whole_bytes(dtype: Any) -> Any:
    """The dtype, or one of whole bytes that has all its values."""
    if dtype == np.bool_:
        return np.uint8
    if jnp.issubdtype(dtype, jnp.floating):
        return dtype if jnp.finfo(dtype).bits >= 8 else np.float32
    return dtype if jnp.iinfo(dtype).bits >= 8 else np.int8
