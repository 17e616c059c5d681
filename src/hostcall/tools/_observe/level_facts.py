"""What is known of a level before it runs: buffers, fills, what a replay needs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from hostcall._jax import Atom, Jaxpr, JaxprEquation, Var, jaxprs, pauses, tracing
from hostcall._jax.places import EqnPath
from hostcall._jax.rewriting import Level
from hostcall.tools._observe.running_again import COLLECTIVES, runs_again


class Update(NamedTuple):
    """How an operation changes an array in place.

    Attributes:
        buffer: which operand the array is.
        new: which operand is written into it.
        is_sure: whether it is always written, and not only if another operand says so.
    """

    buffer: int
    new: int
    is_sure: bool = True


_SCATTERS = "scatter", "scatter-add", "scatter-sub", "scatter-mul"
UPDATES = {
    "dynamic_update_slice": Update(0, 1),
    **dict.fromkeys(_SCATTERS, Update(0, 2)),
    # equinox's, by which diffrax saves what it has accepted.
    "maybe_set": Update(1, 2, is_sure=False),
}
_READS = {"dynamic_slice", "gather"}


def is_copy(eqn: JaxprEquation) -> bool:
    """Whether a result is its operand, so that XLA makes none."""
    if eqn.primitive.name == "convert_element_type":  # of a weak type
        return bool(eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype)
    return eqn.primitive.name in ("copy", "copy_p")


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
    level: Level, carried: dict[Atom, Var], all_are_sure: bool = True
) -> tuple[set[Var], list[Atom], list[Var]]:
    """Carried values that are only read and updated in place: the variables; the
    updates that can be bad; and what is read.

    `all_are_sure`: without those whose updates may not be written, and be bad then.
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
            update = UPDATES.get(name)
            if is_copy(eqn):
                chain += eqn.outvars
            elif (
                update and position == update.buffer and update.is_sure >= all_are_sure
            ):
                chain += eqn.outvars
                new.append(eqn.invars[update.new])
            elif position == 0 and name in _READS:
                old += eqn.outvars
            else:
                break
        else:  # it has no other uses
            if new and result in chain:
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


def is_constant(level: Level, atom: Atom) -> bool:
    """Whether a variable has the same value in each run of the program."""
    if tracing.is_literal(atom) or atom in level.jaxpr.constvars:
        return True
    if level.outer is None or level.inside is None:
        return False
    eqn = level.inside.eqn
    inner = next((x for x in jaxprs.inners(eqn) if x.old is level.jaxpr), None)
    if inner is None or atom not in level.jaxpr.invars:
        return False
    at = level.jaxpr.invars.index(atom)
    if level.kind in jaxprs.LOOPS and at >= inner.end - inner.begin:
        return False  # it differs from step to step
    return is_constant(level.outer, eqn.invars[inner.begin + at])


