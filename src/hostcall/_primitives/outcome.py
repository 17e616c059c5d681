"""Brings what a call gave to all devices of its program: results, or that it failed.

Two cases, both in a program over several processes, inside a region that is manual over
all devices. Each needs one reduction: a maximum over all devices.

One process makes the call for all
    The calling device gives the bits of its results, read as unsigned integers, and
    every other device gives zeros. The maximum of one number and zeros is that number,
    so the reduction is a broadcast. (XLA's CPU backend has no broadcast.) It is exact
    for every dtype, NaN payloads and -0.0 included, and a device needs the memory of
    one value, however many devices there are.

    A failure takes the same way. The caller can't raise before the reduction, since the
    others would wait in it for ever. So the call gives zeros and one more result, its
    outcome (native/plan/outcome.h): whether it failed, and the text of the error. (A
    call that works in place in GPU memory has no outcome: `returns_outcome` is False.)

Each device makes its own call, and all fail together
    Each device gives a number: 0 if its call went well, else its place in the program
    plus one. So all learn whether a call failed, and on which device, before one of
    them waits for that device in a later collective. Several may fail at once, and the
    maximum of two texts is neither: the text of the error goes through the job's store
    (_job/after_failure.py), where the failing process puts it before the reduction.

    All devices must reach the call equally often. Inside a `lax.cond` whose condition
    differs between devices, those that reach it wait for the others, as in a `psum`.

In both, a second custom call, the verdict, then reads the outcome. It fails the program
on every device, or passes the results on. So no operation sees the zeros that stand for
the results of a failed call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from hostcall import _jax
from hostcall._engine.placement import Reach
from hostcall._jax.types import Aval, Value

# As in native/plan/outcome.h.
OUTCOME = jax.ShapeDtypeStruct((1024,), np.uint8)
OUTCOME_AVAL = _jax.ShapedArray(OUTCOME.shape, OUTCOME.dtype)

# A reduction takes some 50 us to 1 ms however small it is, so results of up to this
# many bytes together go in one. Joining larger ones would take longer than it saves.
_TOGETHER = 1 << 18

_DIGITS = 10  # of a device's number, in the outcome's text
_DEVICE = jax.ShapeDtypeStruct((), np.uint32)


def share(
    reach: Reach,
    program: _jax.Program,
    results: Sequence[Value],
    avals: Sequence[Aval],
) -> tuple[Sequence[Value], Value | None]:
    """Emits the reduction.

    Args:
        reach: how the outcome reaches all devices.
        program: the program.
        results: each device's results of the call.
        avals: those of the function's results.

    Returns:
        (the results that the device takes, an outcome that says to all devices whether
        the program fails; None if the call does not tell).
    """
    if reach.caller is not None:
        return _broadcast(reach, program, results, avals)
    assert reach.returns_outcome, "each device's call has an outcome of its own"
    *results, outcome = results
    return results, _numbered(reach, program, outcome)


def _numbered(reach: Reach, program: _jax.Program, outcome: Value) -> Value:
    """The outcome of all devices together; its text is the number of a failed one."""
    ctx = program.ctx
    device = _jax.partition_id()
    (number,) = _jax.lower_traced(ctx, _number, (_DEVICE, OUTCOME), (device, outcome))
    # Of several that failed, the one with the largest number.
    number = _jax.max_over_devices(ctx, number, reach.devices)
    (verdict,) = _jax.lower_traced(ctx, _verdict, (_DEVICE,), (number,))
    return verdict


def _broadcast(
    reach: Reach, program: _jax.Program, results: Sequence[Value], avals: Sequence[Aval]
) -> tuple[Sequence[Value], Value | None]:
    """The caller's results, and the outcome if there is one, on all devices.

    Three steps: each device makes unsigned integers of its values, zeros if it is not
    the caller; their maximum over the devices; values again. With results (f32[2],
    bool[]) and an outcome, that are u32[2], u8[] and u8[1024], which are so small that
    one u8[1033] goes through the reduction.
    """
    specs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    count = len(specs)
    ctx = program.ctx
    in_specs = [*specs]
    if reach.returns_outcome:
        in_specs.append(OUTCOME)
    assert len(results) == len(in_specs), "the call returns what its outcome says"
    size = sum(spec.size * spec.dtype.itemsize for spec in in_specs)
    joins = size <= _TOGETHER

    def masked(device: jax.Array, *values: jax.Array) -> list[jax.Array]:
        is_caller = device == reach.caller
        arrays = [
            jnp.where(is_caller, array, 0)
            for value in values[:count]
            for array in bits(value)
        ]
        # Byte 0 of the outcome says that a device failed, and every device may set it.
        # The text behind it is the caller's.
        for outcome in values[count:]:
            is_taken = is_caller | (jnp.arange(OUTCOME.size) == 0)
            arrays.append(jnp.where(is_taken, outcome, 0))
        return [jnp.concatenate(list(map(_bytes, arrays)))] if joins else arrays

    def back(*arrays: jax.Array) -> list[jax.Array]:
        if joins:
            shapes = jax.eval_shape(_all_bits, in_specs)
            arrays = tuple(_split(arrays[0], shapes))
        remaining = iter(arrays)
        values = [from_bits(spec.dtype, remaining) for spec in specs]
        return [*values, *remaining]  # the outcome is of bytes already

    masked_specs = (_DEVICE, *in_specs)
    with jax.enable_x64(True):  # without it JAX has no 64-bit integers
        shapes = jax.eval_shape(masked, *masked_specs)
        values = (_jax.partition_id(), *results)
        arrays = _jax.lower_traced(ctx, masked, masked_specs, values)
        maxima = [_jax.max_over_devices(ctx, x, reach.devices) for x in arrays]
        taken = _jax.lower_traced(ctx, back, shapes, maxima)
    outcome = taken[count] if reach.returns_outcome else None
    return taken[:count], outcome


def _number(device: jax.Array, outcome: jax.Array) -> list[jax.Array]:
    """The device's number plus one if its call failed; else 0."""
    return [jnp.where(outcome[0] != 0, device + jnp.uint32(1), jnp.uint32(0))]


