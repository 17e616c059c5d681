"""Makes the calls of all devices of a program fail together.

The idea: after its call, each device gives a number: 0 if the call went well, else the
device's place in the program plus one. The maximum over all devices tells each of them
whether a call failed, and on which device: one small all-reduce, before any of them can
wait in a later collective for a device that failed. (across.py does the same for a call
that one process makes for all; there the text of the error goes through the reduction
too. Here several devices may fail at once, and the maximum of two texts is neither.)

Guarantees
  * A device whose call failed does not fail for XLA before the reduction, so nobody
    waits in it for ever. Results of failed calls are zeros, and no operation sees them:
    they pass through the verdict, which fails then.
  * All processes name the same device. The text of its error is fetched from the job's
    store (_job/failures.py), where the failing process put it before the reduction.

All devices must reach the call equally often. Inside a `lax.cond` whose condition
differs between devices, those that reach it wait for the others, as in a `psum`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._jax.types import Aval, Value
from hostcall._primitives.across import OUTCOME

_DIGITS = 10  # of a device's number, in the outcome's text


def share(
    program: _jax.Program,
    results: Sequence[Value],
    avals: Sequence[Aval],
    *,
    devices: int,
) -> tuple[Sequence[Value], Value]:
    """See `Reach`: each of these devices makes the call for itself."""
    del avals
    *results, outcome = results
    device = jax.ShapeDtypeStruct((), np.uint32)
    (number,) = _jax.lower_traced(
        program.ctx, _number, (device, OUTCOME), (_jax.partition_id(), outcome)
    )
    number = _jax.max_over_devices(program.ctx, number, device, devices)
    (verdict,) = _jax.lower_traced(program.ctx, _verdict, (device,), (number,))
    return results, verdict


def _number(device: jax.Array, outcome: jax.Array) -> list[jax.Array]:
    return [jnp.where(outcome[0] != 0, device + jnp.uint32(1), jnp.uint32(0))]


def _verdict(number: jax.Array) -> list[jax.Array]:
    """An outcome (native/plan/outcome.h) whose text is the device's number."""
    powers = np.array([10**i for i in range(_DIGITS)][::-1], np.uint32)
    digits = (number // powers) % np.uint32(10) + np.uint32(ord("0"))
    head = jnp.concatenate([(number != 0).astype(np.uint32)[None], digits])
    rest = jnp.zeros(OUTCOME.size - head.size, np.uint8)
    return [jnp.concatenate([head.astype(np.uint8), rest])]
