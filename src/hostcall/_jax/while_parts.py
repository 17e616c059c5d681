"""Loops as while loops: a scan becomes one, as JAX lowers it.

The while loop reads its row of the inputs in each step and writes that of the results,
and carries the number of its step, which a rewritten scan has as its first value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from hostcall._jax import jaxprs
from hostcall._jax import types as _t
from hostcall._jax.fragments import assigned, same_type, traced
from hostcall._jax.versions import changed, open_jaxpr


@dataclass(frozen=True)
class WhileLoop:
    """The parts of a while loop, which may have been a scan.

    Attributes:
        first: equations that come before it.
        cond, body: its jaxprs.
        cond_consts, body_consts: operands that the steps do not change.
        starts: what it carries at first.
        results: what it carries at last.
        carried: what it carries at the beginning of a step, in the body.
        length, is_reverse: of a scan; None: of a while loop.
        n_stacked: how many of the carried values are the results of a scan's steps.
    """

    first: list[_t.JaxprEquation]
    cond: _t.Jaxpr
    body: _t.Jaxpr
    cond_consts: list[_t.Atom]
    body_consts: list[_t.Atom]
    starts: list[_t.Atom]
    results: list[_t.Var]
    carried: list[_t.Var]
    length: int | None = None
    is_reverse: bool = False
    n_stacked: int = 0

    def turn(self, step: jax.Array) -> jax.Array:
        """How many steps were run before this one."""
        if step.ndim:  # of rows that run, all have the same number
            step = step.max()
        if self.is_reverse:
            assert self.length is not None, "only scans go backward"
            return self.length - 1 - step
        return step


def as_while(eqn: _t.JaxprEquation) -> WhileLoop:
    """The parts of a while loop, or of a scan that is made one."""
    return _of_scan(eqn) if eqn.primitive.name == "scan" else _of_while(eqn)


def _of_while(eqn: _t.JaxprEquation) -> WhileLoop:
    params = eqn.params
    n_cond = params["cond_nconsts"]
    n_body = params["body_nconsts"]
    return WhileLoop(
        first=[],
        cond=params["cond_jaxpr"],
        body=params["body_jaxpr"],
        cond_consts=eqn.invars[:n_cond],
        body_consts=eqn.invars[n_cond : n_cond + n_body],
        starts=eqn.invars[n_cond + n_body :],
        results=eqn.outvars,
        carried=open_jaxpr(params["body_jaxpr"]).invars[n_body:],
    )


def _of_scan(eqn: _t.JaxprEquation) -> WhileLoop:
    """A scan as a while loop; it carries the number of its step first.

        a step of the scan     consts, carry, rows of inputs -> carry, rows of results
        a step of the loop     consts, inputs, carry, stacks -> carry, stacks

    The stacks are the scan's results; they begin as zeros, and each step writes a row.
    """
    n_consts, n_carry = jaxprs.split_of(eqn)
    first_input = n_consts + n_carry
    length = eqn.params["length"]
    is_reverse = eqn.params["reverse"]
    step_jaxpr = eqn.params["jaxpr"]
    inner = open_jaxpr(step_jaxpr)
    carry = inner.invars[n_consts:first_input]
    step = carry[0]  # a rewritten loop carries its number in front (rewriting.py)
    inputs = [same_type(x) for x in eqn.invars[first_input:]]
    reading = _reading(step, inputs, inner.invars[first_input:])
    stacks = [same_type(x) for x in eqn.outvars[n_carry:]]
    writing, written = _writing(step, stacks, inner.outvars[n_carry:])
    testing, goes_on = _testing(step, length, is_reverse)
    first, empty_stacks = _empty(stacks)
    names = inner.debug_info.with_unknown_names()
    carried = [*carry, *stacks]
    cond = changed(
        step_jaxpr, invars=carried, outvars=goes_on, eqns=testing, debug_info=names
    )
    body = changed(
        step_jaxpr,
        invars=[*inner.invars[:n_consts], *inputs, *carried],
        outvars=[*inner.outvars[:n_carry], *written],
        eqns=[*reading, *inner.eqns, *writing],
        debug_info=names,
    )
    return WhileLoop(
        first=first,
        cond=cond,
        body=body,
        cond_consts=[],
        body_consts=[*eqn.invars[:n_consts], *eqn.invars[first_input:]],
        starts=[*eqn.invars[n_consts:first_input], *empty_stacks],
        results=eqn.outvars,
        carried=carried,
        length=length,
        is_reverse=is_reverse,
        n_stacked=len(stacks),
    )


def _reading(
    step: _t.Var, inputs: Sequence[_t.Var], rows: Sequence[_t.Var]
) -> list[_t.JaxprEquation]:
    """Equations that make `rows` of a step from all inputs."""

    def read(i: jax.Array, *inputs: jax.Array) -> list[jax.Array]:
        return [_row_of(array, i) for array in inputs]

    eqns, results = traced(read, [step, *inputs], is_apart=False)
    return assigned(eqns, results, rows)


def _writing(
    step: _t.Var, stacks: Sequence[_t.Var], rows: Sequence[_t.Atom]
) -> tuple[list[_t.JaxprEquation], list[_t.Atom]]:
    """Equations that write the results of a step, and the stacks after that."""

    def write(i: jax.Array, *stacks_and_rows: jax.Array) -> list[jax.Array]:
        before = stacks_and_rows[: len(stacks)]
        new_rows = stacks_and_rows[len(stacks) :]
        pairs = zip(before, new_rows, strict=True)
        return [_with_row(stack, i, row) for stack, row in pairs]

    return traced(write, [step, *stacks, *rows], is_apart=False)


def _empty(
    stacks: Sequence[_t.Var],
) -> tuple[list[_t.JaxprEquation], list[_t.Atom]]:
    """Equations that make the stacks at first, and these."""

    def zeros() -> list[jax.Array]:
        return [jnp.zeros(stack.aval.shape, stack.aval.dtype) for stack in stacks]

    return traced(zeros, [], is_apart=False)


def _testing(
    step: _t.Var, length: int, is_reverse: bool
) -> tuple[list[_t.JaxprEquation], list[_t.Atom]]:
    """Equations that say whether there is a step left, and their result."""

    def goes_on(i: jax.Array) -> list[jax.Array]:
        return [i >= 0 if is_reverse else i < length]

    return traced(goes_on, [step], is_apart=False)


def _row_of(array: jax.Array, i: jax.Array) -> jax.Array:
    # A negative index is no row, so XLA need not compare it.
    shape = array.shape[1:]
    row = jax.lax.dynamic_slice(
        array,
        start_indices=_start_of_row(i, array.ndim),
        slice_sizes=(1, *shape),
        allow_negative_indices=False,
    )
    return row.reshape(shape)


def _with_row(array: jax.Array, i: jax.Array, row: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(
        array,
        update=row.reshape(1, *row.shape),
        start_indices=_start_of_row(i, array.ndim),
        allow_negative_indices=False,
    )


def _start_of_row(i: jax.Array, axes: int) -> list[jax.Array]:
    """The index of the first element of a row."""
    return [i] + [jnp.zeros_like(i)] * (axes - 1)
