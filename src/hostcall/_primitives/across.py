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

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._engine import targets

# As in native/plan/outcome.h.
OUTCOME = jax.ShapeDtypeStruct((1024,), np.uint8)

# A reduction takes some 50 us to 1 ms however small it is, so results of up to this
# many bytes together go in one. Joining larger ones would take longer than it saves.
_TOGETHER = 1 << 18


class Source:
    """The device whose results all others take.

    Attributes:
        number: its index among the devices of the program.
        devices: the number of devices of the program.
        tells: whether the call has its outcome as one more result.
        attributes: the attributes by which the program finds the call's plan.
    """

    def __init__(self, number: int, devices: int, tells: bool) -> None:
        self.number = number
        self.devices = devices
        self.tells = tells
        self.attributes: dict[str, np.uint64] = {}

    @property
    def more_avals(self) -> list[Any]:
        """The avals of the results that the call has besides the function's."""
        return [_jax.ShapedArray(OUTCOME.shape, OUTCOME.dtype)] * self.tells

    def share(
        self,
        program: _jax.Program,
        token: Any | None,
        results: Sequence[Any],
        avals: Sequence[Any],
        has_side_effect: bool,
    ) -> tuple[list[Any], Any | None]:
        """Gives every device the source's results, and a token that waits for them.

        Runs inside a region that is manual over all devices, on each device's own
        token and results of the call.
        """
        specs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        n = len(specs)
        given = [*specs, *[OUTCOME] * self.tells]
        together = sum(spec.size * spec.dtype.itemsize for spec in given) <= _TOGETHER

        def masked(device: Any, *values: Any) -> list[Any]:
            here = device == self.number
            parts = [part for value in values[:n] for part in bits(value)]
            parts = [jnp.where(here, part, 0) for part in parts]
            # Byte 0 of the outcome says that a device failed, and every device may
            # set it. The text behind it is the caller's.
            for outcome in values[n:]:
                parts.append(jnp.where(here | (jnp.arange(1024) == 0), outcome, 0))
            return [jnp.concatenate(list(map(_bytes, parts)))] if together else parts

        def back(*parts: Any) -> list[Any]:
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
                _jax.max_over_devices(program.ctx, part, shape, self.devices)
                for part, shape in zip(parts, shapes, strict=True)
            ]
            values = _jax.lower_traced(program.ctx, back, shapes, parts)
        if not self.tells:
            return values, token
        return judged(
            program, token, values[-1], values[:-1], avals, has_side_effect, self
        )


def judged(
    program: _jax.Program,
    token: Any | None,
    outcome: Any,
    results: Sequence[Any],
    avals: Sequence[Any],
    has_side_effect: bool,
    source: Any,
) -> tuple[list[Any], Any | None]:
    """Passes results of these avals on, or fails on this device if the outcome says so.

    `source` has the attributes by which the program finds the call's plan.
    """
    return _jax.custom_call(
        program,
        targets.VERDICT_TARGET,
        token,
        [outcome, *results],
        [_jax.ShapedArray(OUTCOME.shape, OUTCOME.dtype), *avals],
        avals,
        returns_token=token is not None,
        has_side_effect=has_side_effect,
        attributes=source.attributes,
        aliases={1 + i: i for i in range(len(avals))},
    )


def bits(x: Any) -> list[Any]:
    """`x` as unsigned integers of whole bytes, which XLA can compare on every platform.

    Returns one array; for a complex `x` two, its real and its imaginary part.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*bits(x.real), *bits(x.imag)]
    x = x.astype(_whole_bytes(x.dtype))
    return [jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")]


def bits_of(spec: Any) -> list[Any]:
    """Shapes and dtypes of the arrays that `bits` returns."""
    shapes: list[Any] = jax.eval_shape(bits, spec)
    return shapes


def from_bits(dtype: Any, parts: Any) -> Any:
    """The inverse of `bits`: takes one array (or two) from the iterator `parts`."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = np.finfo(dtype).dtype
        return jax.lax.complex(from_bits(part, parts), from_bits(part, parts))
    values = jax.lax.bitcast_convert_type(next(parts), _whole_bytes(dtype))
    return values.astype(dtype)


def _whole_bytes(dtype: Any) -> Any:
    """The dtype, or for one narrower than a byte, a wider dtype with all its values."""
    if dtype == np.bool_:
        return np.uint8
    if jnp.issubdtype(dtype, jnp.floating):
        return dtype if jnp.finfo(dtype).bits >= 8 else np.float32
    return dtype if jnp.iinfo(dtype).bits >= 8 else np.int8


def _bytes(part: Any) -> Any:
    return jax.lax.bitcast_convert_type(part, np.uint8).ravel()


def _split(joined: Any, shapes: Sequence[Any]) -> Iterator[Any]:
    """Takes the parts out of the array that holds their bytes one after the other."""
    at = 0
    for part in shapes:
        size = part.dtype.itemsize
        end = at + part.size * size
        shape = part.shape if size == 1 else (*part.shape, size)
        yield jax.lax.bitcast_convert_type(joined[at:end].reshape(shape), part.dtype)
        at = end
