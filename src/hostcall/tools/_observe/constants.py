"""Values that a program computes of its literals alone, as far as NumPy can."""

from __future__ import annotations

import math

import numpy as np

from hostcall._jax import Atom, Jaxpr, Var, jaxprs, tracing
from hostcall._jax.rewriting import Level
from hostcall.tools._observe import in_numpy

_ELEMENTS_MOST = 1 << 14


def constants_of(level: Level) -> dict[Var, np.ndarray]:
    """The small values of a level that are the same in each run, where that is known
    before the program is compiled.
    """
    known: dict[Var, np.ndarray] = {}
    is_call = level.kind in jaxprs.CALLS
    if is_call and level.outer is not None and level.inside is not None:
        known_outside = constants_of(level.outer)
        operands = level.inside.eqn.invars
        for variable, operand in zip(level.jaxpr.invars, operands, strict=True):
            value = _value(operand, known_outside)
            if value is not None:
                known[variable] = value
    _compute(level.jaxpr, known)
    return known


def _compute(jaxpr: Jaxpr, known: dict[Var, np.ndarray]) -> None:
    """Adds the values of equations whose operands are all known."""
    for eqn in jaxpr.eqns:
        operands = [_value(x, known) for x in eqn.invars]
        values = [x for x in operands if x is not None]
        if eqn.primitive.name in jaxprs.CALLS:
            (inner,) = jaxprs.inners(eqn)
            pairs = zip(inner.old.invars, operands, strict=True)
            known_inside = {v: x for v, x in pairs if x is not None}
            _compute(inner.old, known_inside)
            results = [_value(x, known_inside) for x in inner.old.outvars]
        elif len(values) == len(operands) and all(map(_is_small, eqn.outvars)):
            results = in_numpy.evaluate_by_numpy(eqn, values) or []
        else:
            continue
        pairs_of_results = zip(eqn.outvars, results, strict=False)
        known |= {v: x for v, x in pairs_of_results if x is not None}


def _value(atom: Atom, known: dict[Var, np.ndarray]) -> np.ndarray | None:
    if not tracing.is_literal(atom):
        return known.get(atom)
    return np.asarray(atom.val, atom.aval.dtype) if _is_small(atom) else None


def _is_small(atom: Atom) -> bool:
    return jaxprs.is_array(atom) and math.prod(atom.aval.shape) <= _ELEMENTS_MOST
