"""Which equations the host may run again, and how it runs the steps of a loop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from hostcall._jax import JaxprEquation, jaxprs
from hostcall._jax.places import EqnPath, within_shard

Value: TypeAlias = Any  # of a variable: an array, a number, or typed keys

COLLECTIVES = {
    *("psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "all_to_all"),
    *("all_gather", "all_gather_invariant", "reduce_scatter", "ragged_all_to_all"),
    *("all_gather_reduced", "unreduced_psum", "unreduced_reduce_scatter"),
}
# Equations that can't be run again alone, beside those with effects.
_ONCE = COLLECTIVES | {
    *("axis_index", "pvary", "pcast", "pbroadcast", "shard_map", "xla_pmap"),
    *("sharding_constraint", "mesh_cast", "reshard", "device_put", "copy_to_host"),
    *("pallas_call", "ffi_call", "custom_partitioning", "tpu_custom_call"),
    *("pure_callback", "io_callback", "debug_callback"),
    *("rng_bit_generator", "rng_uniform"),
}
# Equations that move elements, or add them up: an element of a result that depends on a
# NaN is NaN.


def runs_again(eqn: JaxprEquation) -> bool:
    """Whether the host can run an equation again, and nobody notices."""
    return not eqn.effects and not any(
        inner.primitive.name in _ONCE
        or jaxprs.is_host_call(inner)
        or jaxprs.names_shardings(inner)
        for inner in jaxprs.within(eqn)
    )


def devices_may_part(inside: EqnPath | None) -> bool:
    """Whether devices may reach what is inside of this equation separately, in their
    own branch or step.

    What fails there fails one device. Others would wait for it at the next check.
    """
    around = inside.eqns if inside else ()
    if not any(eqn.primitive.name == "shard_map" for eqn in around):
        return False
    return any(
        eqn.primitive.name in ("while", "cond")
        and COLLECTIVES.isdisjoint(e.primitive.name for e in jaxprs.within(eqn))
        for eqn in within_shard(around)
    )


# --- Loops ----------------------------------------------------------------------------


# For each step its number, what it gets, and what it makes.
Steps: TypeAlias = Iterator[tuple[int, list[Value], list[Value]]]


def scan_steps(eqn: JaxprEquation, operands: list[Value], first: int) -> Steps:
    n_consts, n_carry = jaxprs.split_of(eqn)
    at = n_consts + n_carry
    length = eqn.params["length"]
    consts = operands[:n_consts]
    carry = operands[n_consts:at]
    xs = operands[at:]
    for turn in range(first, length):
        i = length - 1 - turn if eqn.params["reverse"] else turn
        values = [*consts, *carry, *(x[i] for x in xs)]
        new = jaxprs.run_jaxpr(eqn.params["jaxpr"], values)
        yield i, values, new
        carry = new[:n_carry]


def while_steps(eqn: JaxprEquation, operands: list[Value], first: int) -> Steps:
    n_cond = eqn.params["cond_nconsts"]
    n_body = eqn.params["body_nconsts"]
    tests = operands[:n_cond]
    consts = operands[n_cond : n_cond + n_body]
    carry = operands[n_cond + n_body :]
    for step in itertools.count(first):
        (goes_on,) = jaxprs.run_jaxpr(eqn.params["cond_jaxpr"], [*tests, *carry])
        if not np.any(goes_on):
            return
        values = [*consts, *carry]
        new = jaxprs.run_jaxpr(eqn.params["body_jaxpr"], values)
        if goes_on.shape:  # rows that have stopped stay as they are
            pairs = zip(new, carry, strict=True)
            new = [jnp.where(of_rows(goes_on, a), a, b) for a, b in pairs]
        yield step, values, new
        carry = new


def of_rows(flags: jax.Array, x: jax.Array) -> jax.Array:
    """Flags of the rows of x, in a shape that broadcasts to its elements."""
    return flags.reshape(flags.shape + (1,) * (x.ndim - flags.ndim))
