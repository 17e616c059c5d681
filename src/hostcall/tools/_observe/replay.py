"""Finds where a bad value comes from, by running equations again on the host.

Each equation is run alone. Each bad element of a result (NaN or infinite) gets a cause
(`causes.py`), a number in an array of the value's shape.

Calls and loops are run as a whole, and looked into only if a result of theirs is bad: a
loop, step by step, and only steps with bad values of a new kind equation by equation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from hostcall._jax import Atom, Jaxpr, JaxprEquation, Var, jaxprs, tracing
from hostcall._jax.places import EqnPath
from hostcall.tools._observe import in_numpy
from hostcall.tools._observe.causes import (
    FIRST_ORIGIN,
    INNOCENT,
    Causes,
    Origin,
    RuleCall,
    Search,
    handed_on,
    is_float,
    kinds_of,
    mixed,
    worst,
)
from hostcall.tools._observe.running_again import (
    Value,
    devices_may_part,
    runs_again,
    scan_steps,
    while_steps,
)


@dataclass
class Frame:
    """Equations that are run again, and what is known of their variables.

    Attributes:
        inside: the place of the equation that they are in.
        steps: those of the loops around.
        values: of variables, as far as they are known.
        causes: of variables that have bad elements.
        from_others: results of collectives whose operands were bad on some device.
    """

    jaxpr: Jaxpr
    inside: EqnPath | None
    steps: RuleCall
    search: Search
    values: dict[Var, Value] = field(default_factory=dict)
    causes: dict[Var, Causes] = field(default_factory=dict)
    from_others: frozenset[Var] = frozenset()

    def run(self) -> None:
        bad = self.search.is_bad
        for eqn in self.jaxpr.eqns:
            place = EqnPath(eqn, self.inside)
            operands = [self.value(atom) for atom in eqn.invars]
            results = [self.values.get(var) for var in eqn.outvars]
            again = runs_again(eqn)
            if again and any(x is None for x in results):
                # What follows from a value that is not known, is not known either.
                if any(x is None for x in operands):
                    continue
                try:
                    results = in_numpy.evaluate(eqn, operands)
                except Exception as error:  # made for another platform, for example
                    self.search.skipped.append(f"{eqn.primitive.name} ({error})")
                    continue
                self.values |= zip(eqn.outvars, results, strict=True)
            if any(map(bad, results)):
                self._find_causes(place, operands, results, again)

    def value(self, atom: Atom) -> Value:
        if tracing.is_literal(atom):
            return np.asarray(atom.val, atom.aval.dtype)  # some are Python's numbers
        return self.values.get(atom)

    def cause(self, atom: Atom) -> Causes | None:
        if tracing.is_literal(atom):
            return self.search.innocent(self.value(atom), is_constant=True)
        return self.causes.get(atom)

    # --- One equation -----------------------------------------------------------------

    def _find_causes(
        self, place: EqnPath, operands: list[Value], results: list[Value], again: bool
    ) -> None:
        eqn = place.eqn
        operand_causes = [self.cause(atom) for atom in eqn.invars]
        is_known = all(x is not None for x in operands)
        is_entered = again and is_known and bool(jaxprs.inners(eqn))
        if is_entered:
            causes_inside = self._inside(place, operands, operand_causes, results)
        for n, (var, result) in enumerate(zip(eqn.outvars, results, strict=True)):
            bad = self.search.bad(result)
            if not bad.any():
                continue
            if again and not is_known:  # of a buffer, left out
                causes = np.asarray(max(worst(operand_causes), INNOCENT))
            elif is_entered:
                causes = causes_inside[n]
            elif again:
                causes = handed_on(eqn, operands, operand_causes, n, np.asarray(result))
            else:
                causes = self._of_once(
                    place, var, operands, operand_causes, np.asarray(result)
                )
            causes = np.where(bad, np.broadcast_to(causes, bad.shape), 0)
            self.causes[var] = self._linked(
                place, causes, np.asarray(result), operands, is_entered
            )

    def _linked(
        self,
        place: EqnPath,
        causes: Causes,
        result: np.ndarray,
        operands: list[Value],
        is_entered: bool,
    ) -> Causes:
        """Causes of a result as further links of their chains. Bad elements that have
        none were made here.
        """
        bad = self.search.bad(result)
        new = np.where(causes == INNOCENT, INNOCENT, 0)
        for cause in np.unique(causes[bad]).tolist():
            if cause == INNOCENT:
                continue
            which = bad & (causes == cause)
            if cause >= FIRST_ORIGIN and is_entered:  # equations inside are the links
                new = np.where(which, cause, new)
                continue
            nans = which & np.isnan(result)
            first = np.argwhere(nans if nans.any() else which)[0]
            at = tuple(map(int, first))
            texts = [shown_operand(x, at, result.shape) for x in operands]
            cause_origin = self.search.origin(cause)
            origin = Origin(place, self.steps, cause_origin, at, result[at], texts)
            new = np.where(which, self.search.add(origin, cause), new)
        return new

    def _of_once(
        self,
        place: EqnPath,
        var: Var,
        operands: list[Value],
        operand_causes: list[Causes | None],
        result: np.ndarray,
    ) -> Causes:
        """The causes of a result that the device has handed over."""
        if jaxprs.inners(place.eqn):
            # Where what is inside has been looked at, it has told what it made.
            cause = worst(operand_causes)
            if cause >= FIRST_ORIGIN or not devices_may_part(place):
                return np.asarray(max(cause, INNOCENT))
            has_infinity = any(map(_is_infinite, _literals(place.eqn)))
            innocent = np.where(np.isnan(result), cause, INNOCENT)
            return innocent if has_infinity else np.asarray(cause)
        if var in self.from_others and not worst(operand_causes):
            return np.asarray(INNOCENT)  # the device that made it tells
        return mixed(operands, operand_causes, result)

    # --- Calls, branches and loops ----------------------------------------------------

    def _inside(
        self,
        place: EqnPath,
        operands: list[Value],
        operand_causes: list[Causes | None],
        results: list[Value],
    ) -> list[Causes]:
        """The causes of the results of a call, a branch or a loop."""
        eqn = place.eqn
        inners = jaxprs.inners(place.eqn)
        if eqn.primitive.name in jaxprs.LOOPS:
            return self.in_loop(place, operands, operand_causes, len(results))
        inner = inners[int(operands[0]) if eqn.primitive.name == "cond" else -1]
        values = operands[inner.begin :]
        causes = operand_causes[inner.begin :]
        frame = self._entered(place, inner.jaxpr, values, causes, self.steps)
        result_causes = []
        for atom in frame.jaxpr.outvars:
            cause = frame.cause(atom)
            if frame.value(atom) is None:  # not known: any operand may be the cause
                cause = np.asarray(worst(operand_causes))
            result_causes.append(np.asarray(0) if cause is None else cause)
        return result_causes

    def _entered(
        self,
        place: EqnPath,
        jaxpr: Jaxpr,
        values: Sequence[Value],
        causes: Sequence[Causes | None],
        steps: RuleCall,
    ) -> Frame:
        """The equations of an inner jaxpr, after they were run with these inputs."""
        body, consts = jaxprs.opened(jaxpr)
        frame = Frame(body, place, steps, self.search)
        for var, const in zip(body.constvars, consts, strict=True):
            frame.values[var] = const
            frame.causes[var] = self.search.innocent(const, is_constant=True)
        frame.values |= zip(body.invars, values, strict=True)
        pairs = zip(body.invars, causes, strict=True)
        frame.causes |= {var: cause for var, cause in pairs if cause is not None}
        frame.run()
        return frame

    def in_loop(
        self,
        place: EqnPath,
        operands: list[Value],
        operand_causes: list[Causes | None],
        n_results: int,
        first: int = 0,
        last: int | None = None,
    ) -> list[Causes]:
        """The causes of a loop's results: those of its first step that makes a bad
        value, between these steps.

        `operands` are those of the loop, with what it carries at the first step.
        """
        eqn = place.eqn
        inner = jaxprs.inners(eqn)[-1]
        n_consts, n_carry = jaxprs.split_of(eqn)
        carried = slice(n_consts, n_consts + n_carry)
        is_scan = eqn.primitive.name == "scan"
        all_steps = scan_steps if is_scan else while_steps
        steps = all_steps(eqn, operands, first)
        if last is not None:
            steps = itertools.islice(steps, last - first + 1)
        cause_before = worst(operand_causes)
        known_kinds = [np.zeros((), np.uint8)] * n_results
        was_looked_into = False
        for count, (step, values, new) in enumerate(steps):
            # A step is looked into if an element is bad in a way in which neither what
            # the step got was bad there, nor the result of a step before.
            kinds = [self._kinds(x) for x in new]
            kinds_before = [self._kinds(x) for x in values[carried]]
            kinds_before += known_kinds[n_carry:]
            triples = zip(kinds, kinds_before, known_kinds, strict=True)
            if not any(np.any(now & ~(old | known)) for now, old, known in triples):
                continue
            causes = operand_causes[inner.begin :]
            if count:  # what is bad was given, or came from the steps before
                cause = max(cause_before, INNOCENT)
                bad = [self.search.bad(x) for x in values[carried]]
                causes[carried] = [np.where(flags, cause, 0) for flags in bad]
            if is_scan:
                causes[carried.stop :] = _of_row(step, causes[carried.stop :])
            result_causes = self._in_step(place, inner.jaxpr, step, values, causes, new)
            first_origin = worst(result_causes)
            if first_origin >= FIRST_ORIGIN:
                worst_of_each = [worst([c]) for c in result_causes]
                return [
                    np.asarray(c if c >= FIRST_ORIGIN else first_origin)
                    for c in worst_of_each
                ]
            pairs = zip(new, result_causes, strict=True)
            if any(np.any(self.search.bad(x) & (c == 0)) for x, c in pairs):
                # A step has handed out a NaN that is a literal, or what it computed
                # from is not known.
                return [np.asarray(0)] * n_results
            was_looked_into = True
            known_kinds = [a | b for a, b in zip(known_kinds, kinds, strict=True)]
        cause = max(cause_before, INNOCENT) if was_looked_into else cause_before
        return [np.asarray(cause)] * n_results

    def _in_step(
        self,
        place: EqnPath,
        body: Jaxpr,
        step: int,
        values: Sequence[Value],
        causes: Sequence[Causes | None],
        new: Sequence[Value],
    ) -> list[Causes]:
        """The causes of what a step of a loop has made, `new`, of its inputs."""
        frame = self._entered(place, body, values, causes, (*self.steps, step))
        result_causes = []
        for atom, x in zip(frame.jaxpr.outvars, new, strict=True):
            cause = frame.cause(atom)
            # Rows that have stopped are bad in the frame, and not in `new`.
            is_kept = self.search.bad(x)
            result_causes.append(np.where(is_kept, 0 if cause is None else cause, 0))
        return result_causes

    def _kinds(self, value: Value) -> np.ndarray:
        return kinds_of(value, self.search.infs)


def _of_row(step: int, causes: Sequence[Causes | None]) -> list[Causes | None]:
    """The causes of the rows that a step of a scan gets."""
    # Those of integers are one number.
    return [c[step] if c is not None and np.ndim(c) else c for c in causes]


def _literals(eqn: JaxprEquation) -> Iterator[Value]:
    for inner in jaxprs.within(eqn):
        for atom in inner.invars:
            if tracing.is_literal(atom):
                yield atom.val


def _is_infinite(value: Value) -> bool:
    try:
        return bool(np.isinf(value).any())
    except TypeError:
        return False


def shown_operand(x: Value, index: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """An operand, at the bad element of the result if it has this shape."""
    if x is None:
        return "?"
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # typed keys
        return str(x.dtype)
    array = np.asarray(x)
    if array.shape in ((), shape):
        element = array[index if array.shape else ()]
        return f"{element:.6g}" if is_float(array) else str(element)
    kind = f"{array.dtype}[{','.join(map(str, array.shape))}]"
    if array.size and is_float(array) and not np.iscomplexobj(array):
        low = float(array.min())
        high = float(array.max())
        return f"{kind} from {low:.6g} to {high:.6g}"
    return kind
