"""The results of a call that one process makes, in all processes of its program.

By the maximum over the devices, to which all but the caller's give zeros, of the bits
as integers: exact for every dtype (NaNs and -0.0 too), and in the memory of one value,
however many devices there are. How the call went comes along, so that all processes
fail if it did (native/plan/outcome.h).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._engine import targets

# As in native/plan/outcome.h.
_OUTCOME = jax.ShapeDtypeStruct((1024,), np.uint8)

# A reduction takes some 50 us to 1 ms however small it is, so what has up to so many
# bytes goes as one. To put more together would take longer than it saves.
_TOGETHER = 1 << 18


class Source:
    """The device whose results all others take.

    Attributes:
        number: its place among the devices of the program.
        devices: how many there are.
        tells: whether the call has its outcome as one more result.
        attributes: by which the program finds the call's plan.
    """

    def __init__(self, number: int, devices: int, tells: bool) -> None:
        self.number = number
        self.devices = devices
        self.tells = tells
        self.attributes: dict[str, np.uint64] = {}

    @property
    def more_avals(self) -> list[Any]:
        """The avals of the results that the call adds to the function's."""
        return [_jax.ShapedArray(_OUTCOME.shape, _OUTCOME.dtype)] * self.tells

    def share(
        self,
        ctx: Any,
        token: Any | None,
        results: Sequence[Any],
        avals: Sequence[Any],
        has_side_effect: bool,
    ) -> tuple[list[Any], Any | None]:
        """What all devices have in the place of each one's token and results, inside a
        region that is manual over all of them.
        """
        specs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        n = len(specs)
        given = [*specs, *[_OUTCOME] * self.tells]
        together = sum(spec.size * spec.dtype.itemsize for spec in given) <= _TOGETHER

        def masked(device: Any, *values: Any) -> list[Any]:
            here = device == self.number
            parts = [part for value in values[:n] for part in bits(value)]
            parts = [jnp.where(here, part, 0) for part in parts]
            for outcome in values[n:]:  # its first byte is anybody's
                parts.append(jnp.where(here | (jnp.arange(1024) == 0), outcome, 0))
            return [jnp.concatenate(list(map(_bytes, parts)))] if together else parts

        def back(*parts: Any) -> list[Any]:
            if together:
                parts = tuple(_split(parts[0], [x for s in given for x in bits_of(s)]))
            rest = iter(parts)
            return [from_bits(spec.dtype, rest) for spec in specs] + list(rest)

        with jax.enable_x64(True):  # else there are no integers of 64 bits
            device = jax.ShapeDtypeStruct((), np.uint32)
            shapes = jax.eval_shape(masked, device, *given)
            parts = _jax.lower_traced(
                ctx, masked, (device, *given), (_jax.partition_id(), *results)
            )
            parts = [
                _jax.max_over_devices(ctx, part, shape, self.devices)
                for part, shape in zip(parts, shapes, strict=True)
            ]
            values = _jax.lower_traced(ctx, back, shapes, parts)
        if not self.tells:
            return values, token
        return _jax.custom_call(
            ctx,
            targets.VERDICT_TARGET,
            token,
            [values[-1], *values[:-1]],
            [*self.more_avals, *avals],
            avals,
            returns_token=token is not None,
            has_side_effect=has_side_effect,
            attributes=self.attributes,
            aliases={1 + i: i for i in range(n)},
        )


def bits(x: Any) -> list[Any]:
    """Unsigned integers of whole bytes, which XLA can compare on every platform; of a
    complex array those of its two parts.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*bits(x.real), *bits(x.imag)]
    x = x.astype(_whole_bytes(x.dtype))
    return [jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")]


def bits_of(spec: Any) -> list[Any]:
    """Shapes and dtypes of what `bits` gives."""
    shapes: list[Any] = jax.eval_shape(bits, spec)
    return shapes


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


def _bytes(part: Any) -> Any:
    return jax.lax.bitcast_convert_type(part, np.uint8).ravel()


def _split(joined: Any, shapes: Sequence[Any]) -> Iterator[Any]:
    """The parts whose bytes were joined."""
    at = 0
    for part in shapes:
        size = part.dtype.itemsize
        end = at + part.size * size
        shape = part.shape if size == 1 else (*part.shape, size)
        yield jax.lax.bitcast_convert_type(joined[at:end].reshape(shape), part.dtype)
        at = end
