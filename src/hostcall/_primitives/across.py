"""Brings the results of a call that one process makes to all processes.

The idea: all devices of the program run the same collective, an all-reduce by maximum
over the bits of the results, read as unsigned integers. The calling device gives its
results and every other device gives zeros. The maximum of one number and zeros is that
number, so the reduction is a broadcast. (XLA's CPU backend has no broadcast.)

Guarantees
  * Exact for every dtype, NaN payloads and -0.0 included: only bits are compared.
  * A device needs the memory of one value, however many devices there are.
  * A failure reaches all processes. The caller can't raise before the collective, since
    the others would wait in it for ever. So the call gives zeros and one more result,
    its outcome (native/plan/outcome.h), which goes through the same reduction. (A call
    that works in place in GPU memory has no outcome: `tells` is False.)

Steps, inside a region that is manual over all devices
  1. Each device comes to the call; the function runs in the caller's process only.
  2. `masked`: each result as unsigned integers, with zeros on all devices but the
     caller; small results are joined into one array of bytes.
  3. The all-reduce.
  4. `back`: the arrays again, and the outcome.
  5. A second custom call reads the outcome. It fails the program on every device, or
     passes the results on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from hostcall import _jax
from hostcall._jax.types import Aval, Value

# As in native/plan/outcome.h.
OUTCOME = jax.ShapeDtypeStruct((1024,), np.uint8)
OUTCOME_AVAL = _jax.ShapedArray(OUTCOME.shape, OUTCOME.dtype)

# A reduction takes some 50 us to 1 ms however small it is, so results of up to this
# many bytes together go in one. Joining larger ones would take longer than it saves.
_TOGETHER = 1 << 18


class Reach(NamedTuple):
    """How the outcome of a call reaches all devices of its program.

    Attributes:
        tells: whether the call has its outcome as one more result.
        share: (program, each device's results of the call, the avals of the function's)
            -> (the results that the device takes, an outcome that says to all devices
            whether the program fails; None if the call does not tell). It runs inside
            a region that is manual over all devices.
    """

    tells: bool
    share: Callable[
        [_jax.Program, Sequence[Value], Sequence[Aval]],
        tuple[Sequence[Value], Value | None],
    ]


def share(
    program: _jax.Program,
    results: Sequence[Value],
    avals: Sequence[Aval],
    *,
    number: int,
    devices: int,
    tells: bool,
) -> tuple[Sequence[Value], Value | None]:
    """See `Reach`: all of these devices take the results of that with this number."""
    specs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    n = len(specs)
    given = [*specs, *[OUTCOME] * tells]
    together = sum(spec.size * spec.dtype.itemsize for spec in given) <= _TOGETHER

    def masked(device: jax.Array, *values: jax.Array) -> list[jax.Array]:
        here = device == number
        parts = [part for value in values[:n] for part in bits(value)]
        parts = [jnp.where(here, part, 0) for part in parts]
        # Byte 0 of the outcome says that a device failed, and every device may
        # set it. The text behind it is the caller's.
        for outcome in values[n:]:
            parts.append(jnp.where(here | (jnp.arange(1024) == 0), outcome, 0))
        return [jnp.concatenate(list(map(_bytes, parts)))] if together else parts

    def back(*parts: jax.Array) -> list[jax.Array]:
        if together:
            parts = tuple(_split(parts[0], [x for s in given for x in bits_of(s)]))
        rest = iter(parts)
        return [from_bits(spec.dtype, rest) for spec in specs] + list(rest)

    with jax.enable_x64(True):  # without it JAX has no 64-bit integers
        device = jax.ShapeDtypeStruct((), np.uint32)
        shapes = jax.eval_shape(masked, device, *given)
        parts = _jax.lower_traced(
            program.ctx, masked, (device, *given), (_jax.partition_id(), *results)
        )
        parts = [
            _jax.max_over_devices(program.ctx, part, shape, devices)
            for part, shape in zip(parts, shapes, strict=True)
        ]
        values = _jax.lower_traced(program.ctx, back, shapes, parts)
    return values[:n], values[n] if tells else None


def bits(x: jax.Array) -> list[jax.Array]:
    """`x` as unsigned integers of whole bytes, which XLA can compare on every platform.

    Returns one array; for a complex `x` two, its real and its imaginary part.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*bits(x.real), *bits(x.imag)]
    x = x.astype(_whole_bytes(x.dtype))
    return [jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")]


def bits_of(spec: jax.ShapeDtypeStruct) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the arrays that `bits` returns."""
    shapes: list[jax.ShapeDtypeStruct] = jax.eval_shape(bits, spec)
    return shapes


def from_bits(dtype: np.dtype, parts: Iterator[jax.Array]) -> jax.Array:
    """The inverse of `bits`: takes one array (or two) from the iterator `parts`."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = np.finfo(dtype).dtype
        return jax.lax.complex(from_bits(part, parts), from_bits(part, parts))
    values = jax.lax.bitcast_convert_type(next(parts), _whole_bytes(dtype))
    return values.astype(dtype)


def _whole_bytes(dtype: np.dtype) -> npt.DTypeLike:
    """The dtype, or for one narrower than a byte, a wider dtype with all its values."""
    if dtype == np.bool_:
        return np.uint8
    if jnp.issubdtype(dtype, jnp.floating):
        return dtype if jnp.finfo(dtype).bits >= 8 else np.float32
    return dtype if jnp.iinfo(dtype).bits >= 8 else np.int8


def _bytes(part: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(part, np.uint8).ravel()


def _split(
    joined: jax.Array, shapes: Sequence[jax.ShapeDtypeStruct]
) -> Iterator[jax.Array]:
    """Takes the parts out of the array that holds their bytes one after the other."""
    at = 0
    for part in shapes:
        size = part.dtype.itemsize
        end = at + part.size * size
        shape = part.shape if size == 1 else (*part.shape, size)
        yield jax.lax.bitcast_convert_type(joined[at:end].reshape(shape), part.dtype)
        at = end