_MOVES = {
    *("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "rev"),
    *("slice", "concatenate", "copy", "copy_p", "stop_gradient"),
}
# Operand 0 says which of the others is chosen; the second one is equinox's, by which
# all solvers of its family keep what they carry when they have ended.
_CHOICES = {"select_n", "select_if_vmap"}


def needs_no_look(level: Level, atom: Atom) -> bool:
    """Whether a value has only elements of what the level was given, of literals that
    are no NaNs, and of buffers that an outermost loop has looked at: equations have
    moved and chosen them, and have computed nothing.

    So what is bad in it is innocent, as in a mask, or is looked at where it was made.
    """

    def of_input(var: Atom) -> bool:
        return var in level.jaxpr.invars and not is_constant(level, var)

    has_outermost_loops = not level.loops and not level.meshes
    return _is_only_moved(level.jaxpr, atom, of_input, has_outermost_loops)


def _is_only_moved(
    jaxpr: Jaxpr,
    atom: Atom,
    of_input: Callable[[Atom], bool],
    has_outermost_loops: bool,
) -> bool:
    @functools.cache  # a value may be chosen many times
    def of_variable(var: Var) -> bool:
        eqn = next((e for e in jaxpr.eqns if var in e.outvars), None)
        if eqn is None:
            return of_input(var)
        name = eqn.primitive.name
        index = eqn.outvars.index(var)
        if name in _MOVES or _holds_all(eqn):
            return all(map(of_atom, eqn.invars))
        if name in _CHOICES:
            return all(map(of_atom, eqn.invars[1:]))
        if name == "optimization_barrier":
            return of_atom(eqn.invars[index])
        if name in jaxprs.LOOPS:
            return has_outermost_loops and _is_compared_in_pauses(eqn, index)
        if name not in jaxprs.CALLS:
            return False
        (inner,) = jaxprs.inners(eqn)
        inputs = inner.old.invars

        def of_operand(var: Atom) -> bool:
            return var in inputs and of_atom(eqn.invars[inputs.index(var)])

        result = inner.old.outvars[index]
        return _is_only_moved(inner.old, result, of_operand, has_outermost_loops)

    def of_atom(atom: Atom) -> bool:
        if not tracing.is_literal(atom):
            return of_variable(atom)
        return not _may_be_nan(atom)

    return of_atom(atom)


def operands_of(eqn: JaxprEquation, n: int) -> list[Atom]:
    """The operands of which a call or a branch makes its result number n."""
    operands: list[Atom] = []
    for inner in jaxprs.inners(eqn):
        inputs = _made_of(inner.old, inner.old.outvars[n])
        pairs = zip(inner.old.invars, eqn.invars[inner.begin :], strict=True)
        operands += [operand for var, operand in pairs if var in inputs]
    return operands


def _made_of(jaxpr: Jaxpr, result: Atom) -> set[Atom]:
    """The variables of which a result is made, and itself."""
    variables = set[Atom]() if tracing.is_literal(result) else {result}
    for eqn in reversed(jaxpr.eqns):
        is_call = eqn.primitive.name in (*jaxprs.CALLS, "cond")
        is_entered = is_call and bool(jaxprs.inners(eqn))
        for n, var in enumerate(eqn.outvars):
            if var in variables:
                operands = operands_of(eqn, n) if is_entered else eqn.invars
                variables |= {x for x in operands if not tracing.is_literal(x)}
    return variables


def _holds_all(eqn: JaxprEquation) -> bool:
    """Whether it converts numbers to a type in which each of them is finite."""
    if eqn.primitive.name != "convert_element_type":
        return False
    old = eqn.invars[0].aval.dtype
    new = eqn.outvars[0].aval.dtype
    is_real = all(jax.dtypes.issubdtype(x, np.floating) for x in (old, new))
    return is_real and jax.numpy.finfo(new).max >= jax.numpy.finfo(old).max


def _may_be_nan(literal: Atom) -> bool:
    is_float = jax.dtypes.issubdtype(literal.aval.dtype, np.inexact)
    return bool(is_float and np.isnan(literal.val).any())


def can_pause(level: Level) -> bool:
    """Whether a loop, whose body the level is, looks at what it carries in pauses."""
    assert level.inside is not None, "a loop's body is inside of the loop"
    all_again = all(runs_again(eqn) for eqn in level.jaxpr.eqns)
    return all_again and pauses.can_pause(level.inside.eqn)


def compared_in_pauses(level: Level) -> set[Var]:
    """The buffers of a loop that pauses. There each element is compared with what it
    was at the last pause, and at first with what the loop was given.
    """
    buffers, _, _ = buffers_of(level, carried_of(level), all_are_sure=False)
    return buffers


def _is_compared_in_pauses(loop: JaxprEquation, index: int) -> bool:
    inners = jaxprs.inners(loop)
    if not inners:
        return False
    body = Level(inners[-1].old, loop.primitive.name, EqnPath(loop))
    result = body.jaxpr.outvars[index]
    is_variable = not tracing.is_literal(result)
    return is_variable and can_pause(body) and result in compared_in_pauses(body)