def _verdict(number: jax.Array) -> list[jax.Array]:
    """An outcome (native/plan/outcome.h) whose text is the device's number."""
    powers = np.array([10**i for i in range(_DIGITS)][::-1], np.uint32)
    digits = (number // powers) % np.uint32(10) + np.uint32(ord("0"))
    head = jnp.concatenate([(number != 0).astype(np.uint32)[None], digits])
    rest = jnp.zeros(OUTCOME.size - head.size, np.uint8)
    return [jnp.concatenate([head.astype(np.uint8), rest])]


# --- Values as bits -------------------------------------------------------------------


def bits(x: jax.Array) -> list[jax.Array]:
    """`x` as unsigned integers of whole bytes, which XLA can compare on every platform.

    Returns one array; for a complex `x` two, its real and its imaginary part.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*bits(x.real), *bits(x.imag)]
    x = x.astype(_whole_bytes(x.dtype))
    return [jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")]


def _all_bits(values: Sequence[jax.Array]) -> list[jax.Array]:
    return [array for value in values for array in bits(value)]


def from_bits(dtype: np.dtype, arrays: Iterator[jax.Array]) -> jax.Array:
    """The inverse of `bits`: takes one array (or two) from the iterator `arrays`."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        real_dtype = np.finfo(dtype).dtype
        real = from_bits(real_dtype, arrays)
        imaginary = from_bits(real_dtype, arrays)
        return jax.lax.complex(real, imaginary)
    values = jax.lax.bitcast_convert_type(next(arrays), _whole_bytes(dtype))
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
    start = 0
    for part in shapes:
        itemsize = part.dtype.itemsize
        end = start + part.size * itemsize
        # To make wider elements, JAX takes their bytes as one more axis behind.
        of_bytes = part.shape if itemsize == 1 else (*part.shape, itemsize)
        joined_bytes = joined[start:end].reshape(of_bytes)
        yield jax.lax.bitcast_convert_type(joined_bytes, part.dtype)
        start = end
