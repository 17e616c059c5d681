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

A scan becomes a while loop first (`while_parts`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from hostcall._jax import jaxprs
from hostcall._jax import types as _t
from hostcall._jax.fragments import same_type, traced
from hostcall._jax.packing import Packing, Unpacked
from hostcall._jax.versions import changed, open_jaxpr
from hostcall._jax.while_parts import WhileLoop, as_while


class Pausing(NamedTuple):
    """What is known in a pause of a loop.

    Attributes:
        turns: how many steps were run before the last pause, and are now.
        at_last_pause: what the loop carried at the last pause. Small values are read
            where they are taken from it, which is best done in a branch.
        now: what it carries now.
        stacked: the results of a scan's steps; rows of steps to come are zeros.
        states: the values of `Pause.states`.
        outer: those of `Pause.outer`.
    """

    turns: tuple[jax.Array, jax.Array]
    at_last_pause: Sequence[jax.Array]
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
    _, n_carry = jaxprs.split_of(eqn)
    stacked = eqn.outvars[n_carry:]
    operands_fit = all(map(_is_array_or_key, eqn.invars))
    results_fit = all(map(_is_array_or_key, eqn.outvars))
    return operands_fit and results_fit and all(map(jaxprs.is_array, stacked))


def _is_array_or_key(atom: _t.Atom) -> bool:
    aval = atom.aval
    if not isinstance(aval, jax.core.ShapedArray):
        return False
    is_key: bool = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)
    return is_key or jaxprs.is_array(atom)


# --- The two loops --------------------------------------------------------------------


class _OuterBody(NamedTuple):
    """The variables of the outer loop's body.

    A variable belongs to one level, so each constant has a new one here.

    Attributes:
        cond_consts, body_consts: the operands that no step changes.
        at_pause: what the loop carried at the last pause: the body's own operands.
        now: what the loop carries when the inner loop has ended.
    """

    cond_consts: list[_t.Var]
    body_consts: list[_t.Var]
    at_pause: list[_t.Var]
    now: list[_t.Var]


def paused(eqn: _t.JaxprEquation, pause: Pause, n_kept: int) -> list[_t.JaxprEquation]:
    """A rewritten loop that pauses.

    It carries the number of its step first, then `n_kept` values that it keeps.
    """
    loop = as_while(eqn)
    outer = _OuterBody(
        cond_consts=[same_type(x) for x in loop.cond_consts],
        body_consts=[same_type(x) for x in loop.body_consts],
        at_pause=[same_type(x) for x in loop.carried],
        now=[same_type(x) for x in loop.carried],
    )
    steps = _inner_loop(eqn, loop, pause, outer)
    packing, pausing, results = _pausing(loop, pause, outer, n_kept)
    body_names = open_jaxpr(loop.body).debug_info.with_unknown_names()
    outer_consts = [*outer.cond_consts, *outer.body_consts, *pause.outer]
    params = {
        "cond_jaxpr": loop.cond,
        "cond_nconsts": len(loop.cond_consts),
        "body_jaxpr": changed(
            loop.body,
            invars=[*outer_consts, *outer.at_pause],
            outvars=results,
            eqns=[*packing, steps, *pausing],
            debug_info=body_names,
        ),
        "body_nconsts": len(outer_consts),
    }
    # The inner loop, in the outer one's body, has the condition too: so its constants
    # are those of both.
    operands = [
        *loop.cond_consts,
        *loop.cond_consts,
        *loop.body_consts,
        *pause.outer,
        *loop.starts,
    ]
    return [*loop.first, jaxprs.while_loop(eqn, operands, loop.results, params)]


def _pausing(
    loop: WhileLoop, pause: Pause, outer: _OuterBody, n_kept: int
) -> tuple[list[_t.JaxprEquation], list[_t.JaxprEquation], list[_t.Atom]]:
    """The equations before the steps and those of a pause, and what the loop carries
    after it.
    """
    now = outer.now
    state_positions = _positions_of_states(loop, pause)
    # What the loop carries: the number of its step, what it keeps, the program's own
    # values, and the results of a scan's steps.
    first_stack = len(now) - loop.n_stacked
    programs_own = slice(1 + n_kept, first_stack)
    packing, packing_eqns, kept = _packed(outer.at_pause[programs_own])
    counts = {
        "states": len(pause.states),
        "at_last_pause": len(kept),
        "now": len(now[programs_own]),
        "stacked": loop.n_stacked,
        "outer": len(pause.outer),
    }
    operands = [
        outer.at_pause[0],
        now[0],
        *[now[position] for position in state_positions],
        *kept,
        *now[programs_own],
        *now[first_stack:],
        *pause.outer,
    ]

    def fn(
        step: jax.Array, next_step: jax.Array, *values: jax.Array
    ) -> Sequence[jax.Array]:
        remaining = iter(values)
        lists: dict[str, Any] = {
            name: list(itertools.islice(remaining, count))
            for name, count in counts.items()
        }
        lists["at_last_pause"] = Unpacked(packing, lists["at_last_pause"])
        turns = (loop.turn(step), loop.turn(next_step))
        return pause.fn(Pausing(turns=turns, **lists))

    # What is done in a pause has calls, which gather what they get on one device. The
    # program's own arrays keep their shardings.
    eqns, changes = traced(fn, operands, is_apart=True)
    results: list[_t.Atom] = [*now]
    for position, change in zip(state_positions, changes, strict=True):
        results[position] = change
    return packing_eqns, eqns, results


def _packed(
    variables: Sequence[_t.Var],
) -> tuple[Packing, list[_t.JaxprEquation], list[_t.Atom]]:
    """The equations that pack the small ones of some values, and the packed values."""
    packing = Packing.of(variables)
    eqns, packs = traced(packing.pack, variables, is_apart=True)
    return packing, eqns, [*packs, *[variables[n] for n in packing.apart]]


def _positions_of_states(loop: WhileLoop, pause: Pause) -> list[int]:
    """Where among the values that the loop carries those stand that a pause changes."""
    return [loop.carried.index(state) for state in pause.states]


def _inner_loop(
    eqn: _t.JaxprEquation, loop: WhileLoop, pause: Pause, outer: _OuterBody
) -> _t.JaxprEquation:
    """The steps between two pauses.

    Its condition has one more constant, the number of the step at the last pause.
    """
    cond = open_jaxpr(loop.cond)
    n_cond = len(loop.cond_consts)
    start = same_type(outer.at_pause[0])
    carried = cond.invars[n_cond:]
    states = [carried[position] for position in _positions_of_states(loop, pause)]

    def test(
        goes_on: jax.Array, start: jax.Array, step: jax.Array, *states: jax.Array
    ) -> list[jax.Array]:
        # The rows of a batched loop pause together.
        steps_run = loop.turn(step) - loop.turn(start)
        return [goes_on & ((steps_run < pause.every) & ~pause.is_time(states))]

    test_operands = [*cond.outvars, start, carried[0], *states]
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
    operands = [
        *outer.cond_consts,
        outer.at_pause[0],
        *outer.body_consts,
        *outer.at_pause,
    ]
    return jaxprs.while_loop(eqn, operands, outer.now, params)
