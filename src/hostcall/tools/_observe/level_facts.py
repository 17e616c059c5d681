"""What is known of a level before it runs: buffers, fills, what a replay needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np

from hostcall._jax import Atom, Jaxpr, JaxprEquation, Var, jaxprs, tracing
from hostcall._jax.rewriting import Level
from hostcall.tools._observe.running_again import COLLECTIVES, runs_again

UPDATES = {  # operand 0 may be changed in place; the index of the operand that is new
    "dynamic_update_slice": 1,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul"), 2),
}
_READS = {"dynamic_slice", "gather"}


def can_hand_on(eqn: JaxprEquation) -> bool:
    return eqn.primitive.name in COLLECTIVES and any(map(jaxprs.is_float, eqn.invars))


def needed_of(jaxpr: Jaxpr, read: Iterable[Var]) -> Iterator[Var]:
    """What the host needs to run these equations again."""
    once = [v for eqn in jaxpr.eqns if not runs_again(eqn) for v in eqn.outvars]
    for v in (*jaxpr.constvars, *jaxpr.invars, *once, *read):
        is_array = isinstance(v.aval, jax.core.ShapedArray)  # or a key
        if is_array and v.aval.dtype != jax.dtypes.float0 and not jaxprs.is_dropped(v):
            yield v


def carried_of(level: Level) -> dict[Atom, Var]:
    """The input of each result that a loop carries to its next step."""
    if level.inside is None or level.kind not in jaxprs.LOOPS:
        return {}
    consts, carry = jaxprs.split_of(level.inside.eqn)
    inputs = level.jaxpr.invars[consts : consts + carry]
    pairs = zip(level.jaxpr.outvars, inputs, strict=False)
    return {result: x for result, x in pairs if not tracing.is_literal(result)}


def buffers_of(
    level: Level, carried: dict[Atom, Var]
) -> tuple[set[Var], list[Atom], list[Var]]:
    """Carried values that are only read and updated in place: the variables; the
    updates that can be bad; and what is read.
    """
    buffers = set[Var]()
    updates = list[Atom]()
    read = list[Var]()
    for result, start in carried.items():
        chain = [start]
        new = list[Atom]()
        old = list[Var]()
        uses = (use for var in chain for use in level.uses.get(var, ()))  # which grows
        for at, position in uses:
            if at < 0:
                continue
            eqn = level.jaxpr.eqns[at]
            name = eqn.primitive.name
            if position == 0 and name in UPDATES:
                chain += eqn.outvars
                new.append(eqn.invars[UPDATES[name]])
            elif position == 0 and name in _READS:
                old += eqn.outvars
            else:
                break
        else:  # it has no other uses
            if len(chain) > 1 and result in chain:
                buffers |= set(chain)
                updates += filter(jaxprs.is_float, new)
                read += old
    return buffers, updates, read


_FILLS = {
    *("broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "expand_dims"),
    *("copy", "copy_p", "stop_gradient", "optimization_barrier"),
}


def fill_of(level: Level, atom: Atom) -> float | None:
    """The real number that all elements of a value are, if the program says so.

    Of an infinity the sign may be another one, and elements may be NaN: a solver has
    its buffers filled with an infinity times the direction of time.
    """

    def of_input(var: Atom) -> float | None:
        if level.outer is None or level.inside is None or var not in inputs:
            return None
        if level.kind not in jaxprs.CALLS:  # a step has another one each time
            return None
        return fill_of(level.outer, level.inside.eqn.invars[inputs.index(var)])

    inputs = level.jaxpr.invars
    return _fill_in(level.jaxpr, atom, of_input)


def _fill_in(
    jaxpr: Jaxpr, atom: Atom, of_input: Callable[[Atom], float | None]
) -> float | None:
    if tracing.is_literal(atom):
        is_real = np.ndim(atom.val) == 0 and not np.iscomplexobj(atom.val)
        return float(atom.val) if is_real else None
    eqn = next((e for e in jaxpr.eqns if atom in e.outvars), None)
    if eqn is None:
        return of_input(atom)
    name = eqn.primitive.name
    if name in _FILLS:
        operand = eqn.invars[eqn.outvars.index(atom)]
        return _fill_in(jaxpr, operand, of_input)
    if name == "mul":
        factors = [_fill_in(jaxpr, x, of_input) for x in eqn.invars]
        infinite = (x for x in factors if x is not None and np.isinf(x))
        return next(infinite, None)
    if name not in jaxprs.CALLS:
        return None
    (inner,) = jaxprs.inners(eqn)

    def of_operand(var: Atom) -> float | None:
        if var not in inner.old.invars:
            return None
        operand = eqn.invars[inner.old.invars.index(var)]
        return _fill_in(jaxpr, operand, of_input)

    result = inner.old.outvars[eqn.outvars.index(atom)]
    return _fill_in(inner.old, result, of_operand)
