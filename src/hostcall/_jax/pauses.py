"""Lets a loop pause between its steps.

What a loop carries is needed from time to time: when something has happened in a step,
and once in so many steps. A call inside of the loop would cost each step more than many
steps do: XLA compiles a small loop into one function, and changes what is carried in
place, but not where a call may need it. So the loop becomes two:

    outer:  while the loop goes on:
                inner:  while it goes on, nothing has happened, and it is not yet time:
                            a step
                the pause, which gets what was carried at the last one, and what is now

The inner one has the steps as they are, and one more test. The outer one has the calls,
and the copies of what was carried at the last pause.

A scan becomes a while loop which reads its row of the inputs and writes that of the
results, as JAX lowers it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hostcall._jax import jaxprs
from hostcall._jax import types as _t
from hostcall._jax.fragments import assigned, same_type, traced
from hostcall._jax.versions import changed, open_jaxpr

_while_p = jax.lax.while_p


class Pausing(NamedTuple):
    """What is known in a pause of a loop.

    Attributes:
        turns: how many steps were run before the last pause, and are now.
        at_last_pause: what the loop carried at the last pause.
        now: what it carries now.
        stacked: the results of a scan's steps; rows of steps to come are zeros.
        states: the values of `Pause.states`.
        outer: those of `Pause.outer`.
    """

    turns: tuple[jax.Array, jax.Array]
    at_last_pause: list[jax.Array]
    now: list[jax.Array]
    stacked: list[jax.Array]
    states: list[jax.Array]
    outer: list[jax.Array]


class Pause(NamedTuple):
    """How a loop pauses.

    Attributes:
        fn: what is done then; it returns new values for `states`.
        is_time: whether the loop pauses after a step, by what it keeps then. The loop's
            condition asks this, so a step computes nothing for it.
        every: the most steps between two pauses.
        states: what the loop keeps, by the variables at the beginning of a step.
        outer: variables of the level around that `fn` needs.
    """

    fn: Callable[[Pausing], Sequence[jax.Array]]
    is_time: Callable[[Sequence[jax.Array]], jax.Array]
    every: int
    states: Sequence[_t.Var]
    outer: Sequence[_t.Var]


def can_pause(eqn: _t.JaxprEquation) -> bool:
    """Whether a loop can be made of two: what it gets and carries are arrays or keys,
    and what its steps stack are arrays, which begin as zeros.
    """
    n_carry = jaxprs.split_of(eqn)[1]
    stacked = eqn.outvars[n_carry:]
    return all(map(_is_array_or_key, eqn.invars)) and all(
        _is_array_or_key(x) and (jaxprs.is_array(x) or x not in stacked)
        for x in eqn.outvars
    )


def _is_array_or_key(atom: _t.Atom) -> bool:
    aval = atom.aval
    is_shaped = isinstance(aval, jax.core.ShapedArray)
    is_key = is_shaped and jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)
    return is_key or (is_shaped and jaxprs.is_array(atom))


@dataclass
class _While:
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


def _of_while(eqn: _t.JaxprEquation) -> _While:
    params = eqn.params
    n_cond = params["cond_nconsts"]
    n_body = params["body_nconsts"]
    return _While(
        first=[],
        cond=params["cond_jaxpr"],
        body=params["body_jaxpr"],
        cond_consts=eqn.invars[:n_cond],
        body_consts=eqn.invars[n_cond : n_cond + n_body],
        starts=eqn.invars[n_cond + n_body :],
        results=eqn.outvars,
        carried=open_jaxpr(params["body_jaxpr"]).invars[n_body:],
    )


def _of_scan(eqn: _t.JaxprEquation) -> _While:
    """A scan as a while loop; it carries the number of its step first."""
    n_consts, n_carry = jaxprs.split_of(eqn)
    length = eqn.params["length"]
    body = eqn.params["jaxpr"]
    inner = open_jaxpr(body)
    consts = eqn.invars[:n_consts]
    xs = eqn.invars[n_consts + n_carry :]
    carried = inner.invars[n_consts : n_consts + n_carry]
    step = carried[0]
    rows = inner.invars[n_consts + n_carry :]
    stacked_inputs = [same_type(x) for x in xs]

    def read(i: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        return [_row_of(x, i) for x in arrays]

    reading = assigned(*traced(read, [step, *stacked_inputs], is_apart=False), rows)

    row_results = inner.outvars[n_carry:]
    stacks = eqn.outvars[n_carry:]
    unwritten = [same_type(x) for x in stacks]

    def write(i: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        pairs = zip(arrays[: len(stacks)], arrays[len(stacks) :], strict=True)
        return [_with_row(old, i, row) for old, row in pairs]

    writing, written = traced(write, [step, *unwritten, *row_results], is_apart=False)

    def empty() -> list[jax.Array]:
        return [jnp.zeros(x.aval.shape, x.aval.dtype) for x in stacks]

    first, empties = traced(empty, [], is_apart=False)

    def goes_on(i: jax.Array) -> list[jax.Array]:
        return [i >= 0 if eqn.params["reverse"] else i < length]

    testing, test = traced(goes_on, [step], is_apart=False)
    names = inner.debug_info.with_unknown_names()
    return _While(
        first=first,
        cond=changed(
            body,
            invars=[*carried, *unwritten],
            outvars=test,
            eqns=testing,
            debug_info=names,
        ),
        body=changed(
            body,
            invars=[*inner.invars[:n_consts], *stacked_inputs, *carried, *unwritten],
            outvars=[*inner.outvars[:n_carry], *written],
            eqns=[*reading, *inner.eqns, *writing],
            debug_info=names,
        ),
        cond_consts=[],
        body_consts=[*consts, *xs],
        starts=[*eqn.invars[n_consts : n_consts + n_carry], *empties],
        results=eqn.outvars,
        carried=[*carried, *unwritten],
        length=length,
        is_reverse=eqn.params["reverse"],
        n_stacked=len(stacks),
    )


def _row_of(x: jax.Array, i: jax.Array) -> jax.Array:
    """A row of an array. A negative index is no row, so XLA need not compare it."""
    at = [i, *(jnp.zeros_like(i) for _ in x.shape[1:])]
    sizes = 1, *x.shape[1:]
    row = jax.lax.dynamic_slice(x, at, sizes, allow_negative_indices=False)
    return row.reshape(x.shape[1:])


def _with_row(x: jax.Array, i: jax.Array, row: jax.Array) -> jax.Array:
    at = [i, *(jnp.zeros_like(i) for _ in x.shape[1:])]
    update = row.reshape(1, *row.shape)
    return jax.lax.dynamic_update_slice(x, update, at, allow_negative_indices=False)


def paused(eqn: _t.JaxprEquation, pause: Pause, n_kept: int) -> list[_t.JaxprEquation]:
    """A rewritten loop that pauses.

    It carries the number of its step first, then `n_kept` values that it keeps.
    """
    loop = _of_scan(eqn) if eqn.primitive.name == "scan" else _of_while(eqn)
    inner = open_jaxpr(loop.body)
    at_pause = [same_type(x) for x in loop.carried]
    now = [same_type(x) for x in loop.carried]
    kept_positions = [loop.carried.index(v) for v in pause.states]
    steps = _inner_loop(eqn, loop, pause, kept_positions, at_pause, now)
    programs_own = slice(1 + n_kept, len(now) - loop.n_stacked)
    stacked = now[len(now) - loop.n_stacked :]
    operands = [
        *(at_pause[0], now[0]),
        *(now[at] for at in kept_positions),
        *at_pause[programs_own],
        *now[programs_own],
        *stacked,
        *pause.outer,
    ]

    def fn(
        step: jax.Array, next_step: jax.Array, *values: jax.Array
    ) -> Sequence[jax.Array]:
        remaining = iter(values)

        def take(count: int) -> list[jax.Array]:
            return [next(remaining) for _ in range(count)]

        return pause.fn(
            Pausing(
                turns=(_turn(loop, step), _turn(loop, next_step)),
                states=take(len(kept_positions)),
                at_last_pause=take(len(at_pause[programs_own])),
                now=take(len(now[programs_own])),
                stacked=take(len(stacked)),
                outer=take(len(pause.outer)),
            )
        )

    # What is done in a pause has calls, which gather what they get on one device. The
    # program's own arrays keep their shardings.
    pausing, changes = traced(fn, operands, is_apart=True)
    results: list[_t.Atom] = [*now]
    for at, change in zip(kept_positions, changes, strict=True):
        results[at] = change
    # The inner loop's operands are now inputs of the outer one's body, and a variable
    # belongs to one level: so they get new ones there.
    cond_consts = [same_type(x) for x in loop.cond_consts]
    body_consts = [same_type(x) for x in loop.body_consts]
    steps = steps.replace(invars=[*cond_consts, at_pause[0], *body_consts, *at_pause])
    outer_body = changed(
        loop.body,
        invars=[*cond_consts, *body_consts, *pause.outer, *at_pause],
        outvars=results,
        eqns=[steps, *pausing],
        debug_info=inner.debug_info.with_unknown_names(),
    )
    params = {
        "cond_jaxpr": loop.cond,
        "cond_nconsts": len(cond_consts),
        "body_jaxpr": outer_body,
        "body_nconsts": len(cond_consts) + len(body_consts) + len(pause.outer),
    }
    operands = [*loop.cond_consts, *loop.cond_consts, *loop.body_consts, *pause.outer]
    operands += loop.starts
    return [*loop.first, jaxprs.while_loop(eqn, operands, loop.results, params)]


def _turn(loop: _While, step: jax.Array) -> jax.Array:
    """How many steps were run before this one."""
    if step.ndim:  # of rows that run, all have the same number
        step = step.max()
    if loop.is_reverse:
        assert loop.length is not None, "only scans go backward"
        return loop.length - 1 - step
    return step


def _inner_loop(
    eqn: _t.JaxprEquation,
    loop: _While,
    pause: Pause,
    kept_positions: Sequence[int],
    at_pause: Sequence[_t.Var],
    results: Sequence[_t.Var],
) -> _t.JaxprEquation:
    """The steps between two pauses."""
    cond = open_jaxpr(loop.cond)
    n_cond = len(loop.cond_consts)
    start = same_type(at_pause[0])
    carried = cond.invars[n_cond:]

    def test(
        goes_on: jax.Array, start: jax.Array, step: jax.Array, *states: jax.Array
    ) -> list[jax.Array]:
        # The rows of a batched loop pause together.
        run = _turn(loop, step) - _turn(loop, start)
        return [goes_on & ((run < pause.every) & ~pause.is_time(states))]

    kept = [carried[at] for at in kept_positions]
    test_operands = [*cond.outvars, start, carried[0], *kept]
    testing, tested = traced(test, test_operands, is_apart=False)
    params = {
        "cond_jaxpr": changed(
            loop.cond,
            invars=[*cond.invars[:n_cond], start, *carried],
            outvars=tested,
            eqns=[*cond.eqns, *testing],
            debug_info=cond.debug_info.with_unknown_names(),
        ),
        "cond_nconsts": n_cond + 1,
        "body_jaxpr": loop.body,
        "body_nconsts": len(loop.body_consts),
    }
    operands = [*loop.cond_consts, at_pause[0], *loop.body_consts, *at_pause]
    return jaxprs.while_loop(eqn, operands, results, params)
